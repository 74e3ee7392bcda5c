"""Every state that a stopped compaction can leave: in the first run, in the recovery, and in the run after it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keytail.log.fs import LOCAL
from tests.crash.compactions import Expected, Found, LogDir, expect, find
from tests.crash.driver import Counts, Failed, State, for_every_fault, for_every_stop
from tests.crash.recorder import RecordingFileSystem

RECOVERIES_EXPLORED = 1  # without KEYTAIL_SOAK
SCRATCH = (".clean", ".tmp")


@dataclass(frozen=True)
class Visit:
    """A state. `run` is what the stopped run was to leave; `root` may be changed, `origin` is where all began."""

    root: Path
    found: Found
    run: Expected
    origin: Found
    ended: bool


@dataclass
class Explorer:
    """Visits each state once; states that differ in scratch files only, which nobody reads, are one.

    A recovery is a run's first part, and ends in one of few states. So stopping in each recovery, and in the rest
    of the run from each state in which one ends, is stopping everywhere in every second run.
    """

    log_dir: LogDir
    work_dir: Path
    visit: Callable[[Visit], object]
    seed: int
    soak: bool = False
    partial_cuts: int = 1
    fault_share: float = 0.05  # without KEYTAIL_SOAK
    first: Counts = field(default_factory=lambda: Counts("compaction"))
    recoveries: Counts = field(default_factory=lambda: Counts("recovery of a compaction"))
    second: Counts = field(default_factory=lambda: Counts("compaction after a recovery"))
    visited: set[str] = field(default_factory=set)
    to_recover: set[str] = field(default_factory=set)
    recovered: set[str] = field(default_factory=set)
    explored_after: int = 0
    after_a_fault: Expected | None = None

    def __str__(self) -> str:
        return (
            f"{self.first}; in recoveries {self.recoveries}; in runs after {self.explored_after} of "
            f"{len(self.recovered) - 1} recoveries {self.second}; {len(self.visited)} differ in more than scratch"
        )

    def explore(self) -> None:
        origin, run = self._begin()
        self._every_stop(origin, self.log_dir.run, run, self.first, self._after_a_stop, "first", self.partial_cuts)

    def explore_faults(self) -> None:
        """Every operation of a run fails in turn, and of the recovery of some of the states that a run leaves."""
        origin, run = self._begin()
        self._every_fault(origin, self.log_dir.run, run, self.first, "first", self.fault_share)
        states: dict[str, Path] = {}

        def keep(state: State) -> None:
            digest = digest_without_scratch(state.root)
            if digest not in states:
                states[digest] = self.work_dir / f"stopped {len(states)}"
                shutil.copytree(state.root, states[digest])

        for_every_stop(
            lambda path: shutil.copytree(origin, path), self.log_dir.run, keep, work_dir=self.work_dir / "stops",
            counts=Counts(), partial_cuts=0, torn_writes=False, seed=self.seed,
        )  # fmt: skip
        for root in states.values():
            self._every_fault(root, self.log_dir.recover, run, self.recoveries, "recovery", self.fault_share / 5)
            shutil.rmtree(root)

    def _begin(self) -> tuple[Path, Expected]:
        origin = self.work_dir / "origin"
        self.log_dir.make(origin)
        self.origin = find(self.log_dir, origin)
        self.recovered.add(digest_without_scratch(origin))
        return origin, expect(self.log_dir, self.origin)

    def _every_fault(
        self,
        start: Path,
        action: Callable[[RecordingFileSystem, Path], object],
        run: Expected,
        counts: Counts,
        name: str,
        share: float,
    ) -> None:
        is_run = name != "recovery"
        for_every_fault(
            lambda path: shutil.copytree(start, path), action, self._check_of(run, is_run=is_run),
            again=self._run_after_a_fault if is_run else None, work_dir=self.work_dir / name, counts=counts,
            share=share, scratch=SCRATCH if is_run else (), seed=self.seed,
        )  # fmt: skip

    def _after_a_stop(self, root: Path, run: Expected) -> None:
        digest = digest_without_scratch(root)
        if digest in self.to_recover:
            return
        self.to_recover.add(digest)
        self._every_stop(root, self.log_dir.recover, run, self.recoveries, None, "recovery", int(self.soak))
        recovered = self.work_dir / "recovered"
        shutil.copytree(root, recovered)
        self.log_dir.recover(LOCAL, recovered)
        digest = digest_without_scratch(recovered)
        if digest not in self.recovered:
            self.recovered.add(digest)
            if not self.soak and self.explored_after == RECOVERIES_EXPLORED:
                shutil.rmtree(recovered)
                return
            self.explored_after += 1
            again = expect(self.log_dir, find(self.log_dir, recovered))
            partial = 3 if self.soak else 0
            self._every_stop(recovered, self._run_again, again, self.second, None, "second", partial)
        shutil.rmtree(recovered)

    def _run_after_a_fault(self, fs: RecordingFileSystem, root: Path) -> Failed:
        """What it must leave depends on how far the one before it came: segments replaced, or the checkpoint, too."""
        recovered = self.work_dir / "recovered"
        shutil.copytree(root, recovered)
        self.log_dir.recover(LOCAL, recovered)
        self.after_a_fault = expect(self.log_dir, find(self.log_dir, recovered))
        shutil.rmtree(recovered)
        return self._run_again(fs, root)

    def _run_again(self, fs: RecordingFileSystem, root: Path) -> Failed:
        return self.log_dir.run(fs, root, "r2")

    def _every_stop(
        self,
        start: Path,
        action: Callable[[RecordingFileSystem, Path], object],
        run: Expected,
        counts: Counts,
        then: Callable[[Path, Expected], object] | None,
        name: str,
        partial_cuts: int,
    ) -> None:
        check = self._check_of(run, is_run=name != "recovery", then=then)
        for_every_stop(
            lambda path: shutil.copytree(start, path), action, check,
            work_dir=self.work_dir / name, counts=counts, partial_cuts=partial_cuts, seed=self.seed,
            torn_writes=self.soak or name != "second",
        )  # fmt: skip

    def _check_of(
        self, run: Expected, *, is_run: bool, then: Callable[[Path, Expected], object] | None = None
    ) -> Callable[[State], None]:
        def check(state: State) -> None:
            ended = state.action_ended and is_run
            is_again = ", then again, " in state.label
            wanted = self.after_a_fault if is_again and self.after_a_fault is not None else run
            if then is not None:
                if self.soak or ("partial" not in state.label and "unordered" not in state.label):
                    then(state.root, run)
            key = f"{digest_without_scratch(state.root)} {ended} {is_again} {wanted.checkpoints}"
            if key not in self.visited:
                self.visited.add(key)
                self.visit(Visit(state.root, find(self.log_dir, state.root), wanted, self.origin, ended))

        return check


def digest_without_scratch(root: Path) -> str:
    """Of names and contents, and whether there is any scratch."""
    digest = hashlib.blake2b(digest_size=16)
    with_scratch = set()
    for directory, _, files in sorted(os.walk(root)):
        for name in sorted(files):
            if name.endswith(".clean"):
                with_scratch.add(os.path.basename(directory))
                continue
            path = os.path.join(directory, name)
            digest.update(f"{os.path.relpath(directory, root)}\0{name}\0".encode())
            with open(path, "rb") as file:
                digest.update(hashlib.blake2b(file.read()).digest())
    digest.update(repr(sorted(with_scratch)).encode())
    return digest.hexdigest()
