"""Prints the table of lib/keytail/log/FAULTS.md after the tests: the stops and faults that were tried for each
protocol.
"""

from __future__ import annotations

import itertools

from tests.crash.driver import TABLE, Counts

COLUMNS = ("protocol", "directories", "calls", "stops", "faults", "states", "distinct", "losses")


def rows(table: list[Counts]) -> list[tuple[str, ...]]:
    """Return a row for each protocol. `calls` is the number of operations of the longest action."""
    found = []
    for protocol, group in itertools.groupby(sorted(table, key=lambda item: item.protocol), lambda item: item.protocol):
        counts = [item for item in group if item.states]
        if counts:
            calls = max(item.calls for item in counts)
            sums = [
                sum(getattr(item, name) for item in counts)
                for name in ("stops", "faults", "states", "distinct_states", "losses")
            ]
            found.append((protocol, *(f"{number:,}" for number in (len(counts), calls, *sums))))
    return found


def pytest_terminal_summary(terminalreporter):
    found = rows(TABLE)
    if found:
        terminalreporter.section("stops and faults")
        for row in (COLUMNS, ("---", *["---:"] * 7), *found):
            terminalreporter.write_line(f"| {' | '.join(row)} |")
