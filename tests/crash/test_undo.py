"""Stops before every file operation of compactions with backups, and of their undo, and makes each one fail.

After every stop of a compaction, undo restores bytes, times and checkpoint of the previous files. After every stop of
an undo, a broker loses no record, and another undo has the result of an undisturbed one. KEYTAIL_SOAK=1 tries more of
everything, and KEYTAIL_SEED repeats the random log dirs of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from keytail.log.fs import LOCAL, FileSystem
from keytail.undo.command import Request, UndoRow
from keytail.undo.driver import undo
from keytail.undo.manifest import MANIFEST
from tests.chance import SEED
from tests.crash.compactions import CHECKPOINT, GONE, Log, LogDir, random_log, read_checkpoint
from tests.crash.driver import SOAK, Counts, Failed, State, few_in_check, for_every_fault, for_every_stop
from tests.crash.test_passes import InPasses
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.loader import load_alike

KEPT = "originals"
Tree = dict[str, tuple[bytes, int]]

IN_PASSES = "aborted data and its indexes, in passes"
COPIES = "copies, which lose their times"
SHAPES: dict[str, LogDir] = {
    "a tombstone in a later group than what it deletes": LogDir(
        (Log("orders-0", [["a:1 b:1", "x:1"], ["a:2 x:2"], ["! a:- x:-"], ["y:1"], ["y:2"]]),), keep_in=KEPT
    ),
    "merges, and a checkpoint": LogDir(
        (Log("orders-0", [["a:1 b:1", "c:1"], ["a:2 g:1"], ["b:2 +2 e:1"], ["a:3 d:-"], ["a:4"]], checkpoint=3),),
        join=2, keep_in=KEPT,
    ),
    "an output that ends below its last sources": LogDir(
        (Log("orders-0", [["a:1"], ["x:1"], ["! x:-"], ["y:11111 z:1", "a:1111", "y:1"], []]),), join=3, keep_in=KEPT
    ),
    IN_PASSES: InPasses(
        (Log("orders-0", [["T1 a:1", "x:1"], ["A1", "x:2"], ["x:3"], ["y:1"]]),),
        keep_in=KEPT,
    ),
    COPIES: LogDir((Log("orders-0", [["a:1 b:1"], ["a:2"], []], checkpoint=0),), join=2, keep_in=KEPT, copies=True),
    "two partitions": LogDir(
        (Log("orders-0", [["a:1 b:1"], ["a:2"], ["b:1"]], checkpoint=2), Log("orders-1", [["a:1"], ["! a:-"], []])),
        keep_in=KEPT,
    ),
}  # fmt: skip
ALL = [*SHAPES, *(f"random {number}" for number in range(20))]
# Only some partial power cuts reveal a wrong order of renames.
MAX_CUTS = ("an output that ends below its last sources", COPIES)


def shape(name: str) -> LogDir:
    if name in SHAPES:
        return SHAPES[name]
    rng = random.Random(f"{SEED} {name}")
    kind = rng.choice([LogDir, InPasses])
    log_dir = kind((random_log(rng, "orders-0"),), join=rng.choice([1, 2, 3]), keep_in=KEPT)
    print("seed", SEED, log_dir)
    return log_dir


def run_undo(fs: FileSystem, root: Path, run_id: str = "r1") -> list[UndoRow]:
    """Run undo as the command does, in a copy of the log dir of the run."""
    logs = (str(root / "logs"),)
    return undo(Request(str(root / KEPT), run_id, log_dirs=logs, execute=True, shared_storage=True), fs)


def undo_all(fs: FileSystem, root: Path) -> Failed:
    # `tests/log/test_lock.py` tests the faults of locks.
    with patch("keytail.undo.driver.hold_local", lambda *_: contextlib.nullcontext()):
        rows = run_undo(fs, root)
    return Failed(tuple(row.error for row in rows if row.status not in ("undone", "clean")))


def tree(root: Path) -> Tree:
    """Return the files of a partition that a broker reads, with times, and the entries of checkpoints."""
    files = {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.parent != root and not path.name.endswith((".clean", ".tmp"))
    }
    entries = {name: at for name, at in read_checkpoint(root / CHECKPOINT).items() if name != GONE[0]}
    return {**files, CHECKPOINT: (json.dumps(entries, sort_keys=True).encode(), 0)}


def assert_same(found: Tree, wanted: Tree) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    assert found == wanted, [name for name in wanted if found[name] != wanted[name]]


def entry_of(root: Path, log: Log) -> Path:
    return root / KEPT / "r1" / log.name


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(ALL if SOAK else [COPIES, IN_PASSES], COPIES))
def test_every_state_of_a_compaction_can_be_undone(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir = shape(name)
    log_dir.make(fast_dir / "origin" / "logs")
    origin = tree(fast_dir / "origin" / "logs")

    def check(state: State) -> None:
        logs = state.root / "logs"
        if state.action_ended:
            assert tree(logs) != origin
            assert all((entry_of(state.root, log) / MANIFEST).exists() for log in log_dir.logs)
        for log in log_dir.logs:
            log.check_loaded(load_alike(logs / log.name))
        log_dir.recover(LOCAL, logs)  # if no backup has begun, the model of a broker finds the previous files
        started = (state.root / KEPT / "r1").exists()
        rows = {row.name: row for row in (run_undo(LOCAL, state.root) if started and any_entry(state.root) else [])}
        found = tree(logs)
        for log in log_dir.logs:
            of_log = {path: file for path, file in origin.items() if path.startswith(log.name)}
            if (entry_of(state.root, log) / MANIFEST).exists():
                assert rows[log.name].status in ("undone", "clean"), rows[log.name]
            assert_same({path: file for path, file in found.items() if path.startswith(log.name)}, of_log)
        assert found[CHECKPOINT] == origin[CHECKPOINT]
        assert not any(path.name.endswith((".clean", ".swap")) for path in logs.rglob("*"))

    counts = Counts("compaction with a backup")
    explore(name, log_dir, lambda root: log_dir.make(root / "logs"), "compact", check, fast_dir, counts)
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {counts}; losses 0")


def any_entry(root: Path) -> bool:
    return any(path.is_dir() for path in (root / KEPT / "r1").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(ALL if SOAK else [*MAX_CUTS, "random 0"], COPIES))
def test_a_stopped_undo_loses_no_record_and_the_next_undo_completes_it(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir = shape(name)
    log_dir.make(fast_dir / "origin" / "logs")
    origin = tree(fast_dir / "origin" / "logs")

    def make(root: Path) -> None:
        log_dir.make(root / "logs")
        assert log_dir.run(LOCAL, root / "logs") == Failed(())
        nonlocal compacted
        compacted = tree(root / "logs")
        for path in (root / KEPT).rglob("*") if log_dir.copies else ():
            os.utime(path, ns=(1, 1))  # with other times, undo has to copy these files back
        assert compacted != origin

    compacted: Tree = {}

    def check(state: State) -> None:
        logs = state.root / "logs"
        cleaned = read_checkpoint(logs / CHECKPOINT)
        for log in log_dir.logs:
            log.check_loaded(load_alike(logs / log.name))
            as_left = {path: file for path, file in compacted.items() if path.startswith(log.name)}
            if cleaned.get(log.name) != log.checkpoint:
                found = {path: file for path, file in tree(logs).items() if path.startswith(log.name)}
                assert_same(found, as_left)
        if state.action_ended:
            assert_same(tree(logs), origin)
        rows = run_undo(LOCAL, state.root)
        assert {row.status for row in rows} <= {"undone", "clean"}, rows
        assert_same(tree(logs), origin)
        assert not any(path.name.endswith((".clean", ".swap")) for path in logs.rglob("*"))
        if state.action_ended:
            assert {row.status for row in run_undo(LOCAL, state.root)} == {"clean"}

    counts = Counts("undo")
    explore(name, log_dir, make, "undo", check, fast_dir, counts)
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {counts}; losses 0")
    assert counts.distinct_states > (10 if name in MAX_CUTS else 4)  # a random log may have only one small group


def explore(
    name: str,
    log_dir: LogDir,
    make: Callable[[Path], object],
    what: str,
    check: Callable[[State], object],
    work_dir: Path,
    counts: Counts,
) -> None:
    def action(fs: FileSystem, root: Path) -> object:
        return log_dir.run(fs, root / "logs") if what == "compact" else undo_all(fs, root)

    for_every_stop(
        make, action, check, work_dir=work_dir / "stops", counts=counts,
        partial_cuts=3 if SOAK else int(name in MAX_CUTS), torn_writes=SOAK, seed=SEED,
    )  # fmt: skip
    for_every_fault(
        make, action, check, work_dir=work_dir / "faults", counts=counts, share=0.02, scratch=(".clean",),
        seed=SEED,
    )  # fmt: skip
