"""Fixtures for a Spark session with two cores and Delta, which all tests of a test process share, and for a cluster.

A command line that runs inside a test process starts its own session and ends its JVM afterwards, unless `lend_session`
provides the shared one. tests/conftest.py ends the shared session before such a test; it is started again when a later
module requests it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from keytail.run.spark.engine import SparkEngine
from tests.run.cluster import Cluster, cluster

_session: list[Any] = []

FOR_SMALL_DATA = {
    "spark.sql.shuffle.partitions": "2",
    "spark.python.daemon.module": "tests.run.preloaded",
    # For a few rows, compiling a query takes longer than interpreting it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def shared_session() -> Any:
    from keytail.run.spark import delta
    from keytail.run.spark.session import local_session

    if not _session:
        # With the connector for S3: a session of its own would take export/test_object_store.py 7 s.
        settings = {**delta.session_settings(None, place="s3a://"), **FOR_SMALL_DATA}
        _session.append(local_session("local[2]", "keytail tests", settings))
    return _session[0]


def end_shared_session() -> None:
    if _session:
        _session.pop().stop()
        sys.modules["keytail.run.spark.session"].end_jvm()


def lend_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make command lines in this process use the shared session, without stopping it."""
    session = sys.modules["keytail.run.spark.session"]
    monkeypatch.setattr(session, "local_session", lambda *_, **__: shared_session())
    monkeypatch.setattr(session, "_stop", lambda engine: None)
    monkeypatch.setattr(session, "end_jvm", lambda: None)


def run_stream(writer: Any) -> None:
    """Run a query with the trigger `availableNow` to its end.

    Spark waits at most ten seconds for the process that plans its batches, which is too short on a busy machine: the
    query is then started again.
    """
    from pyspark.errors import StreamingQueryException

    give_up = time.monotonic() + 600
    while True:
        try:
            assert writer.start().awaitTermination(600)
            return
        except StreamingQueryException as problem:
            if "Python worker failed to connect back" not in str(problem) or time.monotonic() > give_up:
                raise


@pytest.fixture(scope="module")
def spark() -> Any:
    return shared_session()


@pytest.fixture(scope="module")
def engine(spark: Any) -> SparkEngine:
    return SparkEngine(spark)


@pytest.fixture
def on_spark(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs that start Spark use the shared session. Tests with separate processes cover its start and end."""
    lend_session(monkeypatch)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started
