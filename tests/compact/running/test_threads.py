"""The threads of the tasks of a run: a function of the partitions' sizes, the cores and the memory of the host."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.compact.running import threads
from keytail.compact.running.threads import THREAD_BYTES, threads_of, with_threads
from keytail.compact.task import CleaningTask
from keytail.log.partition import SegmentFacts
from keytail.run.watching import HERE, DriverAddress
from tests.chance import chance
from tests.compact.logs import RandomLog, task_for
from tests.reference.cleaner import Segment

GB = 10**9
MUCH = 2**50


@pytest.mark.parametrize(
    ("sizes", "cores", "expected"),
    [
        ([GB], 1, [1]),
        ([GB], 2, [2]),
        ([GB], 16, [16]),
        ([GB, GB], 4, [2, 2]),
        ([GB, GB, GB], 4, [2, 2, 2]),
        ([GB] * 5, 4, [1] * 5),
        ([10 * GB, *[GB] * 10], 4, [2, *[1] * 10]),
        ([GB, 10**6], 2, [2, 1]),
        ([10**6], 8, [1]),
        ([100 << 20], 64, [6]),
        ([GB, 0], 4, [4, 1]),
        ([0, 0], 4, [1, 1]),
        ([], 4, []),
    ],
)
def test_cores_are_divided_by_size(sizes: list[int], cores: int, expected: list[int]) -> None:
    assert threads_of(sizes, cores, MUCH) == expected


def test_threads_fit_into_memory() -> None:
    assert threads_of([GB], 8, 2 * 3 * THREAD_BYTES) == [3]
    assert threads_of([GB, GB], 8, 2 * 6 * THREAD_BYTES) == [3, 3]
    assert threads_of([GB], 8, THREAD_BYTES) == [1]


def test_there_are_never_many_more_threads_than_cores() -> None:
    rng = chance()
    for _ in range(300):
        cores, n = rng.randint(1, 64), rng.randint(1, 200)
        sizes = [rng.choice([0, rng.randint(0, 10**8), rng.randint(0, 10**12)]) for _ in range(n)]
        found = threads_of(sizes, cores, rng.choice([MUCH, rng.randint(1, 2**36)]))
        assert all(1 <= threads <= cores for threads in found)
        at_a_time = sorted(found, reverse=True)[:cores]
        assert sum(at_a_time) <= 2 * cores


def large_task(gigabytes: int) -> CleaningTask:
    facts = (SegmentFacts(0, gigabytes * GB, 0, 0, 0, None, 0, 0), SegmentFacts(9, 0, 0, 0, 0, None, 0, 0))
    log = RandomLog([Segment(0, b""), Segment(9, b"")], [], 9, {})
    return task_for("/logs/t-0", log, facts, 0, first_dirty=0)


@pytest.mark.parametrize(
    ("address", "fields", "expected"),
    [
        (HERE, {}, 4),
        (HERE, {"is_preparation": True}, 1),
        (HERE, {"fan_out": "always"}, 1),
        (DriverAddress("driver", "driver"), {}, 1),
    ],
)
def test_only_cores_that_are_known_to_be_idle_are_used(
    address: DriverAddress, fields: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "physical_bytes", lambda: MUCH)
    engine: Any = SimpleNamespace(driver_address=address, concurrent_tasks=4)
    [task] = with_threads([replace(large_task(1), **fields)], engine)
    assert task.threads == expected
    assert [task.threads for task in with_threads([large_task(3), large_task(1)], engine)] == (
        [3, 1] if address == HERE else [1, 1]
    )
