"""A pytest plugin: how long each folder of tests took, printed at the end, so that the slow one shows."""

from __future__ import annotations

from collections import defaultdict

_seconds: dict[str, float] = defaultdict(float)
_tests: dict[str, int] = defaultdict(int)


def pytest_runtest_logreport(report):
    folder = report.nodeid.split("::")[0].rpartition("/")[0]
    _seconds[folder] += report.duration
    _tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("time by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:8.1f} s  {_tests[folder]:5d} tests  {folder}")
