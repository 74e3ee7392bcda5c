"""Runs an action, and checks the states after a stop before each of its file operations. Then makes each operation fail
in a separate run, and checks the states after that.

Each stop and each fault has several states: the directory as it is, after a power cut that loses all unsynced changes,
and after power cuts that lose some of them, in order or in any order. Equal states are checked once. The state after a
stop does not depend on later operations, so one run covers all stops. States are values (`trees.py`), and are written
to a disk only while they are checked.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import KeytailError, in_words, of_system
from tests.crash.faults import CUT, PARTIAL, Fault, chosen
from tests.crash.recorder import RecordingFileSystem
from tests.crash.trees import Tree, digest_of_tree, read_tree, remove_tree, write_tree

SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
EVERY_FAULT = SOAK or os.environ.get("KEYTAIL_FAULTS") == "all"


@dataclass(frozen=True)
class State:
    """The state of a directory after a stop or a fault. `check` may change it; `label` describes how to reproduce it.
    `action_ended` means that the action completed and reported no failure. `left` is the tree, which is not written to
    `where` yet.
    """

    where: Path
    label: str
    operations: tuple[tuple[str, tuple[object, ...]], ...]
    action_ended: bool
    fault: Fault | None = None
    left: Tree | None = None

    @cached_property
    def root(self) -> Path:
        if self.left is not None:
            write_tree(self.left, self.where)
        return self.where

    @cached_property
    def tree(self) -> Tree:
        return read_tree(self.where) if self.left is None else self.left


@dataclass(frozen=True)
class Failed:
    """The result of an action that returns its failures, like `failed` rows, instead of raising them."""

    reported: tuple[str, ...]


@dataclass
class Counts:
    """The numbers of stops, faults and states that were tried. Those with a `protocol` are rows of the table that `make
    crash` prints.
    """

    protocol: str = ""
    calls: int = 0  # calls of log/fs.py in a run without a fault, including reads
    stops: int = 0
    faults: int = 0
    states: int = 0
    distinct_states: int = 0
    losses: int = 0
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.protocol:
            TABLE.append(self)

    def __str__(self) -> str:
        faults = f"{self.faults} faults, " if self.faults else ""
        return f"{self.stops} stops, {faults}{self.states} states, {self.distinct_states} distinct"


TABLE: list[Counts] = []

Action = Callable[[RecordingFileSystem, Path], object]
Check = Callable[[State], object]
def few_in_check(names: Iterable[str], *in_check: str, drawn: Collection[str] = ()) -> list[Any]:
    """Return all names as parameters of a test, with marks. `make check` runs only those in `in_check`, a few fast ones
    of each protocol; each run draws one of the similar names in `drawn`.
    """
    marks = {name: [] if name in in_check else [pytest.mark.long] for name in names}
    assert {*in_check, *drawn} <= set(marks), (in_check, drawn)
    for name in drawn:
        marks[name].append(pytest.mark.one_of())
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


Start = Tree | Callable[[Path], object]  # the initial tree, or a function that creates it


def for_every_stop_and_fault(
    start: Start,
    action: Action,
    check: Check,
    *,
    work_dir: Path,
    counts: Counts,
    again: Action | None = None,
    share: float = 1.0,
    partial_cuts: int = 1,
    scratch: tuple[str, ...] = (),
    seed: int = 0,
) -> None:
    """Run `for_every_stop`, then `for_every_fault`, with the same arguments."""
    for_every_stop(
        start, action, check, work_dir=work_dir, counts=counts, partial_cuts=partial_cuts, seed=seed
    )
    for_every_fault(
        start, action, check,
        work_dir=work_dir, counts=counts, again=again, share=share, scratch=scratch, seed=seed,
    )  # fmt: skip


def for_every_stop(
    start: Start,
    action: Action,
    check: Check,
    *,
    work_dir: Path,
    counts: Counts,
    partial_cuts: int = 3,
    torn_writes: bool = True,
    seed: int = 0,
) -> None:
    """Create `work_dir/origin` with `start(path)`, and run `action(fs, root)` on a copy of it. `check(state)` is called
    with every distinct state, including that after the complete action. Calls with the same `counts` check each state
    only once in total.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    origin, root, rng = _origin(start, work_dir), work_dir / "run", random.Random(seed)
    write_tree(origin, root)
    fs = RecordingFileSystem(root, origin)
    states: list[State] = []

    def look(ended: bool, torn: bool = False) -> None:
        counts.stops += 1
        label = f"seed {seed}, stop {len(fs.operations)}{' torn' if torn else ''}"
        states.extend(_new_states(fs, label, ended, counts, work_dir, rng, partial_cuts))

    def before_each(operation: str, arguments: tuple[Any, ...]) -> None:
        fs.check()
        look(False)
        if torn_writes and operation in ("write", "write_at"):
            with fs.torn(operation, arguments):
                look(False, torn=True)

    fs.before_each = before_each
    reported = _run(fs, action, root)
    assert not reported, f"the action failed without a fault: {reported}"
    counts.calls = max(counts.calls, len(fs.calls))
    fs.check()
    look(True)
    remove_tree(root)
    _check(states, check, counts)
    remove_tree(work_dir)


def for_every_fault(
    start: Start,
    action: Action,
    check: Check,
    *,
    work_dir: Path,
    counts: Counts,
    again: Action | None = None,
    share: float = 1.0,
    partial_cuts: int = 0,
    scratch: tuple[str, ...] = (),
    seed: int = 0,
) -> None:
    """Like `for_every_stop`, but every operation, including reads, fails in turn with each plausible error.

    Without KEYTAIL_FAULTS=all a `share` of the faults is tried, selected by `seed`. The action must succeed despite the
    fault, raise OSError or KeytailError, or return `Failed`. The error must name the operation and the file, and no
    descriptor may remain open. Afterwards, no name may end in one of `scratch`, unless the fault prevents the removal.
    `again(fs, root)` is run after a failed fsync, whose data is never written.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    origin, root, rng = _origin(start, work_dir), work_dir / "run", random.Random(seed)
    calls = _calls(origin, action, root, counts)
    for number, fault in chosen([operation for operation, _ in calls], 1.0 if EVERY_FAULT else share, rng):
        write_tree(origin, root)
        fs = RecordingFileSystem(root, origin).fail_at(number, fault)
        operation, arguments = calls[number]
        label = f"seed {seed}, call {number} ({operation} {arguments[0]}) fails: {fault}"
        counts.faults += 1
        try:
            reported = _run(fs, action, root)
            fs.check()
            _check_reported(fs, fault, reported)
            _check_scratch(root, operation, fault, reported, scratch)
        except AssertionError as error:
            raise AssertionError(f"at {label}: {error}\n{_done(fs.operations)}") from error
        except Exception as error:
            raise AssertionError(f"at {label}: an error of another kind\n{_done(fs.operations)}") from error
        left = _new_states(fs, label, not reported, counts, work_dir, rng, partial_cuts, fault)
        _check(left, check, counts)
        if operation == "fsync" and again is not None and reported:
            fs.repair()
            assert not _run(fs, again, root), f"at {label}: the second run also failed"
            fs.check()
            left = _new_states(fs, f"{label}, then again", True, counts, work_dir, rng, partial_cuts, fault)
            _check(left, check, counts)
        remove_tree(root)
    remove_tree(work_dir)


def _new_states(
    fs: RecordingFileSystem,
    label: str,
    ended: bool,
    counts: Counts,
    work_dir: Path,
    rng: random.Random,
    partial_cuts: int,
    fault: Fault | None = None,
) -> list[State]:
    """Return the new states after a stop at this point, without writing them to a disk."""
    kinds: list[tuple[str, Tree]] = [
        ("as it is", fs.as_it_is()),
        ("power cut", fs.power_cut()),
        *((f"partial power cut {i}", fs.partial_power_cut(rng, in_order=True)) for i in range(partial_cuts)),
        *((f"unordered power cut {i}", fs.partial_power_cut(rng, in_order=False)) for i in range(2 * partial_cuts)),
    ]
    states = []
    for kind, tree in kinds:
        counts.states += 1
        # the last state must also pass the checks of a completed action
        digest = f"{digest_of_tree(tree)} {ended}"
        if digest not in counts.seen:
            counts.seen.add(digest)
            counts.distinct_states += 1
            states.append(
                State(work_dir / "left", f"{label}, {kind}", tuple(fs.operations), ended, fault, tree)
            )
    return states


def _check(states: Iterable[State], check: Check, counts: Counts) -> None:
    for state in states:
        try:
            check(state)
        except AssertionError as error:
            counts.losses += 1
            raise AssertionError(f"at {state.label}: {error}\n{_done(state.operations)}") from error
        if state.where.exists():
            remove_tree(state.where)


def _done(operations: Iterable[object]) -> str:
    done = "\n".join(f"  {number}: {operation}" for number, operation in enumerate(operations))
    return f"after the operations\n{done}"


def _origin(start: Start, work_dir: Path) -> Tree:
    if isinstance(start, dict):
        return start
    path = work_dir / "origin"
    start(path)
    tree = read_tree(path)
    remove_tree(path)
    return tree


def _calls(origin: Tree, action: Action, root: Path, counts: Counts) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the calls of the file system in a run without a fault."""
    write_tree(origin, root)
    fs = RecordingFileSystem(root, origin)
    reported = _run(fs, action, root)
    assert not reported, f"the action failed without a fault: {reported}"
    remove_tree(root)
    counts.calls = max(counts.calls, len(fs.calls))
    return fs.calls


def _run(fs: RecordingFileSystem, action: Action, root: Path) -> list[str]:
    """Run the action and return the reported failures."""
    try:
        result = action(fs, root)
    except (OSError, KeytailError) as error:
        if not fs.failed:
            raise
        result = Failed((in_words(error),))
    left_open = [path for path in open_files() if path.startswith(str(root))]
    assert not left_open, f"descriptors remained open: {left_open}"
    return list(result.reported) if isinstance(result, Failed) else []


def open_files() -> list[str]:
    """Return the paths of the open files of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # this was the descriptor of the listing itself
            continue
    return found


def _check_reported(fs: RecordingFileSystem, fault: Fault, reported: list[str]) -> None:
    """Check that a failure is reported with the error of the system, the operation, the file, and a remedy."""
    assert not (reported and fault.kind in PARTIAL), f"a partial read or write was reported as a failure: {reported}"
    if not reported or fault.kind in PARTIAL:
        return
    words = [] if fault.kind == CUT else [str(fault.error().strerror), " while ", of_system(fault.error()).remedy or ""]
    is_reported = [any(all(word in text for word in (*words, name)) for text in reported) for _, name in fs.failed]
    assert any(is_reported), f"{fs.failed} failed, but {reported} was reported"


def _check_scratch(root: Path, operation: str, fault: Fault, reported: list[str], scratch: tuple[str, ...]) -> None:
    """Check that no scratch files remain, except those that could not be listed or removed because of the fault."""
    if not scratch or fault.may_keep_scratch or operation == "scan":
        return
    left = [name for name in read_tree(root) if name.endswith(scratch)]
    assert len(left) <= (operation == "unlink"), f"scratch files remain: {left}"


def digest_of(root: Path) -> str:
    """Return a digest of names and contents, but not of times."""
    return digest_of_tree(read_tree(root))
