"""The order in which partitions are started: each is started once, in bundles of limited size, with as many bundles at
a time as the cluster has cores.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact.running import bundles
from keytail.compact.running.bundles import (
    BUNDLE_BYTES,
    MAX_COMMITS,
    BundleSize,
    Waiting,
    bundles_in_flight,
    commits_in_flight,
)
from keytail.compact.running.schedule import Schedule
from keytail.compact.running.state import Rows, Stop
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase import passes
from keytail.config.compaction import CompactionConfig
from keytail.errors import KeytailError
from keytail.log.fs import FileStat, FileSystem
from keytail.log.lock import LockLost
from keytail.log.partition import SegmentFacts
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome
from tests.compact.test_driver import compaction_of
from tests.run.engines import LikeSpark

CONFIG = CompactionConfig(cleanup_policy=frozenset({"compact"}))
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only the sizes of logs with the limit of a bundle."""
    monkeypatch.setattr(passes, "_MARGIN_BYTES", 0)


def task_of(number: int, size_bytes: int, log_dir: str = "/a", **more: Any) -> CleaningTask:
    segments = tuple(SegmentFacts(base, size, 0, 0, 0, None, 0, -1) for base, size in ((0, size_bytes), (10, 1)))
    return CleaningTask(
        "t", number, f"{log_dir}/t-{number}", segments, (), 0, 20, 0, 10, 0, CONFIG, "run", grouping="kafka",
        map_memory_bytes=1 << 20, **more,
    )  # fmt: skip


class Storage(FileSystem):
    """Places log dirs in /a on device 1, others on device 2."""

    def stat(self, path: str) -> FileStat:
        return SimpleNamespace(device=1 if path.startswith("/a") else 2)  # type: ignore[return-value]

    def free_bytes(self, path: str) -> int:
        return 1 << 50


def waiting(tasks: list[CleaningTask], size: BundleSize | None = None, limit: int | None = None) -> Waiting:
    return Waiting(tasks, size or BundleSize(), ScratchSpace(Storage(), limit))


def taken(queue: Waiting) -> list[list[int]]:
    """Take and release all bundles, one after the other, and return the partitions of each."""
    found = []
    while bundle := queue.take():
        found.append([task.partition for task in bundle.tasks])
        queue.release(bundle)
    assert not queue
    return found


@given(
    sizes=st.lists(st.integers(1, 2 * BUNDLE_BYTES), max_size=40),
    least=st.integers(1, 5),
    most=st.integers(5, 9),
)
def test_each_partition_is_taken_once_and_bundles_are_full(sizes: list[int], least: int, most: int) -> None:
    tasks = [task_of(number, size) for number, size in enumerate(sizes)]
    found = taken(waiting(tasks, BundleSize(least, most)))
    assert sorted(number for bundle in found for number in bundle) == list(range(len(sizes)))
    left = set(range(len(sizes)))
    for bundle in found:
        assert sizes[bundle[0]] == max(sizes[number] for number in left), "the largest partition must be the first"
        left -= set(bundle)
        size = sum(sizes[number] for number in bundle)
        assert len(bundle) <= most
        assert size <= BUNDLE_BYTES or len(bundle) <= least
        if left and size < BUNDLE_BYTES and len(bundle) < most:
            assert len(bundle) >= least
            assert size + min(sizes[number] for number in left) > BUNDLE_BYTES, "another partition would have fitted"


def test_scratch_in_flight_stays_within_the_limit_of_each_file_system() -> None:
    tasks = [task_of(n, 60, "/a") for n in range(3)] + [task_of(3 + n, 50, "/b") for n in range(3)]
    queue = waiting(tasks, limit=100)
    first = queue.take()
    assert first is not None
    assert [task.partition for task in first.tasks] == [0, 3, 4]
    assert first.needs == {1: 60, 2: 100}
    assert queue.take() is None
    queue.release(first)
    second = queue.take()
    assert second is not None
    assert [task.partition for task in second.tasks] == [1, 5]


def test_a_partition_that_does_not_fit_waits_for_the_others_and_is_refused() -> None:
    queue = waiting([replace(task_of(0, 100), fan_out="never"), task_of(1, 30)], limit=40)
    first = queue.take()
    assert first is not None
    assert [task.partition for task in first.tasks] == [1]
    assert queue.take() is None
    queue.release(first)
    assert queue.take() is None, "the only group of the partition does not fit"
    assert "40" in str(queue.refusal(task_of(0, 100)))


def test_a_fan_out_is_a_separate_bundle() -> None:
    assert taken(waiting([task_of(n, 10, fan_out="always") for n in range(3)])) == [[0], [1], [2]]


@pytest.mark.parametrize("parallel", [1, 2, 16, 64, 100, 1000, 32_000])
def test_all_cores_of_a_cluster_are_used_for_partitions_of_a_gigabyte(parallel: int) -> None:
    size = BundleSize.of(10**6, parallel, jobs_cost=True)
    in_flight = bundles_in_flight(10**6, parallel)
    assert in_flight * size.least >= parallel
    assert in_flight <= bundles.MAX_BUNDLES
    assert size.most >= size.least
    tasks = [task_of(number, BUNDLE_BYTES) for number in range(3 * size.least)]
    assert set(map(len, taken(waiting(tasks, size)))) == {size.least}


@pytest.mark.parametrize(("partitions", "parallel", "most"), [(10, 2, 1), (100, 2, 6), (10_000, 2, 64), (1, 1, 1)])
def test_without_rates_a_bundle_is_small_enough_for_all_cores(partitions: int, parallel: int, most: int) -> None:
    assert BundleSize.of(partitions, parallel, jobs_cost=False) == BundleSize(1, most)


def test_as_many_bundles_run_at_a_time_as_the_cluster_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has 100 cores, and each partition is a bundle: 100 bundles run at a time."""
    cores = 100
    monkeypatch.setattr(bundles, "BUNDLE_BYTES", 1)
    all_started, running = threading.Event(), [0]
    lock = threading.Lock()

    def run_bundle(tasks: list[CleaningTask], function: Any, **_: Any) -> list[Outcome[Any]]:
        with lock:
            running[0] += len(tasks)
            if running[0] >= cores:
                all_started.set()
        assert all_started.wait(120), f"{running[0]} in flight"
        return [Outcome(None, KeytailError("enough")) for _ in tasks]

    for number in range(cores):
        (tmp_path / f"t-{number}").mkdir()
    tasks = [task_of(number, 10, str(tmp_path)) for number in range(cores)]
    engine = LikeSpark(cores, run_bundle)
    rows = compaction_of(engine, {str(tmp_path): set()}, tasks).run()
    assert {row.status for row in rows} == {"failed"}


def test_taking_bundles_examines_each_partition_at_most_twice() -> None:
    """Taking a bundle must not examine all waiting partitions."""
    tasks = [task_of(number, 600 * MIB + number) for number in range(20_000)]
    examined = 0

    class Counting(ScratchSpace):
        def fits(self, needs: Any) -> bool:
            nonlocal examined
            examined += 1
            return super().fits(needs)

    queue = Waiting(tasks, BundleSize(), Counting(Storage()))
    assert len(taken(queue)) == len(tasks)
    assert examined <= 2 * len(tasks)


@given(prepared=st.integers(0, 700), others=st.integers(0, 5))
def test_prepared_partitions_are_taken_once_in_bundles_small_enough_for_all_commits(prepared: int, others: int) -> None:
    done = cast("Any", SimpleNamespace())
    tasks = [task_of(number, 10, prepared=done if number < prepared else None) for number in range(prepared + others)]
    queue = waiting(tasks)
    sizes = []
    while bundle := queue.take_prepared():
        assert bundle.cleans == 0
        assert [task.partition for task in bundle.tasks] == list(range(sum(sizes), sum(sizes) + len(bundle.tasks)))
        sizes.append(len(bundle.tasks))
    assert sum(sizes) == prepared
    assert max(sizes, default=0) <= 16
    assert commits_in_flight(tasks) == min(len(sizes), MAX_COMMITS)
    assert len(sizes) >= min(prepared, 2 * MAX_COMMITS)
    assert sorted(number for bundle in taken(queue) for number in bundle) == list(range(prepared, prepared + others))


def test_a_thread_for_commits_takes_only_prepared_partitions() -> None:
    done = cast("Any", SimpleNamespace())
    changed = threading.Condition()
    queue = waiting([task_of(0, 10, prepared=done), task_of(1, 10)])
    stop = Stop()
    schedule = Schedule(queue, Rows(lambda row: None, changed), stop, changed, most_cleaning=1)
    first = schedule.next_prepared()
    assert first is not None
    assert [task.partition for task in first.tasks] == [0]
    assert schedule.next_prepared() is None
    second = schedule.next_bundle()
    assert second is not None
    assert [task.partition for task in second.tasks] == [1]
    for bundle in (first, second):
        schedule.cleaned(bundle)
        schedule.release(bundle)
    assert (schedule.cleaning, schedule.in_flight) == (0, 0)


@pytest.mark.parametrize("ends", [{"asked": True}, {"deadline_s": 0.0}, {"lock_lost": LockLost("lost")}])
def test_a_run_that_is_ending_begins_no_commit(ends: dict[str, Any]) -> None:
    changed = threading.Condition()
    queue = waiting([task_of(0, 10, prepared=cast("Any", SimpleNamespace()))])
    schedule = Schedule(queue, Rows(lambda row: None, changed), Stop(**ends), changed, most_cleaning=1)
    assert schedule.next_prepared() is None
    assert [task.partition for task in queue.take_all()] == [0]
