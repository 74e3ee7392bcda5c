"""With a deadline or little scratch space, partitions are started in the order of their expected gain per second."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact.expectation import gain_per_s
from keytail.compact.running import schedule
from keytail.compact.running.bundles import BUNDLE_BYTES, BundleSize, Waiting, space_limits
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase import passes
from keytail.errors import KeytailError
from keytail.log.partition import SegmentFacts
from keytail.run.rates import CLEAN_BYTES_PER_S, DIRTY_BYTES_PER_S, PARTITION_S, SEGMENT_S
from keytail.run.rows import NOT_BEGUN
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome
from tests.chance import chance
from tests.compact.running.test_bundles import CONFIG, Storage, taken
from tests.compact.test_driver import compaction_of
from tests.run.engines import LikeSpark

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only the sizes of logs with the scratch space."""
    monkeypatch.setattr(passes, "_MARGIN_BYTES", 0)


def task_of(number: int, clean: int, dirty: int, log_dir: str = "/a") -> CleaningTask:
    segments = tuple(
        SegmentFacts(base, size, 0, 0, 0, None, 0, -1) for base, size in ((0, clean), (10, dirty), (20, 1))
    )
    return CleaningTask(
        "t", number, f"{log_dir}/t-{number}", segments, (), 0, 30, 10, 20, 0, CONFIG, "run", grouping="kafka",
        map_memory_bytes=1 << 20,
    )  # fmt: skip


def gain(task: CleaningTask) -> float:
    clean, dirty, _ = (segment.log_bytes for segment in task.segments)
    seconds = PARTITION_S + 2 * SEGMENT_S + dirty / DIRTY_BYTES_PER_S + clean / CLEAN_BYTES_PER_S
    return dirty / seconds


def by_gain(tasks: list[CleaningTask]) -> list[int]:
    return [task.partition for task in sorted(tasks, key=gain, reverse=True)]


def random_tasks(rng: random.Random, number: int, log_dir: str = "/a") -> list[CleaningTask]:
    return [
        task_of(n, int(rng.random() ** 4 * (1 << 33)), int(rng.random() ** 4 * (1 << 33)) + 1, log_dir)
        for n in range(number)
    ]


def test_the_gain_is_the_size_of_the_dirty_section_per_expected_second() -> None:
    sizes = [(0, 100 * MIB), (10, 50 * MIB)]
    seconds = PARTITION_S + 2 * SEGMENT_S + 50 * MIB / DIRTY_BYTES_PER_S + 100 * MIB / CLEAN_BYTES_PER_S
    assert gain_per_s(sizes, 10) == pytest.approx(50 * MIB / seconds)
    assert gain_per_s(sizes, 15) == gain_per_s(sizes, 10), "a segment that is partly clean must count as dirty"
    assert gain_per_s(sizes, 0) > gain_per_s(sizes, 10)
    assert gain_per_s([(0, 1000)], 0) < gain_per_s([(0, 100 * MIB)], 0), "each partition has a fixed duration"
    assert gain_per_s([(5, 7)], 3) > 0, "a checkpoint below the first segment must be allowed"


@given(sizes=st.lists(st.tuples(st.integers(0, 1 << 31), st.integers(1, 1 << 31)), max_size=40), in_order=st.booleans())
def test_each_partition_is_taken_once_in_the_order_of_gain(sizes: list[tuple[int, int]], in_order: bool) -> None:
    tasks = [task_of(number, *size) for number, size in enumerate(sizes)]
    queue = Waiting(tasks, BundleSize(2, 5), ScratchSpace(Storage()), by_gain=True, in_order=in_order)
    found = taken(queue)
    gains = {task.partition: gain(task) for task in tasks}
    order = [gains[number] for bundle in found for number in bundle]
    assert order == sorted(gains.values(), reverse=True)
    for bundle in found:
        size = sum(sum(sizes[number]) for number in bundle)
        assert len(bundle) <= 5 and (size <= BUNDLE_BYTES or len(bundle) <= 2)


def test_with_a_deadline_small_partitions_do_not_overtake_one_that_waits_for_space() -> None:
    tasks = [task_of(0, 0, 60 * MIB), task_of(1, 10 * MIB, 50 * MIB), task_of(2, 35 * MIB, 5 * MIB),
             task_of(3, 35 * MIB, 4 * MIB, "/b")]  # fmt: skip
    assert by_gain(tasks) == [0, 1, 2, 3]
    for in_order, expected in ((True, [0, 3]), (False, [0, 2, 3])):
        queue = Waiting(tasks, BundleSize(), ScratchSpace(Storage(), 100 * MIB), by_gain=True, in_order=in_order)
        first = queue.take()
        assert first is not None and [task.partition for task in first.tasks] == expected
        assert queue.take() is None
        queue.release(first)
        second = queue.take()
        assert second is not None and second.tasks[0].partition == 1


def test_a_partition_that_never_fits_does_not_delay_others() -> None:
    tasks = [task_of(0, 0, 900 * MIB), task_of(1, 10 * MIB, 50 * MIB)]
    assert by_gain(tasks) == [0, 1]
    queue = Waiting(tasks, BundleSize(), ScratchSpace(Storage(), 100 * MIB), by_gain=True, in_order=True)
    first = queue.take()
    assert first is not None and [task.partition for task in first.tasks] == [1]
    queue.release(first)
    assert queue.take() is None
    assert [task.partition for task in queue.take_all()] == [0], "the only group of the partition does not fit"


def test_space_is_the_limit_only_if_the_cores_could_use_more() -> None:
    tasks = [task_of(n, 0, 40 * MIB) for n in range(10)] + [task_of(10, 0, MIB, "/b")]
    for limit, parallel, expected in ((100, 2, False), (100, 3, True), (79, 2, True), (1000, 16, False)):
        assert space_limits(tasks, parallel, ScratchSpace(Storage(), limit * MIB)) == expected, (limit, parallel)
    assert not space_limits([], 2, ScratchSpace(Storage(), 1))


class Clock:
    """A clock that each cleaning advances by the expected duration."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_partitions_done_by_a_deadline_have_the_largest_gain_per_second(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = random_tasks(chance(), 60, str(tmp_path))
    for task in tasks:
        Path(task.partition_path).mkdir()
    seconds = {task.partition: sum(s.log_bytes for s in task.segments) / 1e8 for task in tasks}
    clock, lock = Clock(), threading.Lock()
    monkeypatch.setattr(schedule, "time", clock)

    def run_bundle(some: list[CleaningTask], function: Any, **_: Any) -> list[Outcome[Any]]:
        with lock:
            clock.now_s += sum(seconds[task.partition] for task in some)
        return [Outcome(None, KeytailError("cleaned")) for _ in some]

    deadline_s = share * sum(seconds.values())
    engine = LikeSpark(1, run_bundle)
    space = ScratchSpace(Storage(), 1 << 50)
    monkeypatch.setattr(space, "device", lambda path: 1)
    space._path_of[1], space._half_free[1], space._free_at_start[1] = "/a", 1 << 50, 1 << 50
    rows = compaction_of(engine, {str(tmp_path): set()}, tasks, space=space, deadline_s=deadline_s).run()
    done = {row.partition for row in rows if row.status != NOT_BEGUN}
    assert 0 < len(done) < len(tasks)
    assert done == set(by_gain(tasks)[: len(done)])


def test_taking_bundles_examines_each_partition_at_most_twice() -> None:
    tasks = [task_of(number, 0, 600 * MIB + number) for number in range(20_000)]
    examined = 0

    class Counting(ScratchSpace):
        def fits(self, needs: Any) -> bool:
            nonlocal examined
            examined += 1
            return super().fits(needs)

    queue = Waiting(tasks, BundleSize(), Counting(Storage()), by_gain=True, in_order=True)
    assert len(taken(queue)) == len(tasks)
    assert examined <= 2 * len(tasks)
