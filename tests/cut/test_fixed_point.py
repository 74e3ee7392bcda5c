"""The highest consistent cut, against a model that tries all cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keytail.cut.fixed_point import Blocks, Commit, Part, PartitionKey, Reason, Transaction, highest_cut
from tests.reference import cut as reference

A, B, C, GONE = ("a", 0), ("b", 0), ("__consumer_offsets", 0), ("gone", 0)
KEYS = (A, B, C)
_LIMIT = 6
_offsets = st.integers(0, _LIMIT + 1)


@st.composite
def _transactions(draw: st.DrawFn) -> list[list[tuple[PartitionKey, int | None, int | None]]]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        parts: list[tuple[PartitionKey, int | None, int | None]] = []
        for key in draw(st.lists(st.sampled_from((*KEYS, GONE)), min_size=1, max_size=3, unique=True)):
            first, marker = draw(st.one_of(st.none(), _offsets)), draw(st.one_of(st.none(), _offsets))
            if first is not None and marker is not None:
                first, marker = min(first, marker), max(first, marker)
            if first is None and marker is not None:
                first = marker  # a marker without data
            parts.append((key, first, marker))
        found.append(parts)
    return found


_commits = st.lists(
    st.tuples(_offsets, st.sampled_from(["g", "h"]), st.sampled_from([A, B, GONE]), _offsets),
    max_size=6,
    unique_by=lambda commit: commit[0],
).map(sorted)
_blocks = st.dictionaries(
    st.sampled_from(KEYS),
    st.lists(st.tuples(st.integers(0, _LIMIT), st.integers(1, 3)).map(lambda pair: (pair[0], sum(pair))), max_size=3),
)


def _as_blocks(ranges: Sequence[tuple[int, int]]) -> Blocks:
    starts, ends = (np.array([pair[n] for pair in ranges], np.int64) for n in (0, 1))
    return Blocks.union([(starts, ends)])


@pytest.mark.long
@settings(max_examples=400, suppress_health_check=[HealthCheck.data_too_large])
@given(st.fixed_dictionaries({key: st.integers(0, _LIMIT) for key in KEYS}), _transactions(), _commits, _blocks)
def test_it_is_the_only_highest_of_all_consistent_cuts(limits, transactions, commits, blocks) -> None:
    found = highest_cut(
        limits,
        [Transaction(str(n), tuple(Part(*part) for part in parts)) for n, parts in enumerate(transactions)],
        {C: [Commit(*commit) for commit in commits]},
        {key: _as_blocks(ranges) for key, ranges in blocks.items()},
    )
    every = reference.all_consistent(limits, transactions, {C: commits}, blocks)
    cuts = dict(found.cuts)
    assert cuts in every
    assert all(cut[key] <= cuts[key] for cut in every for key in KEYS), "another consistent cut is higher somewhere"
    for key in KEYS:
        assert (found.reasons[key] == Reason("whole")) == (cuts[key] == limits[key])
    for number, parts in enumerate(transactions):
        known = [part for part in parts if part[0] in limits]
        decided = all(marker is not None and marker < cuts[key] for key, _, marker in known)
        assert (number in found.removed) == (not decided)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8))
def test_a_union_of_ranges_covers_the_same_offsets(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in pairs]
    blocks = _as_blocks(ranges)
    for offset in range(40):
        inside = any(start < offset < end for start, end in ranges)
        assert (blocks.floor(offset) < offset) == inside
        floor = blocks.floor(offset)
        assert not any(start < floor < end for start, end in ranges)
    assert (blocks.starts[1:] >= blocks.ends[:-1]).all()


def test_a_cut_below_a_marker_cuts_the_transactions_that_follow_from_it() -> None:
    """Transaction 1 ends in `a` and `b`, 2 in `b` and `c`, and a group committed what 2 wrote to `c`."""
    transactions = [
        Transaction("1", (Part(A, 2, 4), Part(B, 0, 3))),
        Transaction("2", (Part(B, 1, 5), Part(C, 7, 9))),
    ]
    whole = highest_cut({A: 5, B: 6, C: 10}, transactions)
    assert whole.cuts == {A: 5, B: 6, C: 10}
    assert not whole.removed
    found = highest_cut({A: 4, B: 6, C: 10}, transactions)
    assert found.cuts == {A: 2, B: 0, C: 7}
    assert found.reasons[A] == found.reasons[B] == Reason("transaction", "1")
    assert found.reasons[C] == Reason("transaction", "2")
    assert found.removed == {0, 1}


def test_a_commit_above_the_cut_is_cut_only_if_no_later_commit_replaces_it() -> None:
    commits = {C: [Commit(3, "g", A, 5), Commit(4, "g", A, 9), Commit(6, "g", A, 4)]}
    assert highest_cut({A: 5, C: 8}, commits=commits).cuts == {A: 5, C: 8}
    lower = highest_cut({A: 5, C: 6}, commits=commits)
    assert lower.cuts == {A: 5, C: 4}
    assert lower.reasons[C] == Reason("committed-offset", "g")
    assert highest_cut({A: 4, C: 6}, commits=commits).cuts == {A: 4, C: 3}
