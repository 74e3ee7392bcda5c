"""Stops runs out of place before every file operation, and makes each one fail.

The target is empty, or is the output of an earlier run after which one partition of the source has changed. In every
state, bytes and times of the source are unchanged, no broker can start on an incomplete target, and each partition in
the target with a complete record has the contents of one of the two runs. After the next run, the target is that of an
undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keytail.cli.configuration import Configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import steps
from keytail.compact.command import Request
from keytail.compact.out_of_place import driver as out_of_place
from keytail.compact.out_of_place import placing
from keytail.compact.out_of_place.output_record import decode_record
from keytail.compact.running import compaction as scheduling
from keytail.config.resolve import from_command_line
from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.rows import DONE, ResultRow
from tests.chance import SEED
from tests.crash.compactions import NOW, RETENTION_MS, Log, LogDir
from tests.crash.driver import SOAK, Counts, Failed, State, for_every_fault, for_every_stop
from tests.crash.trees import Tree, read_tree
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.run.engines import LikeSpark

# One partition is compacted, and has a tombstone in a later group than the record it deletes; the other is copied.
LOGS = LogDir(
    (
        Log("orders-0", [["a:1 b:1", "x:1"], ["a:2 x:2"], ["! a:- x:-"], ["y:1"]]),
        Log("users-0", [["a:1"], ["a:2"]], compacted=False),
    )
)
LATER = LogDir(
    (Log("orders-0", [["a:1 b:1", "x:1"], ["a:2 x:2"], ["! a:- x:-"], ["y:1"], ["y:2", "z:1"]]), LOGS.logs[1])
)
SETTINGS = (
    "orders:cleanup.policy=compact", "orders:segment.bytes=1048576", f"orders:delete.retention.ms={RETENTION_MS}",
    "users:cleanup.policy=delete",
)  # fmt: skip


def run(fs: FileSystem, root: Path, *, out: str = "", scratch_dir: str | None = None) -> list[ResultRow]:
    """Run as the command does, in this process, and return the rows."""
    request = Request(
        partition_filter=PartitionFilter(log_dirs=(str(root / "logs"),)),
        configuration=Configuration(from_command_line(SETTINGS), topics_have_no_overrides=True),
        execute=True,
        now_ms=NOW,
        unsafe_clock=True,
        force=True,
        shared_storage=True,
        map_memory_bytes=1 << 20,
        fan_out="never",
        output_dirs=(out or str(root / "out"),),
        scratch_dir=scratch_dir,
    )
    with _here(fs):
        return out_of_place.compact(request, fs)


@contextlib.contextmanager
def _here(fs: FileSystem) -> Iterator[None]:
    with (
        # `tests/log/test_lock.py` tests the faults of locks.
        patch.object(steps, "hold_local", lambda *_: contextlib.nullcontext()),
        patch.object(out_of_place, "is_held", lambda *_: False),
        patch.object(steps, "workers_of_run", lambda *_, **__: LikeSpark(1)),
        patch.object(scheduling, "bundles_in_flight", lambda *_: 1),
        patch.object(placing, "on_worker", lambda _, task, attempt: (fs, replace(task, attempt=attempt))),
    ):
        yield


def failures(fs: FileSystem, root: Path) -> Failed:
    return Failed(tuple(row.error for row in run(fs, root) if row.status not in DONE))


def without_records(tree: Tree, prefix: str) -> Tree:
    """Return the files below `prefix`: of output records the names, of other files also the contents, and of files of
    partitions also the times.
    """
    found: Tree = {}
    for path, (content, mtime_ns) in tree.items():
        if path.startswith(prefix):
            name = path.removeprefix(prefix)
            is_record = name.endswith(names.OUTPUT_RECORD)
            found[name] = (b"" if is_record else content, 0 if is_record or "/" not in name else mtime_ns)
    return found


def partition_of(tree: Tree, name: str) -> Tree:
    return {path: file for path, file in without_records(tree, "out/").items() if path.startswith(f"{name}/")}


def make_first(root: Path) -> None:
    root.mkdir()
    LOGS.make(root / "logs")


def make_again(root: Path) -> None:
    """Run out of place on the log dir, then add a segment to orders-0."""
    make_first(root)
    run(LOCAL, root)
    os.rename(root / "logs", root / "before")
    LATER.make(root / "logs")
    before = root / "before"
    for path in sorted((before / "users-0").iterdir()):
        os.replace(path, root / "logs" / "users-0" / path.name)
    for directory in (before / "users-0", before / "orders-0"):
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    for path in before.iterdir():
        path.unlink()
    before.rmdir()


@pytest.mark.long
@pytest.mark.parametrize("make", [make_first, make_again])
def test_after_every_stop_and_fault_the_source_is_unchanged_and_the_next_run_completes(
    make: Any,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    undisturbed = fast_dir / "undisturbed"
    make(undisturbed)
    start = read_tree(undisturbed)
    assert all(row.status in DONE for row in run(LOCAL, undisturbed))
    end = read_tree(undisturbed)
    wanted = without_records(end, "out/")
    assert names.META_PROPERTIES in wanted
    assert (without_records(start, "out/") != {}) == (make is make_again)

    def check(state: State) -> None:
        left = state.tree
        assert {n: f for n, f in left.items() if n.startswith("logs/")} == {
            n: f for n, f in start.items() if n.startswith("logs/")
        }, "the source has changed"
        out = without_records(left, "out/")
        if names.META_PROPERTIES in out:
            assert out in (wanted, without_records(start, "out/")), "a broker could start on an incomplete target"
        for log in LOGS.logs:
            data = left.get(f"out/{log.name}/{names.OUTPUT_RECORD}")
            if data is not None and decode_record(data[0], "").is_finished:
                here = {n: f for n, f in partition_of(left, log.name).items() if not n.endswith((".clean", ".tmp"))}
                assert here in (partition_of(start, log.name), partition_of(end, log.name)), log.name
        if state.action_ended:
            assert out == wanted
        try:
            rows = run(LOCAL, state.root)
        except Refused as problem:
            raise AssertionError(f"the next run is refused: {problem}") from problem
        assert all(row.status in DONE for row in rows), rows
        assert without_records(read_tree(state.root), "out/") == wanted

    counts = Counts("compaction out of place")
    for_every_stop(
        start, failures, check, work_dir=fast_dir / "stops", counts=counts, partial_cuts=3 if SOAK else 1,
        torn_writes=SOAK, seed=SEED,
    )  # fmt: skip
    for_every_fault(
        start, failures, check, work_dir=fast_dir / "faults", counts=counts, again=failures, share=0.02,
        scratch=(".clean", ".tmp"), seed=SEED,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\n{make.__name__} (seed {SEED}): {counts}; losses 0")
    assert counts.distinct_states > 20
