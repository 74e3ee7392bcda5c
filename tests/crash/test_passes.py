"""Stops before every file operation of compactions with a pass for each group, and makes each one fail. The states
between passes also occur in a compaction in one pass, so the checks are the same: promises 1 and 2 hold for a broker,
no checkpoint is above the cleaned segments, and the next run has the result of the reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keytail.compact.cleaner import CleaningResult, CleaningTask, clean_partition
from keytail.log.fs import FileSystem
from keytail.run.tasks import Outcome, run_attempt
from tests.chance import SEED
from tests.crash import compactions
from tests.crash.compactions import Found, Log, LogDir, find
from tests.crash.driver import Counts, Failed, for_every_fault
from tests.crash.explorer import Explorer, Visit
from tests.crash.test_compaction import SHAPES, SOAK, NextRuns, check_next_run, digest_after_a_run, judge
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.run.engines import LikeSpark


class InPasses(LogDir):
    """A log dir that is compacted with a pass for each group; the next run may use one pass."""

    def run(self, fs: FileSystem, root: Path, run_id: str = "r1") -> Failed:
        with (
            patch.object(compactions, "clean_partition", one_group),
            patch.object(compactions, "ThisProcess", lambda: LikeSpark(run=partial(run_here, fs))),
        ):
            return super().run(fs, root, run_id)


def one_group(fs: FileSystem, task: CleaningTask) -> CleaningResult:
    return clean_partition(fs, replace(task, max_scratch_bytes=1, attempt=f"n{task.first_segment}"))


def run_here(fs: FileSystem, tasks: Sequence[CleaningTask], *_: Any, **__: Any) -> list[Outcome[Any]]:
    return [run_attempt(lambda task, _: one_group(fs, task), task, "") for task in tasks]


TRANSACTIONS = "transactions across groups: committed, aborted, and one open"
SHAPES_OF_PASSES = {
    "tombstones in later passes than what they delete": (
        (Log("orders-0", [["a:1 b:1", "x:1"], ["a:2 x:2"], ["! a:- x:-"], ["y:1"], ["y:2"]]),), 1
    ),
    "passes in the clean section": (
        (Log("orders-0", [["a:1 b:1"], ["c:1 d:1"], ["b:2 e:1"], ["a:2 d:-", "c:2"], ["y:2"]], checkpoint=6),), 1
    ),
    TRANSACTIONS: (SHAPES[TRANSACTIONS].logs, 1),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES_OF_PASSES if SOAK else list(SHAPES_OF_PASSES)[::2])
def test_no_stop_or_fault_of_passes_loses_a_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs, join = SHAPES_OF_PASSES[name]
    log_dir, at_once = InPasses(logs, join), LogDir(logs, join)
    undisturbed, settled = digest_after_a_run(at_once, fast_dir / "undisturbed"), NextRuns()
    assert digest_after_a_run(log_dir, fast_dir / "passes") == undisturbed, "the bytes differ from those of one pass"
    next_run = at_once if name == TRANSACTIONS else log_dir

    def visit(state: Visit) -> None:
        judge(log_dir, state.found, state.run, ended=state.ended)
        check_next_run(next_run, state, undisturbed, settled)

    counts = Counts("compaction in passes")
    explorer = Explorer(log_dir, fast_dir, visit, SEED, soak=SOAK, first=counts)
    origin, run = explorer._begin()
    explorer._every_stop(origin, log_dir.run, run, counts, None, "first", 3 * SOAK)
    for_every_fault(
        origin, log_dir.run, explorer._check_of(run, is_run=True),
        work_dir=fast_dir / "faults", counts=counts, share=0.02, scratch=(".clean", ".tmp"), seed=SEED,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {counts}; losses 0")
    assert counts.distinct_states > 50


def test_states_between_passes_are_those_after_complete_groups(fast_dir: Path) -> None:  # noqa: F811
    """The stops of the tests above include the states between passes, in which the groups of earlier passes are
    replaced.
    """
    logs, join = SHAPES_OF_PASSES["passes in the clean section"]
    log_dir = InPasses(logs, join)
    log_dir.make(fast_dir / "run")
    seen: list[Found] = []

    class Watching(FileSystem):
        def create(self, path: str, like: Any) -> int:
            if ".survivors." in path or ".proof." in path:
                seen.append(find(log_dir, fast_dir / "run"))
            return super().create(path, like)

    log_dir.run(Watching(), fast_dir / "run")
    states = [tuple(sorted(segment.log for segment in found.logs["orders-0"].segments.values())) for found in seen]
    assert len(set(states)) == 3
    assert all(found.checkpoints["orders-0"] == 6 for found in seen)
