"""Selects which partitions of a compaction start next, and reserves scratch space for their output.

The largest partitions are started first; small partitions share a bundle. A partition waits while it does not fit
beside the partitions in flight; a partition that never fits is written in passes, alone on its file system. With a
deadline, or if scratch space rather than the number of cores limits how many partitions run at a time, the partitions
with the largest expected gain per second are first: this order reclaims most by the deadline, and frees space as early
as possible. With a deadline, a partition that waits for space is not overtaken by others: small partitions could keep a
large one waiting until the deadline.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keytail.compact.expectation import gain_per_s
from keytail.compact.keeper import Keeper
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.passes import least_scratch_bytes, scratch_bytes
from keytail.errors import KeytailError
from keytail.run.memory import map_memory_bytes
from keytail.run.storage import ScratchSpace

# Size at which a bundle is full: small enough to repeat after a kill, and large enough that the 0.1 s of a Spark job do
# not matter.
BUNDLE_BYTES = 1 << 30
BUNDLE_PARTITIONS = 64
# Without Spark jobs, a bundle only saves rewrites of checkpoints; this number of bundles per core keeps all cores busy.
_BUNDLES_PER_CORE = 8
# Maximum number of bundles in flight. Each bundle uses a driver thread and two sockets; a process usually may have
# 1,024 descriptors.
MAX_BUNDLES = 256
# Maximum number of bundles of prepared partitions in flight. Commits of prepared partitions mostly wait for directories
# to be synced, and a file system syncs many directories together.
MAX_COMMITS = 16
# Maximum number of prepared partitions in a bundle: after a kill, up to this number per bundle is cleaned again.
_COMMITS_PER_BUNDLE = 16


@dataclass(frozen=True)
class BundleSize:
    """A bundle is full at `BUNDLE_BYTES`, but has at least `least` partitions, if available, and at most `most`."""

    least: int = 1
    most: int = BUNDLE_PARTITIONS

    @classmethod
    def of(cls, partitions: int, parallel: int, *, jobs_cost: bool) -> BundleSize:
        """Return the bundle size for `partitions` partitions, of which `parallel` can be cleaned at a time."""
        least = -(-_in_flight(parallel) // MAX_BUNDLES)
        if jobs_cost:
            return cls(least, max(BUNDLE_PARTITIONS, least))
        return cls(1, max(1, min(BUNDLE_PARTITIONS, partitions // (_BUNDLES_PER_CORE * parallel))))


def bundles_in_flight(partitions: int, parallel: int) -> int:
    """Return the maximum number of bundles in flight: one for each task that can run at a time, and a quarter more to
    be installed."""
    return min(_in_flight(parallel), partitions, MAX_BUNDLES)


def commits_in_flight(tasks: Sequence[CleaningTask]) -> int:
    """Return the maximum number of bundles of prepared partitions in flight."""
    prepared = sum(task.prepared is not None for task in tasks)
    return min(MAX_COMMITS, -(-prepared // _commits_per_bundle(prepared)))


def _commits_per_bundle(prepared: int) -> int:
    return max(1, min(_COMMITS_PER_BUNDLE, prepared // (2 * MAX_COMMITS)))


def _in_flight(parallel: int) -> int:
    return parallel + parallel // 4 + 1


@dataclass(frozen=True)
class Bundle:
    """Partitions that run together; either all of them were prepared, or none was. `needs`: the reserved bytes, by
    device number."""

    tasks: list[CleaningTask]
    needs: Mapping[int, int]

    @property
    def cleans(self) -> int:
        """The number of partitions that tasks clean."""
        return 0 if self.tasks[0].prepared is not None else len(self.tasks)


class Waiting:
    """The partitions that have not started, largest first or, with `by_gain`, by descending expected gain per second.

    With `in_order`, a partition that has to wait for space is not overtaken by other partitions on its file system.
    """

    def __init__(
        self,
        tasks: Iterable[CleaningTask],
        size: BundleSize,
        space: ScratchSpace,
        keeper: Keeper | None = None,
        *,
        by_gain: bool = False,
        in_order: bool = False,
    ) -> None:
        self._size, self._space, self._keeper = size, space, keeper
        self._by_gain, self._in_order = by_gain, in_order
        tasks = list(tasks)
        self._prepared = deque(task for task in tasks if task.prepared is not None)
        self._commits_per_bundle = _commits_per_bundle(len(self._prepared))
        sized = [(scratch_bytes(task), task) for task in tasks if task.prepared is None]
        self._tasks = sorted(sized, key=lambda item: _gain(item[1]) if by_gain else item[0], reverse=True)

    def __bool__(self) -> bool:
        return bool(self._prepared or self._tasks)

    def take(self) -> Bundle | None:
        """Return a bundle of one large or several small partitions, with its space reserved; None if there is no room,
        or no partition is left. Prepared partitions are first, because their commits take seconds and free space.
        """
        return self.take_prepared() or self._reserved(self._fitting() or self._in_passes())

    def take_prepared(self) -> Bundle | None:
        """Return a bundle of prepared partitions, with its space reserved; None if none fits, or none is left."""
        return self._reserved(self._of_prepared())

    def release(self, bundle: Bundle) -> None:
        self._space.release(bundle.needs)

    def take_all(self) -> list[CleaningTask]:
        """Remove and return all waiting partitions; they will not be started."""
        tasks = [*self._prepared, *(task for _, task in self._tasks)]
        self._prepared.clear()
        self._tasks = []
        return tasks

    def refusal(self, task: CleaningTask) -> KeytailError:
        """Return the error for a partition that cannot be rewritten even when no other partition is in flight."""
        return refusal_alone(task, self._space, self._keeper)

    def _reserved(self, bundle: Bundle | None) -> Bundle | None:
        if bundle is not None:
            self._space.reserve(bundle.needs)
        return bundle

    def _of_prepared(self) -> Bundle | None:
        needs: dict[int, int] = {}
        taken: list[CleaningTask] = []
        while self._prepared and len(taken) < self._commits_per_bundle:
            task = self._prepared[0]
            more = self._needs(task, 0, needs)  # the bytes of copies for a backup
            fits = self._space.fits(more)
            if fits or (not taken and self._copies_fit_alone(task)):
                taken.append(self._prepared.popleft())
                needs = more
            if not fits:
                break
        return Bundle(taken, needs) if taken else None

    def _copies_fit_alone(self, task: CleaningTask) -> bool:
        """Return whether the backup of a prepared partition fits while no other backup is written. The partition needs
        no other space, so its backup may take more than half of the free space.
        """
        if self._keeper is None:
            return False
        reserved = self._space.reserved_bytes.get(self._space.device(self._keeper.backup.directory), 0)
        return not reserved and self._keeper.has_room(task, 0, 0)

    def _fitting(self) -> Bundle | None:
        if self._by_gain:
            return self._fitting_by_gain()
        taken: list[int] = []  # indexes of self._tasks
        needs: dict[int, int] = {}
        size = at = 0
        while at < len(self._tasks) and len(taken) < self._size.most:
            need, task = self._tasks[at]
            if taken and task.fan_out == "always":
                break
            if len(taken) >= self._size.least and size + need > BUNDLE_BYTES:
                at = bisect_left(self._tasks, size - BUNDLE_BYTES, lo=at, key=lambda item: -item[0])
                continue  # start at the largest that fits
            more = self._needs(task, need, needs)
            if self._space.fits(more):
                taken.append(at)
                needs, size = more, size + need
                if (size >= BUNDLE_BYTES and len(taken) >= self._size.least) or task.fan_out == "always":
                    break
            at += 1
        return self._bundle(taken, needs)

    def _fitting_by_gain(self) -> Bundle | None:
        """Return a bundle of the next partitions that fit, in the order of their gain; None if none fits."""
        taken: list[int] = []
        needs: dict[int, int] = {}
        waited_for: set[int] = set()  # devices
        size = 0
        for at, (need, task) in enumerate(self._tasks):
            is_full = len(taken) >= self._size.least and size + need > BUNDLE_BYTES
            if taken and (is_full or len(taken) == self._size.most or task.fan_out == "always"):
                break
            device = _device_of(self._space, task)
            if device in waited_for:
                continue
            more = self._needs(task, need, needs)
            if self._space.fits(more):
                taken.append(at)
                needs, size = more, size + need
                if task.fan_out == "always":
                    break
            elif self._in_order and self._space.could_fit(self._needs(task, need, {})):
                waited_for.add(device)
        return self._bundle(taken, needs)

    def _bundle(self, taken: Sequence[int], needs: Mapping[int, int]) -> Bundle | None:
        if not taken:
            return None
        tasks = [self._tasks[place][1] for place in taken]
        for place in reversed(taken):
            del self._tasks[place]
        return Bundle(tasks, needs)

    def _in_passes(self) -> Bundle | None:
        """Return a bundle of one partition that is written in passes, with all space of its file system; None if there
        is none, or if other space is reserved on each such file system."""
        for place, (need, task) in enumerate(self._tasks):
            # A preparation has one pass: a second would begin only when the output of the first is in place.
            if task.is_preparation:
                continue
            if self._space.reserved_bytes.get(_device_of(self._space, task)):
                continue
            bound = bytes_alone(task, self._space, self._keeper)
            if bound is None:
                continue
            del self._tasks[place]
            alone = replace(task, max_scratch_bytes=bound)
            return Bundle([alone], self._needs(alone, need, {}))
        return None

    def _needs(self, task: CleaningTask, need: int, before: Mapping[int, int]) -> dict[int, int]:
        """Return the needed bytes by device: `need` and the bytes of a backup for this task, added to `before`, the
        needs of earlier tasks."""
        needs = dict(before)
        device = _device_of(self._space, task)
        needs[device] = needs.get(device, 0) + min(need, task.max_scratch_bytes or need)
        if self._keeper is not None:
            device = self._space.device(self._keeper.backup.directory)
            needs[device] = needs.get(device, 0) + self._keeper.copy_bytes(task)
        return needs


def _gain(task: CleaningTask) -> float:
    end = task.first_uncleanable_offset
    below = [(segment.base_offset, segment.log_bytes) for segment in task.segments if segment.base_offset < end]
    return gain_per_s(below, task.first_dirty_offset)


def space_limits(tasks: Iterable[CleaningTask], parallel: int, space: ScratchSpace) -> bool:
    """Return whether a file system has too little scratch space to write its `parallel` largest partitions at a time:
    then space, not the number of cores, limits how many partitions run.
    """
    needs: dict[int, list[int]] = {}
    for task in tasks:
        if task.prepared is None:
            needs.setdefault(_device_of(space, task), []).append(scratch_bytes(task))
    return any(
        not space.could_fit({device: sum(sorted(sizes, reverse=True)[:parallel])}) for device, sizes in needs.items()
    )


def bytes_alone(task: CleaningTask, space: ScratchSpace, keeper: Keeper | None = None) -> int | None:
    """Return the scratch space in bytes that a partition may use if no other partition is in flight on its file system,
    or None if it cannot be rewritten even then. A plan calls this function, too (room.py).
    """
    device = _device_of(space, task)
    bound = space.for_passes(device, _least_bytes(task))
    if bound is None or keeper is None:
        return bound
    if not _has_room_for_copies(task, space, keeper):
        return None
    if space.device(keeper.backup.directory) == device:
        bound = min(bound, space.fs.free_bytes(task.partition_path) - keeper.copy_bytes(task))
    return bound


def refusal_alone(task: CleaningTask, space: ScratchSpace, keeper: Keeper | None = None) -> KeytailError:
    """Return the error for a partition that cannot be rewritten, or prepared in one pass, even when no other partition
    is in flight."""
    if keeper is not None and not _has_room_for_copies(task, space, keeper):
        return keeper.refusal(task)
    need = scratch_bytes(task) if task.is_preparation else _least_bytes(task)
    return space.refusal(_device_of(space, task), need, out_of_place=task.out_of_place is not None)


def _has_room_for_copies(task: CleaningTask, space: ScratchSpace, keeper: Keeper) -> bool:
    device = space.device(keeper.backup.directory)
    scratch = _least_bytes(task) if device == _device_of(space, task) else 0
    return keeper.has_room(task, space.reserved_bytes.get(device, 0), scratch)


def for_next_pass(task: CleaningTask, space: ScratchSpace) -> CleaningTask:
    """Return `task` with the scratch space that is free now, usually more after replacements, as its limit. Raises
    Refused if this is too little."""
    device, least = _device_of(space, task), _least_bytes(task)
    bound = space.for_passes(device, least)
    if bound is None:
        raise space.refusal(device, least)
    return replace(task, max_scratch_bytes=bound)


def _device_of(space: ScratchSpace, task: CleaningTask) -> int:
    return space.device(os.path.dirname(task.scratch_path))


def _least_bytes(task: CleaningTask) -> int:
    """Return the least scratch space in bytes that a task needs (passes.py)."""
    # The maximum is assumed: a task has less memory if several run on its host.
    memory = task.map_memory_bytes or map_memory_bytes(1)
    return least_scratch_bytes(replace(task, map_memory_bytes=memory))
