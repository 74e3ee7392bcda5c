"""The ends of segments, compared with a model that checks each batch; leader epochs; the order of a broker's hash
table.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.errors import UsageProblem
from keytail.format.batch import BATCH_TABLE
from keytail.log.append.leader_epochs import assign, truncate_from_end, truncate_from_start
from keytail.log.append.live_producers import hash_order
from keytail.log.append.rolling import (
    AppendConfig,
    RollState,
    are_full,
    batches_before_roll,
    draw_jitter_ms,
    is_flush_due,
)

FAR = 2**31 - 1
NOW_MS = 1000


def _model(roll_state: RollState, batches: list[tuple[int, int, int]], config: AppendConfig) -> int:
    """Apply Kafka's LogSegment.shouldRoll before each batch, which is (size, largest timestamp, last offset)."""
    size, first_ms = roll_state.size_bytes, roll_state.first_timestamp_ms if roll_state.size_bytes else None
    for number, (n_bytes, largest_ms, last_offset) in enumerate(batches):
        waited_ms = largest_ms - first_ms if first_ms is not None and first_ms >= 0 else NOW_MS - roll_state.created_ms
        age_ms = config.segment_ms
        if config.compact:
            age_ms = min(age_ms, config.max_compaction_lag_ms)
        if (
            size > config.segment_bytes - n_bytes
            or (size > 0 and waited_ms > age_ms - roll_state.jitter_ms)
            or roll_state.indexes_full
            or not 0 <= last_offset - roll_state.base_offset <= FAR
        ):
            return number
        if size == 0:
            first_ms = largest_ms
        size += n_bytes
    return len(batches)


times = st.sampled_from([-1, 0, 5, 900, 905, 906, 1000, 2**62])


@given(
    st.builds(
        RollState,
        base_offset=st.just(50),
        size_bytes=st.sampled_from([0, 0, 61, 200, 300]),
        first_timestamp_ms=times,
        created_ms=st.sampled_from([0, 900, 994, 995]),
        jitter_ms=st.integers(0, 3),
        indexes_full=st.sampled_from([False, False, False, True]),
    ),
    st.lists(
        st.tuples(st.sampled_from([61, 100, 101, 139, 150]), times, st.sampled_from([49, 50, 51, 50 + FAR, 51 + FAR])),
        min_size=1,
        max_size=6,
    ),
    st.builds(
        AppendConfig,
        segment_bytes=st.sampled_from([200, 300, 301, 450]),
        segment_ms=st.sampled_from([1, 5, 6, 2**63 - 1]),
        max_compaction_lag_ms=st.sampled_from([2, 2**63 - 1]),
        compact=st.booleans(),
    ),
)
def test_batches_are_appended_until_one_would_exceed_a_limit_of_the_segment(
    roll_state: RollState, batches: list[tuple[int, int, int]], config: AppendConfig
) -> None:
    assert batches_before_roll(roll_state, _rows(batches), config, NOW_MS) == _model(roll_state, batches, config)


WAITED = RollState(50, 61, first_timestamp_ms=900, created_ms=0, jitter_ms=3)  # 97 of the 100 ms until a roll are left
TIMELESS = RollState(50, 61, first_timestamp_ms=-1, created_ms=900, jitter_ms=3)


@pytest.mark.parametrize(
    ("roll_state", "limit", "met", "exceeded"),
    [
        (WAITED, {"segment_bytes": 200}, (139, 900, 51), (140, 900, 51)),
        (RollState(50, 0, -1, 0, 0), {"segment_bytes": 200}, (200, 900, 51), (201, 900, 51)),
        (WAITED, {"segment_ms": 100}, (61, 997, 51), (61, 998, 51)),
        (WAITED, {"max_compaction_lag_ms": 100}, (61, 997, 51), (61, 998, 51)),
        (WAITED, {}, (61, 900, 50 + FAR), (61, 900, 51 + FAR)),
    ],
)
def test_a_limit_that_is_reached_exactly_is_not_exceeded(
    roll_state: RollState, limit: dict[str, int], met: tuple[int, int, int], exceeded: tuple[int, int, int]
) -> None:
    config = AppendConfig(**limit)  # type: ignore[arg-type]
    assert batches_before_roll(roll_state, _rows([met]), config, NOW_MS) == 1
    assert batches_before_roll(roll_state, _rows([exceeded]), config, NOW_MS) == 0


def test_segments_without_timestamps_roll_by_their_age() -> None:
    config, item = AppendConfig(segment_ms=100), _rows([(61, 2**62, 51)])
    assert batches_before_roll(TIMELESS, item, config, 997) == 1
    assert batches_before_roll(TIMELESS, item, config, 998) == 0
    first_at_0 = RollState(50, 61, first_timestamp_ms=0, created_ms=900, jitter_ms=0)  # 0 is a valid timestamp
    assert batches_before_roll(first_at_0, _rows([(61, 100, 51)]), config, 2000) == 1


def _rows(batches: list[tuple[int, int, int]]) -> np.ndarray:
    table = np.zeros(len(batches), BATCH_TABLE)
    for column, name in enumerate(("size_bytes", "max_timestamp_ms", "last_offset")):
        table[name] = [batch[column] for batch in batches]
    return table


def test_an_index_is_full_with_one_slot_of_the_time_index_left() -> None:
    assert not are_full(9, 8, 10, 10)
    assert are_full(10, 0, 10, 10)
    assert are_full(0, 9, 10, 10)


def test_jitter_is_below_both_limits_and_not_drawn_if_it_is_0() -> None:
    short, shorter = AppendConfig(segment_jitter_ms=3), AppendConfig(segment_jitter_ms=9, segment_ms=2)
    assert {draw_jitter_ms(random.Random(i), short) for i in range(50)} == {0, 1, 2}
    assert {draw_jitter_ms(random.Random(i), shorter) for i in range(50)} == {0, 1}
    rng = random.Random(1)
    before = rng.getstate()
    assert draw_jitter_ms(rng, AppendConfig()) == 0
    assert rng.getstate() == before


def test_a_flush_is_due_by_messages_or_time() -> None:
    config = AppendConfig(flush_messages=10, flush_ms=100)
    assert not is_flush_due(19, 10, 0, 99, config)
    assert is_flush_due(20, 10, 0, 0, config)
    assert is_flush_due(11, 10, 0, 100, config)
    assert not is_flush_due(10, 10, 0, 100, config)


def test_settings_that_would_stop_a_broker_are_refused() -> None:
    for wrong in ({"segment_bytes": 0}, {"segment_bytes": 2**31}, {"index_bytes": 11}):
        with pytest.raises(UsageProblem):
            AppendConfig(**wrong)  # type: ignore[arg-type]


def _epochs(entries: list[tuple[int, int]], batches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    table = np.zeros(len(batches), BATCH_TABLE)
    table["leader_epoch"] = [epoch for epoch, _ in batches]
    table["base_offset"] = [base for _, base in batches]
    return assign(entries, table)


def test_an_epoch_is_recorded_where_it_begins() -> None:
    assert _epochs([], [(0, 0), (0, 3), (2, 5), (2, 9)]) == [(0, 0), (2, 5)]
    assert _epochs([(0, 0), (2, 5)], [(2, 11)]) == [(0, 0), (2, 5)]
    assert _epochs([(0, 0), (5, 5)], [(3, 11)]) == [(0, 0), (3, 11)]
    assert _epochs([(0, 0), (5, 20)], [(7, 20)]) == [(0, 0), (7, 20)]  # epoch 5 has no records


def test_epochs_are_truncated_at_both_ends() -> None:
    entries = [(0, 0), (2, 10), (3, 20)]
    assert truncate_from_end(entries, 20) == [(0, 0), (2, 10)]
    assert truncate_from_end(entries, 21) == entries
    assert truncate_from_start(entries, 15) == [(2, 15), (3, 20)]
    assert truncate_from_start(entries, 0) == entries
    assert truncate_from_start([(2, 10)], 5) == [(2, 10)]


def test_producers_are_in_the_order_of_a_brokers_hash_table() -> None:
    assert hash_order([33, 17, 2, 1]) == [33, 17, 1, 2]  # the two ids of bucket 1 are in the order of insertion
    assert hash_order([33, 17, 2, 1], in_front=True) == [1, 17, 33, 2]
    # the upper bits of the hash are folded into the lower ones
    assert hash_order([3, 2 << 16, (1 << 32) + 1]) == [(1 << 32) + 1, 2 << 16, 3]
    # 13 entries exceed three quarters of 16 buckets; in a table of 32 buckets, 17 has its own bucket, after 12.
    assert hash_order([17, *range(12)]) == [*range(12), 17]
    assert hash_order([17, *range(11)]) == [0, 17, *range(1, 11)]
    # With insertion at the front, the table grows only at the next entry.
    assert hash_order([17, *range(12)], in_front=True) == [0, 1, 17, *range(2, 12)]
    assert hash_order([17, *range(13)], in_front=True) == [*range(13), 17]


def test_many_ids_in_one_bucket_double_the_size_of_the_brokers_hash_table() -> None:
    """Producers that each have the first id of a block of 1000 collide in this way."""
    same_place = [16 * i for i in (3, 1, 2, 5, 4, 7, 6, 8)]
    assert hash_order(same_place) == same_place
    assert hash_order([*same_place, 16 * 9]) == sorted([*same_place, 16 * 9], key=lambda i: i % 32)
    assert hash_order(same_place[:7], in_front=True) == same_place[6::-1]
    assert hash_order(same_place, in_front=True) == [128, 96, 64, 32, 112, 80, 16, 48]
