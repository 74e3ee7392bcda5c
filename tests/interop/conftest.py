"""The fixture `kafka`: one JVM with Kafka's storage classes for all tests of a process, including those in other
folders.

Without Java, Maven or the jars, its tests are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
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
    """Return the harness. An imported fixture is a different one in each module, but its value is the same."""
    harness = Kafka()
    atexit.register(harness.close)
    return harness


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """Yield a directory in memory, if possible: thousands of fsyncs take no time there."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="keytail-", dir=parent))
    yield path
    shutil.rmtree(path)
