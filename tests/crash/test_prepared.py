"""Stops before every file operation of a preparation and of its commit, and makes each one fail.

The states for a broker are those of a compaction in a single run, and the next run, which commits or discards the
preparation, has the result of the reference model. Inodes are ignored, because a state that is written to a disk has
others. KEYTAIL_SEED repeats the random log dirs of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from keytail.compact.cleaner import clean_partition
from keytail.compact.plan import Decision, select
from keytail.compact.planning import Planned
from keytail.compact.prepared.committing import basis_of, commit_or_discard, read_record, reason_against_commit
from keytail.compact.prepared.preparing import Found as FoundBefore
from keytail.compact.prepared.preparing import Prepare
from keytail.compact.prepared.record import see_sources
from keytail.compact.rules import Rules, TaskSettings
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import InPlace
from keytail.compact.steps import cleaning_tasks
from keytail.compact.task import CleaningTask
from keytail.errors import NO_ERROR, Refused
from keytail.log import fs as fs_module
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.log.producers import first_unstable
from keytail.log.replacement.recover import recover
from keytail.run.engine import ThisProcess
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome, run_attempt
from tests.chance import SEED
from tests.crash.compactions import NOW, Expected, LogDir, expect, find, judge
from tests.crash.driver import SOAK, Counts, Failed, State, few_in_check, for_every_fault, for_every_stop
from tests.crash.test_compaction import SHAPES, check_names, shape
from tests.crash.trees import read_tree, remove_tree, write_tree
from tests.interop.conftest import fast_dir  # noqa: F401

RULES = Rules(NOW, force=True)
SETTINGS = TaskSettings(map_memory_bytes=1 << 20, grouping="kafka", fan_out="never")


@contextmanager
def ignoring_inodes() -> Iterator[None]:
    scan = fs_module.scan
    with patch.object(fs_module, "scan", lambda fd: [replace(entry, inode=1) for entry in scan(fd)]):
        yield


@pytest.fixture(autouse=True)
def without_inodes() -> Iterator[None]:
    with ignoring_inodes():
        yield


class InTwoSteps(LogDir):
    """A log dir that a run compacts in two steps, preparation and commit; a run after a stop does both again."""

    def run(self, fs: FileSystem, root: Path, run_id: str = "r1") -> Failed:
        reported = [*self.prepare(fs, root, "p" + run_id), *self.commit(fs, root, run_id)]
        assert not reported or fs is not LOCAL, reported
        return Failed(tuple(reported))

    def prepare(self, fs: FileSystem, root: Path, run_id: str) -> list[str]:
        _, planned, reported = self._planned(fs, root, recovers=False)
        due = [plan for plan in planned if plan.wanted]
        found = {
            plan.facts.path: FoundBefore(
                basis_of(fs, plan, RULES),
                see_sources(fs, plan.facts.path, plan.facts.segments[:-1]),
            )
            for plan in due
        }
        tasks = [replace(task, is_preparation=True) for task in cleaning_tasks(due, RULES, SETTINGS, run_id)]
        destination = Prepare(fs, found, _is_not_run)
        driver = Compaction(ThisProcess(), tasks, ScratchSpace(fs, output_stays=True), destination)
        outcomes = [run_attempt(lambda task, _: clean_partition(fs, task), task, "") for task in tasks]
        rows = [item.row for item in driver.installer.finish(list(zip(tasks, outcomes, strict=True)))]
        return [*reported, *(row.error for row in rows if row.status != "prepared")]

    def commit(self, fs: FileSystem, root: Path, run_id: str) -> list[str]:
        listing, planned, reported = self._planned(fs, root, recovers=True)
        tasks = cleaning_tasks(planned, RULES, SETTINGS, run_id)
        destination = InPlace(fs, {str(root): hosted([listing])}, _is_not_run)
        driver = Compaction(ThisProcess(), tasks, ScratchSpace(fs), destination)
        outcomes = [
            Outcome(task.prepared.result, None)
            if task.prepared is not None
            else run_attempt(lambda task, _: clean_partition(fs, task), task, "")
            for task in tasks
        ]
        self.committed = [task.topic for task in tasks if task.prepared is not None]
        rows = [item.row for item in driver.installer.finish(list(zip(tasks, outcomes, strict=True)))]
        return [*reported, *(row.error for row in rows if row.status != "compacted")]

    def recover(self, fs: FileSystem, root: Path) -> None:
        for log in self.logs:
            path = str(root / log.name)
            record, _ = read_record(fs, path, os.listdir(path))
            recover(fs, path, record.files if record else ())

    def _planned(self, fs: FileSystem, root: Path, *, recovers: bool) -> tuple[LogDirFacts, list[Planned], list[str]]:
        [listing] = survey_log_dirs(fs, [str(root)])
        compacted = {log.name for log in self.logs if log.compacted}
        planned, reported = [], []
        for entry in listing.partitions:
            if os.path.basename(entry.path) in compacted:
                outcome = run_attempt(lambda e, _: self._plan(fs, listing, e, recovers=recovers), entry, "")
                if outcome.problem is not None:
                    reported.append(str(outcome.problem))
                else:
                    assert outcome.value is not None
                    planned.append(outcome.value)
                    if outcome.value.decision.status == "refused":
                        reported.append(outcome.value.decision.error)
        return listing, planned, reported

    def _plan(self, fs: FileSystem, listing: LogDirFacts, entry: PartitionEntry, *, recovers: bool) -> Planned:
        record = None
        facts = survey_partition(fs, listing, entry)
        if recovers and facts.leftovers:
            record, _ = read_record(fs, entry.path, facts.leftovers)
            if record is None or not record.files.issuperset(
                facts.leftovers
            ):  # compact/steps.py has the same condition
                recover(fs, entry.path, record.files if record else ())
                facts = survey_partition(fs, listing, entry)
        if facts.problems:
            raise Refused("; ".join(facts.problems))
        unstable = first_unstable(fs, facts, now_ms=NOW)
        selection = select(facts, self.config, NOW, unstable=unstable, force=True)
        decision = Decision("would-compact" if selection.eligible else "clean", NO_ERROR, selection)
        planned = Planned(facts, self.config, decision, settings_known=True)
        if record is None:
            return planned
        reason = reason_against_commit(fs, record, planned, RULES)
        return commit_or_discard(fs, planned, record, reason)


def _is_not_run(task: CleaningTask, attempt: str) -> None:
    raise AssertionError


# CI always tests this log dir, whose partitions need two commits, and draws one of the others.
ALWAYS = "partitions that share a checkpoint file"
DRAWN = [name for name in (*SHAPES, "random 0", "random 1") if name != ALWAYS]


def in_two_steps(name: str) -> InTwoSteps:
    given = shape(name)
    return InTwoSteps(given.logs, join=given.join)


@pytest.mark.parametrize("name", few_in_check([ALWAYS, *DRAWN], drawn=DRAWN))
def test_every_stop_of_a_preparation_and_its_commit_loses_no_record(name: str, fast_dir: Path) -> None:  # noqa: F811
    log_dir = in_two_steps(name)
    origin = fast_dir / "origin"
    log_dir.make(origin)
    run = expect(log_dir, find(log_dir, origin))
    committed = 0

    def check(state: State) -> None:
        nonlocal committed
        committed += check_state(log_dir, run, state)

    counts, first = Counts("preparation and commit"), read_tree(origin)
    for_every_stop(
        lambda path: write_tree(first, path), log_dir.run, check, work_dir=fast_dir / "stops", counts=counts,
        partial_cuts=3 if SOAK else 0, torn_writes=SOAK, seed=SEED,
    )  # fmt: skip
    print(f"{name} (seed {SEED}): {counts}; the next run committed {committed} preparations")
    assert committed


def check_state(log_dir: InTwoSteps, run: Expected, state: State) -> int:
    """Check what a broker finds, and the result of the next run; return the number of preparations that it committed.
    """
    tree = state.tree
    judge(log_dir, find(log_dir, state.root), run, ended=state.action_ended)
    log_dir.recover(LOCAL, state.root)
    found = find(log_dir, state.root)
    expected = expect(log_dir, found)
    remove_tree(state.root)
    write_tree(tree, state.root)
    reported = log_dir.commit(LOCAL, state.root, "r2")
    assert not reported
    after = find(log_dir, state.root)
    judge(log_dir, after, expected, ended=True)
    assert after.files() == expected.files
    assert after.checkpoints == expected.checkpoints
    for log in log_dir.logs:
        check_names(log, after, state.root / log.name)
    return len(log_dir.committed)


@pytest.mark.parametrize("name", few_in_check([ALWAYS, *DRAWN], drawn=DRAWN))
def test_every_fault_of_a_preparation_and_its_commit_loses_no_record(name: str, fast_dir: Path) -> None:  # noqa: F811
    log_dir = in_two_steps(name)
    origin = fast_dir / "origin"
    log_dir.make(origin)
    run = expect(log_dir, find(log_dir, origin))

    def check(state: State) -> None:
        check_state(log_dir, run, state)

    counts = Counts("preparation and commit")
    for_every_fault(
        read_tree(origin), log_dir.run, check, work_dir=fast_dir / "faults", counts=counts, share=0.05, seed=SEED
    )
    print(f"{name} (seed {SEED}): {counts}")
