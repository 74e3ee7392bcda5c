"""Runs tests in this process on a changed core, for `tests/mutation.py`, which forks a process for each run.

No file is changed: Python's import receives the changed source of one module. The kernels of the core are not compiled
but run as plain Python, so that a changed kernel need not be compiled, and the lines that a test executes are known.
Compiled kernels can still call them, and inline them without the change.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import Phase, settings
from numba.extending import register_jitable

MEMORY_BYTES = 12 << 30
WAITING_S = 1200  # limit of one test in wall-clock time, high because the machine may be busy


def _of_walk() -> dict[str, object]:
    from keytail.kernels.native import equal_bytes

    @register_jitable
    def memcmp(a, i, b, j, n):
        return 0 if equal_bytes(a, i, b, j, n) else 1

    return {"_memcmp": memcmp}


def _of_step() -> dict[str, object]:
    from keytail.kernels.opening.decoders import NOT_PLAIN

    return {"decompress_plain": lambda *given: NOT_PLAIN}  # the caller decompresses the block in this case


# Functions that plain Python cannot call.
REPLACED: Mapping[str, Callable[[], dict[str, object]]] = {
    "keytail.kernels.walk": _of_walk,
    "keytail.kernels.proof.step": _of_step,
}


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str | None) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        if self._source is None:
            return super().get_code(fullname)
        return compile(self._source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(REPLACED.get(module.__name__, dict)())


class _Finder(MetaPathFinder):
    """Finds the modules `names`, and supplies the changed sources."""

    def __init__(self, names: Collection[str], sources: Mapping[str, str]) -> None:
        self._names, self._sources = names, sources

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None, name
        spec.loader = _Loader(name, spec.origin, self._sources.get(name))
        return spec


def _as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that it behaves like compiled code: rows have attributes, and results are not NumPy scalars.
    """

    @functools.wraps(function)
    def called(*given: Any) -> Any:
        found = function(*(_records(item) if isinstance(item, np.ndarray) else item for item in given))
        return tuple(map(_value, found)) if type(found) is tuple else _value(found)

    return called


def _records(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype((np.record, array.dtype))) if array.dtype.names else array


def _value(item: Any) -> Any:
    return item.item() if isinstance(item, np.generic) else item


def change_imports(plain: Collection[str], sources: Mapping[str, str]) -> None:
    """Do not compile the kernels of `plain` and of tests, and change the modules of `sources` (dotted name: source)."""
    sys.meta_path.insert(0, _Finder({*REPLACED, *sources}, sources))
    from keytail.kernels import jit

    def decorator(compiled: Callable[..., Any], uncompiled: Callable[..., Any]) -> Callable[..., Any]:
        def decorate(function: Any = None, *arguments: Any, **options: Any) -> Any:
            if function is None:
                return lambda given: decorate(given, **options)
            module = getattr(function, "__module__", "")
            if module in plain or module.startswith("tests."):
                return uncompiled(function)
            # The cache contains the unchanged function.
            return njit(function) if module in sources else compiled(function, *arguments, **options)

        return decorate

    njit = numba.njit
    jit.kernel = decorator(jit.kernel, _as_compiled)
    numba.njit = decorator(njit, register_jitable)  # other kernels may call the function
    # Code that is compiled with an inlined changed function must not be saved for other processes.
    jit.IS_WRITABLE = jit.IS_WRITABLE and not sources


class SelectedTests:
    """Runs only the tests `seconds`, in this order, each with a time limit based on its seconds, and records the first
    failure.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        of_id = {item.nodeid: item for item in items}
        items[:] = [of_id[name] for name in self._seconds if name in of_id]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _limit_time(10 + 5 * self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class Lines:
    """Records the seconds of each test that passes, and the lines of `files` that it executes.

    A test fails after `limit_cpu_s`, and the remaining cases of a test that has run for longer are skipped.
    """

    def __init__(self, files: Collection[str], limit_cpu_s: float) -> None:
        self._limit_cpu_s = limit_cpu_s
        self._of_file: dict[str, set[int]] = {file: set() for file in files}
        self._of_code: dict[CodeType, Callable[..., Any] | None] = {}
        self._start_s = 0.0
        self._of_function: dict[str, float] = defaultdict(float)
        self.tests: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}  # test: reason

    def pytest_sessionstart(self) -> None:
        signal.signal(signal.SIGVTALRM, self._end_test)
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def _end_test(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {self._limit_cpu_s} CPU seconds")

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._of_code:
            self._of_code[code] = self._tracer(self._of_file.get(code.co_filename))
        return self._of_code[code]

    @staticmethod
    def _tracer(lines: set[int] | None) -> Callable[..., Any] | None:
        if lines is None:
            return None
        add = lines.add

        def on_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            add(frame.f_lineno)
            return on_line

        return on_line

    def pytest_runtest_logstart(self) -> None:
        _limit_time(self._limit_cpu_s)
        for lines in self._of_file.values():
            lines.clear()
        self._start_s = time.process_time()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._of_function[item.nodeid.partition("[")[0]] > self._limit_cpu_s:
            pytest.skip("other cases of this test took too long")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.left_out[report.nodeid] = report.longreprtext[-300:]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(time.process_time() - self._start_s, 3)
        self._of_function[nodeid.partition("[")[0]] += seconds
        if nodeid not in self.left_out:
            lines = {file: sorted(found) for file, found in self._of_file.items() if found}
            self.tests[nodeid] = {"seconds": seconds, "lines": lines}


def _limit_time(cpu_s: float) -> None:
    # The default action of both signals ends the process, even inside a kernel.
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WAITING_S)


def run_tests(files: Collection[str], plugin: object, temporary: Path, *options: str) -> int:
    """Run test files in this process, and return pytest's exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    # Failures need not be shrunk; this profile replaces the one that conftest.py loads.
    profile = {"deadline": None, "database": None, "derandomize": True, "phases": [Phase.explicit, Phase.generate]}
    settings.register_profile("mutants", **profile)

    class Profile:
        def pytest_sessionstart(self) -> None:
            settings.load_profile("mutants")

    arguments = ["-p", "no:cacheprovider", "-p", "no:timeout", "-o", "addopts=", "-m", "not interop and not spark"]
    arguments += ["-q", "-rfE", "--tb=short", "--basetemp", str(temporary / "pytest"), *options, *files]
    return int(pytest.main(arguments, plugins=[plugin, Profile()]))
