"""Runs an action once for every file operation in it, stopped before that one or with that one failing, and looks at
what is left.

Each stop and each fault gives several states: the directory as it is, a power cut that drops all that was not
fsynced, and power cuts that drop some of it, in order and in any order. Equal states are checked once.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keytail.errors import KeytailError, in_words, of_system
from tests.crash.faults import CUT, GOES_ON, Fault, chosen
from tests.crash.recorder import RecordingFileSystem, Stopped

SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
EVERY_FAULT = SOAK or os.environ.get("KEYTAIL_FAULTS") == "all"
SEED = int(os.environ.get("KEYTAIL_SEED", "0")) or random.SystemRandom().randrange(2**32)


@dataclass(frozen=True)
class State:
    """A directory as a stop or a fault left it. `check` may change it; `label` says how to get there again.

    `action_ended`: the action came to its end and told of nothing that failed.
    """

    root: Path
    label: str
    operations: tuple[tuple[str, tuple[object, ...]], ...]
    action_ended: bool
    fault: Fault | None = None


@dataclass(frozen=True)
class Failed:
    """What an action returns that had failures and tells of them, as `failed` rows do, without raising."""

    told: tuple[str, ...]


@dataclass
class Counts:
    """What was tried. Counts with a `protocol` are lines of the table that `make crash` prints."""

    protocol: str = ""
    calls: int = 0  # of log/fs.py in an undisturbed run, readings included
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


def for_every_stop_and_fault(
    make_dir: Callable[[Path], object],
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
    """`for_every_stop`, then `for_every_fault`, of the same."""
    for_every_stop(
        make_dir, action, check, work_dir=work_dir, counts=counts, partial_cuts=partial_cuts, seed=seed
    )
    for_every_fault(
        make_dir, action, check,
        work_dir=work_dir, counts=counts, again=again, share=share, scratch=scratch, seed=seed,
    )  # fmt: skip


def for_every_stop(
    make_dir: Callable[[Path], object],
    action: Action,
    check: Check,
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
    operations = _whole_run(origin, action, work_dir / "whole", counts).operations
    for stop in range(len(operations) + 1):
        can_tear = torn_writes and stop < len(operations) and operations[stop][0] in ("write", "write_at")
        for torn in (False, True) if can_tear else (False,):
            root = work_dir / "run"
            shutil.copytree(origin, root)
            fs = RecordingFileSystem(root).stop_at(stop, torn=torn)
            label = f"seed {seed}, stop {stop}{' torn' if torn else ''}"
            ended = not _run(fs, action, root)
            assert ended == (stop == len(operations)), f"the action is not deterministic ({label})"
            fs.check()
            counts.stops += 1
            _check_states(fs, label, ended, check, counts, work_dir, rng, partial_cuts)
            shutil.rmtree(root)
    shutil.rmtree(work_dir)


def for_every_fault(
    make_dir: Callable[[Path], object],
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
    """As `for_every_stop`, but every operation, readings too, fails in turn with each error that makes sense.

    Without KEYTAIL_FAULTS=all a `share` of them is tried, chosen by `seed`. Either the action ends as if nothing had
    been, or it raises OSError or KeytailError, or returns `Failed`; the text names what was being done and the
    file, and no descriptor stays open. Names that end in one of `scratch` must be gone then, where the fault lets
    anyone remove them. `again(fs, root)` is run after a failed fsync: what was not written then never is.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    origin = work_dir / "origin"
    make_dir(origin)
    rng = random.Random(seed)
    calls = _whole_run(origin, action, work_dir / "whole", counts).calls
    for number, fault in chosen([operation for operation, _ in calls], 1.0 if EVERY_FAULT else share, rng):
        root = work_dir / "run"
        shutil.copytree(origin, root)
        fs = RecordingFileSystem(root).fail_at(number, fault)
        operation, arguments = calls[number]
        label = f"seed {seed}, call {number} ({operation} {arguments[0]}) fails: {fault}"
        counts.faults += 1
        try:
            told = _run(fs, action, root)
            fs.check()
            _check_told(fs, fault, told)
            _check_scratch(root, operation, fault, told, scratch)
        except AssertionError as error:
            raise AssertionError(f"at {label}: {error}\n{_done(fs)}") from error
        except Exception as error:
            raise AssertionError(f"at {label}: an error of another kind\n{_done(fs)}") from error
        _check_states(fs, label, not told, check, counts, work_dir, rng, partial_cuts, fault)
        if operation == "fsync" and again is not None and told:
            fs.mend()
            assert not _run(fs, again, root), f"at {label}: not done afterwards either"
            _check_states(fs, f"{label}, then again", True, check, counts, work_dir, rng, partial_cuts, fault)
        shutil.rmtree(root)
    shutil.rmtree(work_dir)


def _check_states(
    fs: RecordingFileSystem,
    label: str,
    ended: bool,
    check: Check,
    counts: Counts,
    work_dir: Path,
    rng: random.Random,
    partial_cuts: int,
    fault: Fault | None = None,
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
                check(State(left, f"{label}, {way}", tuple(fs.operations), ended, fault))
            except AssertionError as error:
                counts.losses += 1
                raise AssertionError(f"at {label}, {way}: {error}\n{_done(fs)}") from error
        shutil.rmtree(left)


def _done(fs: RecordingFileSystem) -> str:
    done = "\n".join(f"  {number}: {operation}" for number, operation in enumerate(fs.operations))
    return f"after the operations\n{done}"


def _whole_run(origin: Path, action: Action, root: Path, counts: Counts) -> RecordingFileSystem:
    shutil.copytree(origin, root)
    fs = RecordingFileSystem(root)
    told = _run(fs, action, root)
    assert not told, f"the action fails without a fault: {told}"
    shutil.rmtree(root)
    counts.calls = max(counts.calls, len(fs.calls))
    return fs


def _run(fs: RecordingFileSystem, action: Action, root: Path) -> list[str]:
    """What kept the action from its end, in words; empty if nothing did."""
    try:
        result = action(fs, root)
    except Stopped:
        fs.close_all()  # when a process dies, its descriptors close
        return ["stopped"]
    except (OSError, KeytailError) as error:
        if not fs.failed:
            raise
        result = Failed((in_words(error),))
    left_open = [path for path in _open_files() if path.startswith(str(root))]
    assert not left_open, f"descriptors stay open: {left_open}"
    return list(result.told) if isinstance(result, Failed) else []


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    return found


def _check_told(fs: RecordingFileSystem, fault: Fault, told: list[str]) -> None:
    """A failure is told: the system's words, what was being done, which file it is, and what to do."""
    assert not (told and fault.kind in GOES_ON), f"half of an answer is no failure: {told}"
    if not told or fault.kind in GOES_ON:
        return
    words = [] if fault.kind == CUT else [str(fault.error().strerror), " while ", of_system(fault.error()).remedy or ""]
    said = [any(all(word in text for word in (*words, name)) for text in told) for _, name in fs.failed]
    assert any(said), f"failed were {fs.failed}, but told was {told}"


def _check_scratch(root: Path, operation: str, fault: Fault, told: list[str], scratch: tuple[str, ...]) -> None:
    """None is left, but what the fault itself kept from being listed or removed."""
    if not scratch or fault.may_keep_scratch or operation == "scan":
        return
    left = [path.name for path in root.rglob("*") if path.name.endswith(scratch)]
    assert len(left) <= (operation == "unlink"), f"left behind: {left}"


def digest_of(root: Path) -> str:
    """Of names and contents (not of times)."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        digest.update(f"{path.relative_to(root)}\0{path.is_dir()}\0".encode())
        if path.is_file():
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
