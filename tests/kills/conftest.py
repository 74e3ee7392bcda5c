"""Prints a table of the kills after the tests, and replaces the reference checksum, which is too slow for these logs.
"""

from __future__ import annotations

from collections.abc import Iterator

import crc32c
import pytest

from tests.kills.checks import TABLE
from tests.reference import batches

COUNTED = ("killed", "ended", "before", "between", "after", "second", "opened", "losses")
COLUMNS = ("killed", "kills", "too late", "before", "between", "after", "of a run after a kill", "opened by Kafka",
           "losses", "states", "seconds")  # fmt: skip


@pytest.fixture(autouse=True)
def fast_checksum(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batches, "crc32c", crc32c.crc32c)
    yield


def pytest_terminal_summary(terminalreporter):
    done = [kills for kills in TABLE if kills.killed or kills.ended]
    if not done:
        return
    terminalreporter.section("what was killed")
    rows = []
    for name in dict.fromkeys(kills.name for kills in done):
        same = [kills for kills in done if kills.name == name]
        counts = [sum(getattr(kills, column) for kills in same) for column in COUNTED]
        states = len(set().union(*(kills.states for kills in same)))
        seconds = sum(kills.seconds for kills in same)
        rows.append((name, *(f"{n:,}" for n in counts), f"{states:,}", f"{seconds:.0f}"))
    for row in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows):
        terminalreporter.write_line(f"| {' | '.join(row)} |")
