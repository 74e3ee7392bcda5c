"""Explores all states in which a compaction can stop: in the first run, in the recovery, and in the next run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keytail.log.fs import LOCAL
from tests.crash.compactions import Expected, Found, LogDir, expect, find
from tests.crash.driver import Counts, Failed, State, for_every_fault, for_every_stop
from tests.crash.recorder import RecordingFileSystem
from tests.crash.trees import Tree, digest_of_content, read_tree, remove_tree, write_tree

RECOVERIES_EXPLORED = 1  # the number if KEYTAIL_SOAK is not set
SCRATCH = (".clean", ".tmp")


@dataclass(frozen=True)
class Visit:
    """A state to check. `run` is the expected result of a complete run, `origin` the initial state; `root` may be
    changed.
    """

    state: State
    found: Found
    run: Expected
    origin: Found
    ended: bool

    @property
    def root(self) -> Path:
        return self.state.root


@dataclass
class Explorer:
    """Visits each state once. States that differ only in scratch files, which are never read, count as one.

    A recovery is the first part of a run, and ends in one of a few states. All stops in second runs are covered by
    stops in each recovery, and by stops in the rest of the run from each recovered state.
    """

    log_dir: LogDir
    work_dir: Path
    visit: Callable[[Visit], object]
    seed: int
    soak: bool = False
    partial_cuts: int = 1
    fault_share: float = 0.05  # the share if KEYTAIL_SOAK is not set
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
        """Make each operation of a run fail in turn, and each operation of recoveries from some of the states after a
        stop.
        """
        origin, run = self._begin()
        self._every_fault(origin, self.log_dir.run, run, self.first, "first", self.fault_share)
        states: dict[str, Tree] = {}

        def keep(state: State) -> None:
            states.setdefault(digest_of_rest(state.tree), state.tree)

        for_every_stop(
            origin, self.log_dir.run, keep, work_dir=self.work_dir / "stops",
            counts=Counts(), partial_cuts=0, torn_writes=False, seed=self.seed,
        )  # fmt: skip
        for number, tree in enumerate(states.values()):
            share = self.fault_share / 5
            self._every_fault(tree, self.log_dir.recover, run, self.recoveries, "recovery", share, number)

    def _begin(self) -> tuple[Tree, Expected]:
        origin = self.work_dir / "origin"
        self.log_dir.make(origin)
        self.origin = find(self.log_dir, origin)
        tree = read_tree(origin)
        self.recovered.add(digest_of_rest(tree))
        return tree, expect(self.log_dir, self.origin)

    def _every_fault(
        self,
        start: Tree,
        action: Callable[[RecordingFileSystem, Path], object],
        run: Expected,
        counts: Counts,
        name: str,
        share: float,
        number: int = 0,
    ) -> None:
        is_run = name != "recovery"
        for_every_fault(
            start, action, self._check_of(run, is_run=is_run),
            again=self._run_after_a_fault if is_run else None, work_dir=self.work_dir / name, counts=counts,
            share=share, scratch=SCRATCH if is_run else (), seed=self.seed + number,
        )  # fmt: skip

    def _after_a_stop(self, tree: Tree, run: Expected) -> None:
        digest = digest_of_rest(tree)
        if digest in self.to_recover:
            return
        self.to_recover.add(digest)
        self._every_stop(tree, self.log_dir.recover, run, self.recoveries, None, "recovery", int(self.soak))
        recovered, found = self._recovered(tree)
        digest = digest_of_rest(recovered)
        if digest in self.recovered:
            return
        self.recovered.add(digest)
        if self.soak or self.explored_after < RECOVERIES_EXPLORED:
            self.explored_after += 1
            again = expect(self.log_dir, found)
            partial = 3 if self.soak else 0
            self._every_stop(recovered, self._run_again, again, self.second, None, "second", partial)

    def _recovered(self, tree: Tree) -> tuple[Tree, Found]:
        """Return the tree after an undisturbed recovery from a state, and what a broker finds in it."""
        root = self.work_dir / "recovered"
        write_tree(tree, root)
        self.log_dir.recover(LOCAL, root)
        found = read_tree(root), find(self.log_dir, root)
        remove_tree(root)
        return found

    def _run_after_a_fault(self, fs: RecordingFileSystem, root: Path) -> Failed:
        """Run again. The expected result depends on which segments and checkpoints the first run replaced."""
        self.after_a_fault = expect(self.log_dir, self._recovered(read_tree(root))[1])
        return self._run_again(fs, root)

    def _run_again(self, fs: RecordingFileSystem, root: Path) -> Failed:
        return self.log_dir.run(fs, root, "r2")

    def _every_stop(
        self,
        start: Tree,
        action: Callable[[RecordingFileSystem, Path], object],
        run: Expected,
        counts: Counts,
        then: Callable[[Tree, Expected], object] | None,
        name: str,
        partial_cuts: int,
    ) -> None:
        check = self._check_of(run, is_run=name != "recovery", then=then)
        for_every_stop(
            start, action, check,
            work_dir=self.work_dir / name, counts=counts, partial_cuts=partial_cuts, seed=self.seed,
            torn_writes=self.soak or name != "second",
        )  # fmt: skip

    def _check_of(
        self, run: Expected, *, is_run: bool, then: Callable[[Tree, Expected], object] | None = None
    ) -> Callable[[State], None]:
        def check(state: State) -> None:
            ended = state.action_ended and is_run
            is_again = ", then again, " in state.label
            wanted = self.after_a_fault if is_again and self.after_a_fault is not None else run
            if then is not None:
                if self.soak or ("partial" not in state.label and "unordered" not in state.label):
                    then(state.tree, run)
            key = f"{digest_of_rest(state.tree)} {ended} {is_again} {wanted.checkpoints}"
            if key not in self.visited:
                self.visited.add(key)
                self.visit(Visit(state, find(self.log_dir, state.root), wanted, self.origin, ended))

        return check


def digest_without_scratch(root: Path) -> str:
    return digest_of_rest(read_tree(root))


def digest_of_rest(tree: Tree) -> str:
    """Return a digest of names and contents, and of the names of partitions that have scratch files."""
    digest = hashlib.blake2b(digest_size=16)
    with_scratch = set()
    for name in sorted(tree):
        if name.endswith(".clean"):
            with_scratch.add(name.rpartition("/")[0].rpartition("/")[2])
        elif not name.endswith("/"):
            digest.update(f"{name}\0".encode() + digest_of_content(tree[name][0]))
    digest.update(repr(sorted(with_scratch)).encode())
    return digest.hexdigest()
