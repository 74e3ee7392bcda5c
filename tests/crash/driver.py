"""Runs an action once for every file operation in it, stopped before that one, and looks at what is left.

Each stop gives several states: the directory as it is, a power cut that drops all that was not fsynced,
and power cuts that drop some of it, in order and in any order. Equal states are checked once.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.recorder import RecordingFileSystem, Stopped


@dataclass(frozen=True)
class State:
    """A directory as a stop left it. `check` may change it; `label` says how to get there again."""

    root: Path
    label: str
    operations: tuple[tuple[str, tuple[object, ...]], ...]
    action_ended: bool


@dataclass
class Counts:
    """What `for_every_stop` tried."""

    stops: int = 0
    states: int = 0
    distinct_states: int = 0
    seen: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.stops} stops, {self.states} states, {self.distinct_states} distinct"


Action = Callable[[RecordingFileSystem, Path], object]


def for_every_stop(
    make_dir: Callable[[Path], object],
    action: Action,
    check: Callable[[State], object],
    *,
    work_dir: Path,
    counts: Counts,
    partial_cuts: int = 3,
    torn_writes: bool = True,
    seed: int = 0,
) -> None:
    """Builds `work_dir/origin` once by `make_dir(path)`; runs `action(fs, root)` on copies of it.

    `check(state)` gets every distinct state, the one after the whole action included. Give the same `counts`
    to several calls to check a state once among all of them.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    origin = work_dir / "origin"
    make_dir(origin)
    rng = random.Random(seed)
    operations = _whole_run(origin, action, work_dir / "whole")
    for stop in range(len(operations) + 1):
        can_tear = torn_writes and stop < len(operations) and operations[stop][0] == "write"
        for torn in (False, True) if can_tear else (False,):
            root = work_dir / "run"
            shutil.copytree(origin, root)
            fs = RecordingFileSystem(root).stop_at(stop, torn=torn)
            label = f"seed {seed}, stop {stop}{' torn' if torn else ''}"
            ended = _run(fs, action, root)
            assert ended == (stop == len(operations)), f"the action is not deterministic ({label})"
            fs.check()
            counts.stops += 1
            _check_states(fs, label, ended, check, counts, work_dir, rng, partial_cuts)
            shutil.rmtree(root)
    shutil.rmtree(work_dir)


def _check_states(
    fs: RecordingFileSystem,
    label: str,
    ended: bool,
    check: Callable[[State], object],
    counts: Counts,
    work_dir: Path,
    rng: random.Random,
    partial_cuts: int,
) -> None:
    def in_order(target: Path) -> None:
        fs.partial_power_cut(target, rng, in_order=True)

    def in_any_order(target: Path) -> None:
        fs.partial_power_cut(target, rng, in_order=False)

    ways: list[tuple[str, Callable[[Path], None]]] = [
        ("as it is", fs.as_it_is),
        ("power cut", fs.power_cut),
        *((f"partial power cut {i}", in_order) for i in range(partial_cuts)),
        *((f"unordered power cut {i}", in_any_order) for i in range(2 * partial_cuts)),
    ]
    for way, materialise in ways:
        left = work_dir / "left"
        materialise(left)
        counts.states += 1
        digest = f"{digest_of(left)} {ended}"  # what must hold at the end must hold of the last state
        if digest not in counts.seen:
            counts.seen.add(digest)
            counts.distinct_states += 1
            try:
                check(State(left, f"{label}, {way}", tuple(fs.operations), ended))
            except AssertionError as error:
                done = "\n".join(f"  {number}: {operation}" for number, operation in enumerate(fs.operations))
                raise AssertionError(f"at {label}, {way}: {error}\nafter the operations\n{done}") from error
        shutil.rmtree(left)


def _whole_run(origin: Path, action: Action, root: Path) -> list[tuple[str, tuple[object, ...]]]:
    shutil.copytree(origin, root)
    fs = RecordingFileSystem(root)
    assert _run(fs, action, root)
    shutil.rmtree(root)
    return fs.operations


def _run(fs: RecordingFileSystem, action: Action, root: Path) -> bool:
    """Whether the action came to its end."""
    try:
        action(fs, root)
    except Stopped:
        return False
    return True


def digest_of(root: Path) -> str:
    """Of names and contents (not of times)."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        digest.update(f"{path.relative_to(root)}\0{path.is_dir()}\0".encode())
        if path.is_file():
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
