"""Kafka's FileLock and keytail's lock exclude each other, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from keytail.errors import Refused
from keytail.log import lock
from tests.interop.conftest import kafka  # noqa: F401
from tests.interop.kafka import Kafka

pytestmark = pytest.mark.interop


def test_kafkas_lock_and_ours_exclude_each_other(tmp_path: Path, kafka: Kafka) -> None:  # noqa: F811
    assert kafka.lock(tmp_path)
    with pytest.raises(Refused, match="with a lock like that of a running broker"), lock.hold([str(tmp_path)]):
        raise AssertionError("not reached")
    kafka.unlock(tmp_path)
    with lock.hold([str(tmp_path)]):
        assert not kafka.lock(tmp_path)
    assert kafka.lock(tmp_path)
    kafka.unlock(tmp_path)
