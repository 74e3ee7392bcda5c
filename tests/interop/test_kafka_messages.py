"""keytail's tables of fields of Kafka's own records equal the message definitions in Kafka's jars."""

from __future__ import annotations

import pytest

from tests.golden import kafka_messages
from tests.interop.kafka import Kafka

pytestmark = pytest.mark.interop


def test_the_file_of_kafkas_messages_is_up_to_date(kafka: Kafka) -> None:
    assert kafka_messages.PATH.read_text() == kafka_messages.current(), "run python -m tests.golden.kafka_messages"
