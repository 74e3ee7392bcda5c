"""The parts of transactions: single rules, and simulated clusters that are copied at different moments."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from keytail.cut.fixed_point import Commit, Part, PartitionKey, Transaction, highest_cut
from keytail.cut.transactions import Joined, Piece, State, join
from tests.chance import chance

A, B, C, STATES = ("a", 0), ("b", 0), ("c", 0), ("__transaction_state", 0)
COMPLETE = dict.fromkeys((A, B, C, STATES), False)  # no log has lost markers
CLEANED = dict.fromkeys(COMPLETE, True)


def prepared(at: int, epoch: int, *partitions: PartitionKey, start_ms: int = 10) -> State:
    return State(at, 7, epoch, "prepared", start_ms, start_ms + 5, partitions)


def completed(at: int, epoch: int, start_ms: int = 10) -> State:
    return State(at, 7, epoch, "completed", start_ms, start_ms + 9)


def ongoing(at: int, epoch: int) -> State:
    return State(at, 7, epoch, "none", 10, 11)


def piece(first: int, marker: int | None, epoch: int = 3, marker_epoch: int = 4) -> Piece:
    if marker is None:
        return Piece(7, first, epoch)
    return Piece(7, first, epoch, marker_epoch, marker, True, 20)


def only(joined: list[Joined]) -> Joined:
    [found] = joined
    return found


def test_pieces_are_joined_with_their_decision_by_the_epoch_of_the_marker() -> None:
    pieces = {A: [piece(0, 5), piece(6, 9, 4, 5)], B: [piece(2, 3)]}
    states = {STATES: [ongoing(1, 3), prepared(2, 4, A, B), completed(3, 4), prepared(5, 5, A, start_ms=30)]}
    first, second = join(pieces, states, COMPLETE)
    assert set(first.transaction.parts) == {Part(A, 0, 5), Part(B, 2, 3), Part(STATES, 2, 2)}
    assert set(second.transaction.parts) == {Part(A, 6, 9), Part(STATES, 5, 5)}
    assert first.transaction.name == "producer 7, epoch 3"
    assert all(one.lenient is one.transaction for one in (first, second))


def test_a_listed_partition_without_a_marker_is_undecided() -> None:
    """Its log was copied before the marker was written."""
    found = only(join({A: [piece(0, 5)]}, {STATES: [prepared(2, 4, A, B)]}, COMPLETE))
    assert Part(B, None, None) in found.transaction.parts
    assert not found.problem


def test_data_without_a_marker_is_joined_with_the_other_parts() -> None:
    found = only(join({A: [piece(0, 5)], B: [piece(4, None)]}, {STATES: [prepared(2, 4, A, B)]}, COMPLETE))
    assert Part(B, 4, None) in found.transaction.parts


@pytest.mark.parametrize(
    ("complete_before_ms", "problem", "is_missing"),
    [(None, "marker-lost-or-not-written", True), (15, "", True), (16, "", False)],
)
def test_a_marker_that_may_be_lost_is_uncertain_without_a_time(
    complete_before_ms: int | None, problem: str, is_missing: bool
) -> None:
    states = {STATES: [prepared(2, 4, A, B)]}
    found = only(join({A: [piece(0, 5)]}, states, CLEANED, complete_before_ms))
    assert found.problem == problem
    assert (Part(B, None, None) in found.transaction.parts) == is_missing
    assert found.lenient is not None
    assert (Part(B, None, None) in found.lenient.parts) == (is_missing and not problem)


def test_a_later_epoch_shows_that_a_marker_was_lost() -> None:
    pieces = {A: [piece(0, 5)], B: [piece(8, 9, 4, 5)]}
    first, _ = join(pieces, {STATES: [prepared(2, 4, A, B), prepared(4, 5, B, start_ms=30)]}, CLEANED)
    assert set(first.transaction.parts) == {Part(A, 0, 5), Part(STATES, 2, 2)}
    assert not first.problem


def test_a_decision_that_was_compacted_away_is_shown_by_a_later_epoch() -> None:
    found = only(join({A: [piece(0, 5)]}, {STATES: [ongoing(6, 4)]}, COMPLETE))
    assert found.lenient is not None
    assert set(found.lenient.parts) == {Part(A, 0, 5), Part(STATES, 6, 6)}
    assert found.problem == "partitions-unknown"


def test_a_marker_without_its_decision_was_copied_later_than_the_coordinators_log() -> None:
    found = only(join({A: [piece(0, 5)]}, {STATES: [ongoing(1, 3)]}, COMPLETE))
    assert Part(STATES, None, None) in found.transaction.parts
    assert not found.problem


@pytest.mark.parametrize(
    ("complete_before_ms", "problem", "is_kept"), [(None, "partitions-unknown", False), (20, "", False), (21, "", True)]
)
def test_the_partitions_of_an_unknown_producer_are_unknown_without_a_time(
    complete_before_ms: int | None, problem: str, is_kept: bool
) -> None:
    """Its transactional id has expired, or it is younger than the copy of the coordinator's log."""
    pieces = {A: [piece(0, 5)], B: [piece(1, 4)]}
    found = only(join(pieces, {}, COMPLETE, complete_before_ms))
    known = {Part(A, 0, 5), Part(B, 1, 4)}
    assert set(found.transaction.parts) == (known if is_kept else known | {Part(A, None, None)})
    assert found.problem == problem
    assert found.lenient is not None
    assert (set(found.lenient.parts) == known) == (is_kept or bool(problem))


def test_transactions_with_one_epoch_cannot_be_distinguished() -> None:
    """As with version 1 of the protocol."""
    pieces = {A: [piece(0, 5, 3, 3), piece(6, 9, 3, 3)], B: [piece(2, None, 3)]}
    found = only(join(pieces, {STATES: [prepared(2, 3, A)]}, COMPLETE))
    assert found.problem == "not-distinguished"
    assert found.lenient is None
    assert set(found.transaction.parts) >= {Part(A, 0, 9), Part(B, 2, None), Part(STATES, 2, 2)}
    alone = only(join({A: [piece(0, 5, 3, 3)]}, {STATES: [prepared(2, 3, A)]}, COMPLETE))
    assert not alone.problem


def test_a_repeated_marker_changes_nothing() -> None:
    repeated = Piece(7, 8, None, 4, 8, True, 25)
    found = only(join({A: [piece(0, 5), repeated], B: [repeated]}, {STATES: [prepared(2, 4, A, B)]}, COMPLETE))
    assert set(found.transaction.parts) == {Part(A, 0, 5), Part(B, 8, 8), Part(STATES, 2, 2)}
    assert not found.problem


# Simulated clusters


@dataclass
class _Cluster:
    """Logs that grow event by event, each event an entry of one log, in the order of time."""

    rng: random.Random
    logs: dict[PartitionKey, list[tuple]] = field(default_factory=lambda: defaultdict(list))

    def run(self, transactions: int) -> None:
        producers = [self._producer(number, transactions) for number in range(3)]
        while producers:
            running = self.rng.choice(producers)
            if next(running, None) is None:
                producers.remove(running)

    def _producer(self, producer_id: int, transactions: int):
        """Yield after each entry: the states, data and markers of transactions with an epoch each."""
        states = self.logs[STATES]
        for number in range(transactions):
            partitions = self.rng.sample([A, B, C], self.rng.randint(1, 3))
            yield states.append(("state", producer_id, number, "none", ())) or True
            for _ in range(self.rng.randint(1, 4)):
                yield self.logs[self.rng.choice(partitions)].append(("data", producer_id, number)) or True
            written = tuple(key for key in partitions if ("data", producer_id, number) in self.logs[key])
            yield states.append(("state", producer_id, number + 1, "prepared", written)) or True
            for key in self.rng.sample(written, len(written)):
                yield self.logs[key].append(("marker", producer_id, number)) or True
            yield states.append(("state", producer_id, number + 1, "completed", ())) or True


def _pieces(log: list[tuple]) -> list[Piece]:
    first: dict[tuple[int, int], int] = {}
    found: list[Piece] = []
    for at, (kind, producer_id, number) in enumerate(log):
        if kind == "data":
            first.setdefault((producer_id, number), at)
        else:
            found.append(Piece(producer_id, first.pop((producer_id, number)), number, number + 1, at, True, at))
    return found + [Piece(producer_id, at, number) for (producer_id, number), at in first.items()]


def test_no_transaction_is_divided_in_clusters_that_are_copied_at_different_moments() -> None:
    rng = chance()
    divided_before = 0
    for _ in range(40):
        cluster = _Cluster(rng)
        cluster.run(rng.randint(1, 5))
        copied = {key: rng.randint(max(0, len(log) - 6), len(log)) for key, log in cluster.logs.items()}
        logs = {key: log[: copied[key]] for key, log in cluster.logs.items()}
        states = {
            STATES: [
                State(at, producer_id, epoch, decision, 100 * epoch, 0, partitions)
                for at, (_, producer_id, epoch, decision, partitions) in enumerate(logs.pop(STATES, []))
            ]
        }
        pieces = {key: _pieces(log) for key, log in logs.items()}
        joined = join(pieces, states, dict.fromkeys(copied, False), rng.choice([None, 0]))
        assert {one.problem for one in joined} <= {"", "partitions-unknown"}
        cuts = highest_cut(copied, [one.transaction for one in joined]).cuts
        divided_before += bool(_divided(cluster, copied))
        assert not _divided(cluster, cuts), "a transaction is in a part of its partitions"
        kept = {entry[1:3] for entry in cluster.logs[STATES][: cuts[STATES]] if entry[3] == "prepared"}
        written = (entry for key in (A, B, C) for entry in cluster.logs[key][: cuts.get(key, 0)])
        assert kept == {(producer_id, number + 1) for _, producer_id, number in written}
    assert divided_before, "the draws need no cut"


def _divided(cluster: _Cluster, cuts: dict[PartitionKey, int]) -> list[tuple]:
    """Return the transactions of which a part of the entries is below the cuts."""
    below: set[tuple] = set()
    above: set[tuple] = set()
    for key, log in cluster.logs.items():
        for at, entry in enumerate(log):
            if key != STATES:
                (below if at < cuts[key] else above).add(entry[1:3])
    return sorted(below & above)


def test_a_transaction_ends_with_the_offsets_that_it_committed() -> None:
    """A consumer-producer: the outputs in `a` and the offsets of its input `b` are in one transaction."""
    offsets = ("__consumer_offsets", 0)
    pieces = {A: [piece(0, 5)], offsets: [piece(3, 4)]}
    joined = join(pieces, {STATES: [prepared(2, 4, A, offsets)]}, dict.fromkeys((A, B, offsets, STATES), False))
    commits = {offsets: [Commit(3, "g", B, 20)]}
    limits = {A: 6, B: 20, offsets: 5, STATES: 3}
    transactions: list[Transaction] = [one.transaction for one in joined]
    assert highest_cut(limits, transactions, commits).cuts == limits
    cuts = {A: 0, B: 19, offsets: 3, STATES: 2}
    assert highest_cut(limits | {B: 19}, transactions, commits).cuts == cuts
