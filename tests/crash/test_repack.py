"""Stops before every file operation of a repack, and lets each one fail. After every stop, a broker finds every record,
each segment is as before or repacked, the cleaner's checkpoint is unchanged, and the next run has the result of an
undisturbed run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keytail.compact.plan import select
from keytail.compact.repack.driver import _InPlace
from keytail.compact.repack.partition import repack_partition
from keytail.compact.repack.task import Repacking, RepackTask
from keytail.compact.running.compaction import Compaction
from keytail.config.compaction import CompactionConfig
from keytail.errors import Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.log.replacement.recover import recover
from keytail.run.engine import ThisProcess
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import run_attempt
from tests.chance import SEED
from tests.crash.compactions import INTERVAL_BYTES, NOW, Log, _is_not_run
from tests.crash.driver import Counts, Failed, State, for_every_stop_and_fault
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.log_dirs import write_log_dir
from tests.reference.indexing import index_files
from tests.reference.loader import load_alike

CONFIG = CompactionConfig(index_interval_bytes=INTERVAL_BYTES, segment_bytes=150)
CHECKPOINT = "cleaner-offset-checkpoint"
MERGED, DIVIDED = "merged batches", "outputs that are divided at a limit, with transactions"
SHAPES = {
    MERGED: (
        Log("orders-0", [["a:1 b:1", "c:1"], ["a:2", "! g:-", "b:2"], ["+2 e:1"], ["a:4", "a:5"]], checkpoint=4),
        Repacking(1 << 16),
    ),
    DIVIDED: (
        Log("orders-0", [["T1 a:1", "t2 b:1 c:1", "A1", "d:1", "d:2", "C2"], ["x:1", "y:1"], ["z:1"]]),
        Repacking(0, codec=1),
    ),
}


def make(log: Log, root: Path) -> None:
    write_log_dir(root, {})
    log.make(root)
    text = f"0\n1\n{log.name.replace('-', ' ')} {log.end}\n"
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        (root / name).write_text(text)
    (root / CHECKPOINT).write_text("0\n1\norders 0 4\n")


def run(fs: FileSystem, root: Path, repacking: Repacking) -> Failed:
    [listing] = survey_log_dirs(fs, [str(root)])
    [entry] = listing.partitions
    planned = run_attempt(lambda _, attempt: _task(fs, listing, entry, repacking), None, "")
    if planned.value is None:
        return Failed((str(planned.problem),))
    task = planned.value
    destination = _InPlace(fs, {str(root): hosted([listing])}, _is_not_run)
    driver = Compaction(ThisProcess(), [task], ScratchSpace(fs), destination)
    outcome = run_attempt(lambda task, _: repack_partition(fs, task), task, "")
    [item] = driver.installer.finish([(task, outcome)])
    return Failed(() if item.row.status in ("repacked", "clean") else (item.row.error,))


def _task(fs: FileSystem, listing: LogDirFacts, entry: PartitionEntry, repacking: Repacking) -> RepackTask:
    recover(fs, entry.path)
    facts = survey_partition(fs, listing, entry)
    if facts.problems:
        raise Refused("; ".join(facts.problems))
    assert facts.leftovers == ()
    config = CompactionConfig(cleanup_policy=frozenset({"compact"}))
    end = select(facts, config, NOW, force=True, from_log_start=True).first_uncleanable_offset
    return RepackTask.of(
        facts, first_dirty_offset=end, first_uncleanable_offset=end, now_ms=NOW, config=CONFIG, run_id="r1",
        repacking=repacking, cleaner_checkpoint=facts.cleaner_checkpoint,
    )  # fmt: skip


def loaded(path: Path) -> dict[int, tuple[bytes, ...]]:
    """Return the log and the transaction index of each segment that a broker loads. Check that its indexes match the
    log.
    """
    found = load_alike(path)
    for base, segment in found.segments.items():
        assert (segment.index, segment.time_index) == index_files(segment.log, base, INTERVAL_BYTES)
    return {base: (segment.log, segment.txn_index) for base, segment in found.segments.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_no_stop_or_fault_of_a_repack_loses_a_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, repacking = SHAPES[name]
    make(log, fast_dir / "undisturbed")
    before = loaded(fast_dir / "undisturbed" / log.name)
    assert run(LOCAL, fast_dir / "undisturbed", repacking) == Failed(())
    after = loaded(fast_dir / "undisturbed" / log.name)
    assert after != before
    seen: set[frozenset[int]] = set()
    groups = [[base] for base in before]
    for base in after.keys() - before.keys():  # an output after the first of a group
        next(group for group in reversed(groups) if group[0] < base).append(base)

    def check(state: State) -> None:
        found = loaded(state.root / log.name)
        done = {group[0] for group in groups if all(found.get(base) == after[base] for base in group)}
        for group in groups:
            rest = {base: found[base] for base in group if base in found}
            assert group[0] in done or rest == {group[0]: before[group[0]]}, state.label
        seen.add(frozenset(base for base in done if before[base] != after[base]))
        assert (state.root / CHECKPOINT).read_text() == "0\n1\norders 0 4\n"
        assert run(LOCAL, state.root, repacking) == Failed(())
        assert loaded(state.root / log.name) == after, state.label
        assert not [name for name in os.listdir(state.root / log.name) if name.endswith((".clean", ".swap"))]

    counts = Counts("repack")
    for_every_stop_and_fault(
        lambda root: make(log, root), lambda fs, root: run(fs, root, repacking), check,
        work_dir=fast_dir / "stops", counts=counts, share=0.1, scratch=(".clean",), seed=SEED,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {counts}; losses 0")
    assert len(seen) > 1
    assert counts.distinct_states > 20
