"""The Spark session that tests share: one in each process of tests, of two cores, with Delta.

A command line that is run in the process of the tests starts a session of its own and ends its JVM with it. Before such
a test the shared one is ended (tests/conftest.py); the next file that asks for it has it started again.
"""

from __future__ import annotations

import sys
from typing import Any

_session: list[Any] = []


def shared_session() -> Any:
    from keytail.spark import delta
    from keytail.spark.session import local_session

    if not _session:
        # Small data needs no 200 tasks for each shuffle, which is Spark's default.
        settings = {**delta.session_settings(None), "spark.sql.shuffle.partitions": "2"}
        _session.append(local_session("local[2]", "keytail tests", settings))
    return _session[0]


def end_shared_session() -> None:
    if _session:
        _session.pop().stop()
        sys.modules["keytail.spark.session"].end_jvm()
