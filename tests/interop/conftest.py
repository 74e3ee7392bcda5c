"""The `kafka` fixture: one JVM with Kafka's storage classes for all tests of a process, of other folders too.

Where Java, Maven or the jars are missing its tests are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
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
            pytest.fail(f"KEYTAIL_NO_SKIP=1, and there is no Kafka to compare with: {reason}")
        pytest.skip(f"no Kafka to compare with: {reason}")


@functools.cache
def _harness() -> Kafka:
    """A fixture that is imported is another in each module; what it gives is not."""
    harness = Kafka()
    atexit.register(harness.close)
    return harness


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of fsyncs then cost nothing."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="keytail-", dir=parent))
    yield path
    shutil.rmtree(path)
