"""The fixture `kafka`: one JVM with Kafka's storage classes for all tests of a process, in any folder. Without Java,
Maven or the jars, its tests are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.kafka import Kafka, KafkaUnavailable


@pytest.fixture(scope="session")
def kafka() -> Kafka:
    try:
        return _harness()
    except KafkaUnavailable as reason:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, but there is no Kafka to compare with: {reason}")
        pytest.skip(f"no Kafka to compare with: {reason}")


@functools.cache
def _harness() -> Kafka:
    """Return the harness, which is shared by the fixtures of all modules that import `kafka`."""
    harness = Kafka()
    atexit.register(harness.close)
    return harness


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """Yield a directory in memory, if possible, where fsync takes no time."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="keytail-", dir=parent))
    yield path
    shutil.rmtree(path)
