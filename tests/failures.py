"""A pytest plugin that prints the seed, the time by folder and, for each failure, the command that repeats it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import defaultdict

import pytest

from tests.chance import SEED

# The other KEYTAIL_ variables determine the draws and their number, so a repetition needs them.
_NOT_DRAWS = ("KEYTAIL_NO_SKIP", "KEYTAIL_CACHE_DIR", "KEYTAIL_SEED")
_seconds: dict[str, float] = defaultdict(float)
_tests: dict[str, int] = defaultdict(int)
_failed: dict[str, None] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # the worker processes of pytest-xdist print nothing
        session.config.get_terminal_writer().line(f"seed: KEYTAIL_SEED={SEED}")


def pytest_runtest_logreport(report):
    test = _without_group(report.nodeid)
    folder = test.split("::")[0].rpartition("/")[0]
    _seconds[folder] += report.duration
    _tests[folder] += report.when == "call"
    if report.failed and test not in _failed:
        _failed[test] = None
        if "PYTEST_XDIST_WORKER" not in os.environ:  # print it immediately, because a long run may be stopped
            print(f"\nfailed: {repetition(test)}", flush=True)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("time by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:8.1f} s  {_tests[folder]:5d} tests  {folder}")
    if _failed:
        terminalreporter.section("to repeat")
    for test in _failed:
        terminalreporter.write_line(repetition(test))


def repetition(test: str) -> str:
    """Return one shell command line: the seed and numbers of draws of this run, the command, and the test."""
    more = {name: value for name, value in sorted(os.environ.items()) if name.startswith("KEYTAIL_")}
    draws = {"KEYTAIL_SEED": str(SEED)} | {name: value for name, value in more.items() if name not in _NOT_DRAWS}
    command = [os.path.relpath(sys.executable), "-m", "pytest", test]
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in draws.items()), shlex.join(command)])


def _without_group(test: str) -> str:
    """Return `test` without the group name that pytest-xdist appends after an @."""
    return re.sub(r"@[^]@]*$", "", test)
