"""The fields of Kafka's own records are those of the definitions in Kafka's jars."""

from __future__ import annotations

import pytest

from tests.golden import kafka_messages
from tests.interop.kafka import Kafka

pytestmark = pytest.mark.interop


def test_the_module_is_what_is_generated(kafka: Kafka) -> None:
    assert kafka_messages.MODULE.read_text() == kafka_messages.current(), "run python -m tests.golden.kafka_messages"
