"""Checks of a log dir after a kill, and of the result of the next run."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from keytail.log.lock import hold, is_held
from tests.crash.compactions import CHECKPOINT, Found, LogDir, expect, find, judge, read_checkpoint
from tests.crash.explorer import digest_without_scratch
from tests.crash.test_compaction import check_names

LEFTOVERS = (".clean", ".cleaned", ".swap", ".deleted", ".tmp")


@dataclass
class Kills:
    """The kills that were tried. They are counted as `before`, `between` or `after` by what a broker would find:
    nothing replaced, some groups, or all groups and the checkpoints.
    """

    name: str
    killed: int = 0
    ended: int = 0  # runs that ended before the kill
    before: int = 0
    between: int = 0
    after: int = 0
    second: int = 0  # kills of a run after a killed one
    states: set[str] = field(default_factory=set)
    opened: int = 0  # states that Kafka opened
    losses: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        TABLE.append(self)

    def __str__(self) -> str:
        return (
            f"{self.killed} kills ({self.before} before the first commit, {self.between} between, {self.after} after "
            f"the last; {self.second} of a run after a kill), {self.ended} came too late; {len(self.states)} states "
            f"differ in more than scratch, {self.opened} opened by Kafka; losses {self.losses}"
        )


TABLE: list[Kills] = []


def check_killed(log_dir: LogDir, root: Path, started: Found, kills: Kills) -> Found:
    """Check promises 1 and 2 for what a broker would find, that no checkpoint is above the cleaned segments, and that
    the lock is free. Return what a broker would find.
    """
    _wait_until_free(root)
    found, run = find(log_dir, root), expect(log_dir, started)
    judge(log_dir, found, run, ended=False)
    if found == started:
        kills.before += 1
    elif (found.files(), found.checkpoints) == (run.files, run.checkpoints):
        kills.after += 1
    else:
        kills.between += 1
    kills.states.add(digest_without_scratch(root))
    return found


def _wait_until_free(root: Path) -> None:
    """Wait until the lock is free: a child that the killed process has just forked may hold it until it has ended, too.
    On a busy machine, this may take seconds.
    """
    last_s = time.monotonic() + 60
    while is_held(str(root)):
        assert time.monotonic() < last_s, "killed processes still hold the lock"
        time.sleep(0.002)


def check_ended(log_dir: LogDir, root: Path, started: Found) -> None:
    """Check that a completed run has the result of the reference model, without other files (promise 5)."""
    run, found = expect(log_dir, started), find(log_dir, root)
    judge(log_dir, found, run, ended=True)
    assert found.files() == run.files
    assert read_checkpoint(root / CHECKPOINT) == run.checkpoints
    left = [path.name for path in root.rglob("*") if path.name.endswith(LEFTOVERS)]
    assert not left, f"scratch files remain: {left}"
    for log in log_dir.logs:
        check_names(log, found, root / log.name)
    with hold([str(root)]):
        pass


def contents(root: Path) -> dict[str, bytes]:
    """Return names and bytes of all files except the lock file, which may remain, as after a kill of a broker."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and path.name != ".lock"}  # fmt: skip


def moment(rng: random.Random, whole_run_s: float) -> float:
    """Return a random moment of a run; a few are after its end."""
    return rng.uniform(0, 1.02 * whole_run_s)
