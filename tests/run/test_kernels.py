"""Kernels are compiled once and in parallel before the tasks, and a signal ends a run that is compiling like any other
run.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels import jit
from keytail.run import kernels
from tests.cli.test_owner import descendants
from tests.golden import unpack

# The two kernels that take the shortest time to compile.
FEW = ("append:count", "offset_map:sum_by_size")
_COMPILE = """
    import json, os, sys
    from keytail.run import kernels
    kernels._PACE_S = 0.05
    few = [item for item in kernels.kernels_of(None) if item.kernel in {few!r}]
    kernels.kernels_of = lambda commands: few
    notes = []
    made = kernels.compile_kernels(["compact"], notes.append)
    from keytail.kernels import append, jit, offset_map
    misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in jit.KERNELS)
    print(json.dumps([made, misses, notes, jit.CACHE_FOLDER, sorted(jit.names_in_cache())]))
"""


def _start(code: str, *before: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", textwrap.dedent(code).replace("{few!r}", repr(FEW))],
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _result(process: subprocess.Popen[str]) -> tuple[list, str]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out), err


def test_the_list_has_no_duplicates_and_begins_with_the_slowest_kernel() -> None:
    listed = kernels.kernels_of(None)
    assert len({(item.kernel, json.dumps(item.types)) for item in listed}) == len(listed)
    assert [item.seconds for item in listed] == sorted((item.seconds for item in listed), reverse=True)
    assert {item.kernel for item in kernels.kernels_of(["compact"])} >= {"proof.step:step", "key_scan:scan_keys"}
    assert kernels.RARE not in {command for item in kernels.kernels_of(["compact"]) for command in item.commands}


@pytest.mark.long
def test_the_list_has_the_kernels_that_the_program_calls() -> None:
    """After a change of a kernel's arguments, run `python -m tests.run.list_kernels`."""
    code = """
        import json
        from tests.run.list_kernels import calls
        print(json.dumps([[*key, sorted(commands)] for key, commands in calls().items()]))
    """
    called, _ = _result(_start(code))
    listed = [[item.kernel, json.dumps(item.types), item.commands] for item in kernels.kernels_of(None)]
    assert sorted(listed) == sorted(called)


@pytest.mark.long
def test_kernels_are_compiled_in_other_processes_and_only_once(tmp_path: Path) -> None:
    first, err = _result(_start(_COMPILE, KEYTAIL_CACHE_DIR=str(tmp_path)))
    made, misses, notes, folder, names = first
    assert (made, misses, names) == (2, 0, sorted(FEW))
    assert folder.startswith(f"{tmp_path}/")
    assert notes[0].startswith("compiling 2 kernels, stored for later runs in")
    assert notes[0].endswith(", slowest first")
    assert re.fullmatch(r"0 of 2 kernels are compiled \(at \d+ s\)", notes[1]), "no kernel can be compiled yet"
    assert any(re.fullmatch(r"1 of 2 kernels are compiled \(at \d+ s\), about \d+ s left", note) for note in notes)
    assert notes[-1].startswith("compiled 2 kernels in ")
    assert err == ""
    again, _ = _result(_start(_COMPILE, KEYTAIL_CACHE_DIR=str(tmp_path)))
    assert again[:3] == [0, 0, []]


@pytest.mark.long
def test_two_runs_at_the_same_time_compile_each_kernel_once(tmp_path: Path) -> None:
    results = [_result(run) for run in [_start(_COMPILE, KEYTAIL_CACHE_DIR=str(tmp_path)) for _ in range(2)]]
    assert [result[4] for result, _ in results] == [sorted(FEW)] * 2
    assert len([*tmp_path.glob("*/*/*.nbc")]) == len(FEW)


@pytest.mark.long
def test_without_a_cache_a_warning_is_printed_and_the_processes_share_one_until_the_end(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_bytes(b"")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = {"KEYTAIL_CACHE_DIR": str(a_file), "HOME": "/nonexistent", "TMPDIR": str(temporary)}
    (made, misses, _, folder, names), err = _result(_start(_COMPILE, **variables))
    assert (made, misses, names) == (2, 0, sorted(FEW))
    assert folder.startswith(f"{temporary}/")
    [warning] = err.splitlines()
    assert f"compiled kernels cannot be stored ({a_file}: File exists)" in warning
    assert "Set KEYTAIL_CACHE_DIR" in warning
    assert [*temporary.iterdir()] == []


def test_the_time_left_is_estimated_from_the_kernels_compiled_so_far() -> None:
    expected = [8.0, 4.0, 2.0, 2.0]
    assert kernels._left_s(expected, {}, 2, 100.0) is None
    # The second kernel took 20 s instead of 4 s: factor 5. The first has 40 - 20 s left, the others 10 s each.
    assert kernels._left_s(expected, {1: 20.0}, 2, 20.0) == pytest.approx(20.0)
    assert kernels._left_s(expected, {1: 20.0}, 2, 25.0) == pytest.approx((15 + 5 + 10) / 2)
    # The third took 6 s instead of 2 s: factor 26 / 6 in all.
    assert kernels._left_s(expected, {1: 20.0, 2: 26.0}, 2, 26.0) == pytest.approx(8 * 26 / 6 - 26)
    assert kernels._left_s(expected, {1: 20.0, 2: 26.0}, 2, 90.0) == 0.0
    assert kernels._left_s(expected, {0: 30.0, 1: 20.0, 2: 26.0, 3: 31.0}, 2, 31.0) == 0.0
    assert kernels._left_s([0.0, 1.0], {0: 3.0}, 1, 3.0) is None


@settings(max_examples=50)
@given(
    expected=st.lists(st.floats(0.1, 60.0), min_size=1, max_size=20).map(lambda each: sorted(each, reverse=True)),
    workers=st.integers(1, 4),
    factor=st.floats(0.2, 20.0),
)
def test_on_an_evenly_slower_machine_the_time_left_is_exact_except_for_one_kernel(
    expected: list[float], workers: int, factor: float
) -> None:
    """With several workers the estimate is a lower limit, because some of them may have nothing to do at the end."""
    free_s, ends_s = [0.0] * workers, []
    for seconds in expected:
        worker = free_s.index(min(free_s))
        free_s[worker] += seconds * factor
        ends_s.append(free_s[worker])
    total_s = max(ends_s)
    for now_s in sorted(ends_s):
        ended_s = {number: end_s for number, end_s in enumerate(ends_s) if end_s <= now_s}
        left_s = kernels._left_s(expected, ended_s, workers, now_s)
        assert left_s is not None
        assert left_s <= total_s - now_s + 1e-6 * total_s
        assert left_s + max(expected) * factor >= total_s - now_s - 1e-6 * total_s
        if workers == 1:
            assert left_s == pytest.approx(total_s - now_s, abs=1e-6 * total_s)


def _wait_until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 300
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _check_whole(cache: Path) -> None:
    """Check that each index in the cache can be read, and that its code exists."""
    for path in cache.glob("*/*/*.nbi"):
        with path.open("rb") as file:
            pickle.load(file)  # skip the version of Numba
            _, names = pickle.load(file)
        for name in names.values():
            pickle.loads((path.parent / name).read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_kernels_are_compiled_ends_a_run_as_at_any_other_time(
    number: signal.Signals, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    log_dir = unpack(tmp_path)
    before = {path: path.read_bytes() for path in log_dir.glob("gzip-0/*") if path.suffix == ".log"}
    command = [
        sys.executable, "-m", "keytail", "compact", "--log-dirs", str(log_dir), "--topic-list", "gzip", "--force",
        "--config", str(log_dir.parent / "server.properties"), "--execute",
    ]  # fmt: skip
    environment = {**os.environ, "KEYTAIL_CACHE_DIR": str(cache)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        _wait_until(lambda: [*cache.glob("*/proof_*/step.*.lock")], run)
        children = descendants(run.pid)
        assert children
        os.killpg(run.pid, number)  # a terminal signals the whole group
        out, err = run.communicate(timeout=120)
    assert run.returncode == 128 + number, err
    assert "compiling" in err
    assert f"interrupted by {number.name}" in err
    assert "Traceback" not in err + out
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    assert {path: path.read_bytes() for path in before} == before
    _check_whole(cache)


@pytest.mark.long
def test_a_signal_while_this_process_compiles_is_raised_afterwards(tmp_path: Path) -> None:
    """A rare kernel is compiled when it is called, and Numba loses an exception that is raised within LLVM's callbacks.
    """
    code = """
        import glob, os, signal, sys, threading, time
        from keytail.kernels import batches, jit
        from keytail.run import kernels
        [item] = [item for item in kernels.kernels_of(None) if item.kernel == "batches:index_batches"]
        class Ended(BaseException): pass
        def end(*_): raise Ended
        signal.signal(signal.SIGINT, end)
        def send():
            while not glob.glob(f"{jit.CACHE_FOLDER}/*/batches.index_batches*.lock"):
                time.sleep(0.001)
            while not batches.index_batches.overloads:  # repeatedly while the kernel is compiled
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.001)
        threading.Thread(target=send, daemon=True).start()
        types = tuple(map(kernels.type_of, item.types))
        try:
            batches.index_batches.compile(types)
        except Ended:
            print("ended", jit.is_compiled(batches.index_batches, types), len(jit.names_in_cache()))
    """
    run = _start(code, KEYTAIL_CACHE_DIR=str(tmp_path))
    out, err = run.communicate(timeout=800)
    assert (out, err) == ("ended True 1\n", "")
    _check_whole(tmp_path)


def test_a_worker_first_compiles_kernels_that_no_other_worker_is_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    taken = {"b"}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def compile(self, types: object) -> None:
            compiled.append(self.name)

    missing = [(Kernel(name), (), 1.0) for name in "abc"]
    monkeypatch.setattr(kernels, "_missing", lambda listed: missing)
    monkeypatch.setattr(jit, "is_being_compiled", lambda kernel: kernel.name in taken)
    monkeypatch.setattr(kernels, "_done_here", set())
    kernels.compile_on_worker("compact")
    assert compiled == ["a", "c", "a", "b", "c"]  # in the second loop, a and c are loaded from the cache
    kernels.compile_on_worker("compact")
    assert len(compiled) == 5


def test_a_plan_reports_how_long_compiling_will_take(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(jit, "names_in_cache", set)
    monkeypatch.setattr(jit, "IS_WRITABLE", True)
    kernels.report_uncompiled("compact")
    err = capfd.readouterr().err
    assert "kernels are not compiled for this user, so `compact` takes about " in err
    assert "keytail doctor --warm" in err
    monkeypatch.setattr(jit, "IS_WRITABLE", False)
    monkeypatch.setattr(jit, "CACHE_FOLDER", None)
    kernels.report_uncompiled("compact")
    assert "Set KEYTAIL_CACHE_DIR" in capfd.readouterr().err
    monkeypatch.setattr(jit, "names_in_cache", lambda: {item.kernel for item in kernels.kernels_of(None)})
    kernels.report_uncompiled("compact")
    assert capfd.readouterr().err == ""
