"""The Spark session that tests share: one in each process of tests, of two cores, with Delta.

A command line that is run in the process of the tests starts a session of its own and ends its JVM with it, unless
`lend_session` gives it the shared one. Before a test of the former kind the shared one is ended (tests/conftest.py);
the next file that asks for it has it started again.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

_session: list[Any] = []


def shared_session() -> Any:
    from keytail.spark import delta
    from keytail.spark.session import local_session

    if not _session:
        _session.append(local_session("local[2]", "keytail tests", delta.session_settings(None)))
    return _session[0]


def end_shared_session() -> None:
    if _session:
        _session.pop().stop()
        sys.modules["keytail.spark.session"].end_jvm()


def lend_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines in this process use the shared session, and leave it as it is."""
    session = sys.modules["keytail.spark.session"]
    monkeypatch.setattr(session, "local_session", lambda *_, **__: shared_session())
    monkeypatch.setattr(session, "_stop", lambda spark: None)
    monkeypatch.setattr(session, "end_jvm", lambda: None)
