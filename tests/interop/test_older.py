"""Kafka 4.3.1 reads log dirs of 2.8.2 and 3.6.2 through the indexes that those brokers wrote, and finds the same
records.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import older
from tests.interop.kafka import Kafka

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("version", older.VERSIONS)
def test_lookups_through_old_indexes_are_correct(kafka: Kafka, version: str, tmp_path: Path) -> None:
    log_dir = older.unpack(version, tmp_path)
    for topic in (*older.topics_of(version), "transactional"):
        asked = [(at_ms, answer) for name, at_ms, answer in older.answers(version)["times"] if name == topic]
        loaded = kafka.load(log_dir / f"{topic}-0", records=False, fetch=True, timestamps=[at_ms for at_ms, _ in asked])
        assert not loaded.repaired
        assert not loaded.fetch_mismatches, topic
        found = {at_ms: item and [item[1], item[0]] for at_ms, item in loaded.timestamps.items()}
        assert found == dict(asked), topic
