"""The expected duration of a run, and the decision whether Spark is started for it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.cli.progress import Reporter
from keytail.compact.expectation import MAP_BYTES_PER_KEY, PACKED_BYTES, Expected, expect
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.plan import Selection
from keytail.compact.running import bundles
from keytail.log.partition import SegmentFacts
from keytail.run import workers
from keytail.run.processes import Processes
from keytail.run.rates import SPARK_FROM_S, is_worth_spark, run_seconds
from tests.run.engines import LikeSpark

GIB = 1 << 30


def expected(log_bytes: int, offsets: int, clean_bytes: int = 0, map_memory_bytes: int = GIB) -> Expected:
    segments = [SegmentFacts(n, log_bytes // 4, 0, None, None, None, 0, -1) for n in (0, 1, 2, 3)]
    selection = Selection(0, offsets, clean_bytes, log_bytes - clean_bytes, log_bytes, 1.0, False, False, True, "")
    return expect([*segments, SegmentFacts(offsets, 99 * GIB, 0, None, None, None, 0, -1)], selection,
                  map_memory_bytes=map_memory_bytes)  # fmt: skip


def test_the_strategy_depends_on_scratch_size_and_keys() -> None:
    assert expected(1 << 20, 1000).strategy == "packed"
    assert expected(4 * PACKED_BYTES, 1000).strategy == "one task"
    room = int(GIB / MAP_BYTES_PER_KEY)
    assert expected(1 << 20, room).strategy == "packed"
    assert expected(1 << 20, room + 2).strategy == "maybe fan-out"
    assert 2 * PACKED_BYTES <= bundles.BUNDLE_BYTES, "packed partitions must share the cost of a job"


@given(st.integers(10, 1 << 34))
def test_a_partition_that_needs_no_fan_out_fits_into_the_map(memory_bytes: int) -> None:
    keys = int(memory_bytes / MAP_BYTES_PER_KEY)
    if expected(1 << 20, max(keys, 1), map_memory_bytes=memory_bytes).strategy == "packed":
        slots = max(2, memory_bytes * 2 // (3 * 24))
        assert keys <= max(1, int(slots * 0.9)) + 1


def test_the_bound_on_keys_is_that_of_the_map() -> None:
    memory = 1 << 20
    assert OffsetMap(memory).max_entries == pytest.approx(memory / MAP_BYTES_PER_KEY, rel=0.001)


def test_scratch_counts_only_segments_below_the_end() -> None:
    assert 1 << 30 < expected(1 << 30, 10**6).scratch_bytes < 1.01 * (1 << 30) + (2 << 20)


def test_more_bytes_take_longer_and_dirty_bytes_longer_than_clean_ones() -> None:
    assert expected(1 << 30, 10).seconds > expected(1 << 29, 10).seconds > 1
    assert expected(1 << 30, 10, clean_bytes=1 << 29).seconds < expected(1 << 30, 10).seconds


@given(st.lists(st.floats(0, 1e6)), st.integers(1, 64))
def test_a_run_takes_no_less_than_its_longest_task(each_s: list[float], cores: int) -> None:
    seconds = run_seconds(each_s, cores)
    assert max(each_s, default=0) <= seconds <= sum(each_s) + 1e-6
    assert is_worth_spark(each_s, cores) == (seconds >= SPARK_FROM_S)


def test_the_cores_share_the_work_of_runs_that_start_a_session() -> None:
    halves = [SPARK_FROM_S / 2] * 2
    assert is_worth_spark(halves, 1)
    assert not is_worth_spark(halves, 2)


class Started(LikeSpark):
    def __init__(self, master: str | None, submitted: bool) -> None:
        super().__init__()
        self.master, self.submitted = master, submitted


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(run: object, master: str | None, *, submitted: bool, extra: object, kernels: str) -> Started:
        return Started(master, submitted)

    monkeypatch.setattr(workers, "session_of_run", started)
    monkeypatch.setattr(workers, "compile_kernels", lambda commands, report: None)


@pytest.mark.parametrize(
    ("given", "has_spark"),
    [
        ({}, False),
        ({"master": "local[2]"}, True),
        ({"submitted": True}, True),
        ({"needs_spark": True}, True),
        ({"each_s": [SPARK_FROM_S / 2, SPARK_FROM_S / 2 - 0.1]}, False),
        ({"each_s": [SPARK_FROM_S] * 64}, True),
    ],
)
def test_large_runs_start_spark(
    given: dict[str, Any], has_spark: bool, session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"master": None, "each_s": [0.1] * 10, **given}
    with contextlib.ExitStack() as run, Reporter("compact", [("a-0", 1)]) as reporter:
        of_run = given.pop("master"), given.pop("each_s")
        found = workers.workers_of_run(run, reporter, *of_run, kernels="compact", **given)
        if has_spark:
            assert isinstance(found, Started)
            assert given.get("submitted", False) == found.submitted
        else:
            assert isinstance(found, Processes)
            assert found.count == workers.cores()
    assert ("without Spark" in capsys.readouterr().err) != has_spark
