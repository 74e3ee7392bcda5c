"""A whole segment is missing in one replica: which records are lost and which were cleaned, with and without
checkpoints.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.audit.command import AuditRow, Request
from keytail.audit.compare import ReplicaLog, cleaning_limits, shown_cleaned_to
from keytail.audit.driver import audit as audit_replicas
from keytail.audit.stages import Alone, Audit, audit
from keytail.format.batch import BATCH_TABLE, DELETE_HORIZON
from keytail.kernels.audit.reasons import KNOWN, POSSIBLE
from keytail.log.fs import LOCAL
from tests import golden
from tests.audit.logs import NOW, Replica, expected, random_segments, task_of, variants
from tests.chance import SEED, draws
from tests.command_line import Run
from tests.golden import older
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.cleaner import Segment
from tests.reference.legacy import decode_any_log

ABORT_KEY = bytes(4)  # version and type of a marker
BY_CLEANING = ("superseded", "deleted", "aborted", "keyless")


def found(replicas: list[Replica], home: Path, shards: int = 1) -> Audit:
    """Audit the replicas, check the counts by the reference model, and return the result."""
    task, first = task_of(replicas, home, shards=shards)
    result, model = audit(task, first, Alone(LOCAL)), expected(replicas, task)
    counts = dict(result.divergences), dict(result.explained), dict(result.early), result.common
    assert counts == (dict(model.divergences), dict(model.explained), dict(model.early), model.common)
    return result


def lost_offsets(result: Audit) -> set[int]:
    return {item["offset"] for item in result.examples if item["kind"] == "lost"}


def remove_one(rng: random.Random, replica: Replica) -> Segment | None:
    """Remove and return a segment with records that is neither the first nor the last."""
    inner = [s for s in replica.segments[1:-1] if s.base_offset > replica.log_start and s.log]
    if not inner:
        return None
    segment = rng.choice(inner)
    replica.segments.remove(segment)
    return segment


def data_offsets(replicas: list[Replica], segment: Segment, end: int) -> set[int]:
    """Return the offsets below `end` of the data records that only the replica without the segment has lost."""
    return {
        record.offset
        for batch in decode_any_log(segment.log)
        if not batch.control
        for record in batch.records
        if record.offset < end and any(other.log_start <= record.offset for other in replicas)
    }


def unexplained_without(replica: Replica, removed: Segment) -> set[int]:
    """Return the offsets of the records of `replica` that other replicas may lack because of the segment that `replica`
    has lost: a record of it superseded them, or an ABORT marker in it ended their transaction.
    """
    lost = decode_any_log(removed.log)
    newest = {r.key: r.offset for b in lost if not b.control for r in b.records}
    found = {r.offset for b in replica.batches() for r in b.records if r.offset < newest.get(r.key, 0)}
    batches = sorted([*replica.batches(), *lost], key=lambda batch: batch.base_offset)
    # A cleaning keeps the batch of a removed marker without records if it is the last one of its producer.
    lost_aborts = {b.base_offset for b in lost if b.control for r in b.records if r.key == ABORT_KEY}
    of_transaction: dict[int, set[int]] = {}
    for batch in batches:
        if batch.control:
            aborted = of_transaction.pop(batch.producer_id, set())
            if batch.base_offset in lost_aborts:
                found |= aborted
        elif batch.transactional:
            of_transaction.setdefault(batch.producer_id, set()).update(record.offset for record in batch.records)
    return found


@pytest.mark.parametrize("case", range(draws(60)))
def test_without_checkpoints_intact_replicas_do_not_differ(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    replicas = variants(rng, random_segments(rng, keyless=case % 3 == 0), rng.choice([2, 2, 3]))
    for replica in replicas:
        if rng.random() < 0.6:
            replica.cleaned_to = None
    if rng.random() < 0.4:  # a replica lost its disk, and fetched the log of another one
        replicas.append(replace(rng.choice(replicas), cleaned_to=0))
    for shards in (1, 3):
        assert not found(replicas, tmp_path, shards).divergences


@pytest.mark.parametrize("known", [True, False], ids=["checkpoints", "no checkpoints"])
@pytest.mark.parametrize("case", range(draws(40)))
def test_no_loss_is_explained_if_no_replica_was_cleaned(case: int, known: bool, tmp_path: Path) -> None:
    """No replica was cleaned: with checkpoints, every missing record is lost; without them, no missing record is
    explained.
    """
    print("seed", SEED, "case", case)
    rng = random.Random(f"{SEED} {case} {known}")
    segment = None
    while segment is None:
        segments = random_segments(rng, keyless=rng.random() < 0.3)
        base = segments[0].base_offset
        replicas = [Replica(list(segments), base, 0 if known else None) for _ in range(rng.choice([2, 3]))]
        number = rng.randrange(len(replicas))
        segment = remove_one(rng, replicas[number])
    task, _ = task_of(replicas, tmp_path)
    truth = data_offsets([r for r in replicas if r is not replicas[number]], segment, task.end_offset)
    for shards in (1, 4):
        result = found(replicas, tmp_path, shards)
        assert not set(result.explained) & set(BY_CLEANING)
        unknown = result.explained["cleaning-unknown"]
        assert lost_offsets(result) <= truth
        assert result.divergences["lost"] + unknown == len(truth)
        if known or first_removable(replicas[number]) <= segment.base_offset:
            assert unknown == 0, "losses above a removable record cannot be unknown"


def first_removable(replica: Replica) -> int:
    seen: set[bytes] = set()
    for batch in replica.batches():
        for record in batch.records:
            if batch.control or (batch.transactional and record.key is not None):
                continue
            if record.key is None or record.key in seen:
                return record.offset
            seen.add(record.key)
    return 2**63 - 1


@pytest.mark.parametrize("case", range(draws(60)))
def test_a_missing_segment_of_a_cleaned_replica_is_reported_as_lost(case: int, tmp_path: Path) -> None:
    """Records of the missing segment above the offset that a cleaner reached are lost. Other records are also lost if
    the record that superseded them, or the marker that aborted them, was in that segment.
    """
    print("seed", SEED, "case", case)
    rng = random.Random(f"{SEED} {case}")
    segment = None
    while segment is None:
        replicas = variants(rng, random_segments(rng, keyless=rng.random() < 0.3), rng.choice([2, 3]))
        number = rng.randrange(len(replicas))
        segment = remove_one(rng, replicas[number])
    cleaned_to = [replica.cleaned_to or 0 for replica in replicas]
    for replica in replicas:
        if rng.random() < 0.5:
            replica.cleaned_to = None
    others = [replica for replica in replicas if replica is not replicas[number]]
    task, first = task_of(replicas, tmp_path)
    truth = data_offsets(others, segment, task.end_offset)
    for shards in (1, 3):
        result = found(replicas, tmp_path, shards)
        lost = lost_offsets(result)
        assert lost <= truth | unexplained_without(replicas[number], segment)
        if all(replica.cleaned_to is not None for replica in replicas):
            in_others = {r.offset for o in others for b in o.batches() for r in b.records if r.offset >= o.log_start}
            assert {offset for offset in truth & in_others if offset >= max(first, *cleaned_to)} <= lost


def single(*offsets: int, keys: bytes = b"k") -> bytes:
    return b"".join(encode_batch([Rec(offset, NOW, keys, b"%d" % offset)]) for offset in offsets)


def log(*segments: tuple[int, bytes], cleaned_to: int | None = None) -> Replica:
    return Replica([Segment(base, data, mtime_ms=NOW) for base, data in segments], 0, cleaned_to)


WHOLE = ((0, single(0, 1)), (2, single(2, 3)), (4, single(4, 5)), (6, single(6)))


def test_gaps_of_a_replica_without_a_checkpoint_show_how_far_it_was_cleaned(tmp_path: Path) -> None:
    """A gap between segments may be a missing segment; a gap inside a segment shows a cleaner."""
    whole = log(*WHOLE)
    missing = found([whole, log(*WHOLE[:1], *WHOLE[2:])], tmp_path)
    assert (dict(missing.divergences), dict(missing.explained), missing.shown) == ({"lost": 2}, {}, [0, 0])
    by_cleaner = found([whole, log((0, single(3)), *WHOLE[2:])], tmp_path)
    assert (dict(by_cleaner.divergences), dict(by_cleaner.explained)) == ({}, {"superseded": 3})
    assert by_cleaner.shown == [0, 3]
    both = found([whole, log((0, single(3)), *WHOLE[3:])], tmp_path)
    assert (dict(both.divergences), dict(both.explained)) == ({"lost": 2}, {"superseded": 3})


def test_a_possible_loss_is_reported_as_unknown(tmp_path: Path) -> None:
    """The log is the same if a cleaner removed all records at the end of a segment, or if a whole segment was removed.
    """
    cut = [(0, single(0, keys=b"c")), (3, single(3, keys=b"a"))]
    whole = [(0, single(0, keys=b"c") + single(1, 2, keys=b"a")), (3, single(3, keys=b"a"))]
    result = found([log(*whole), log(*cut)], tmp_path)
    assert (dict(result.divergences), dict(result.explained)) == ({}, {"cleaning-unknown": 2})
    result = found([log(*whole, cleaned_to=0), log(*cut, cleaned_to=0)], tmp_path)
    assert dict(result.divergences) == {"lost": 2}


def test_a_record_whose_abort_marker_is_in_the_missing_segment_is_lost_in_the_cleaned_replica(tmp_path: Path) -> None:
    """A cleaning removed the aborted record, and then the marker, from one replica; the other lost the marker with its
    segment.
    """
    own: dict[str, Any] = {"producer_id": 4, "producer_epoch": 1}
    aborted = encode_batch([Rec(1, NOW, b"a", b"1")], **own, base_sequence=0, transactional=True)
    marker = encode_marker(3, NOW, commit=False, **own)
    emptied = encode_batch([], base_offset=3, last_offset=3, **own, transactional=True, control=True)
    first, later, rest = single(0, keys=b"b"), single(2, keys=b"c"), single(4, keys=b"d")
    removed = Segment(2, later + marker, mtime_ms=NOW)
    without, clean = log((0, first + aborted), (4, rest)), log((0, first), (2, later), (4, rest), cleaned_to=4)
    result = found([without, clean], tmp_path)
    assert lost_offsets(result) == {1, 2}
    assert unexplained_without(without, removed) == {1}
    assert unexplained_without(without, replace(removed, log=later + emptied)) == set()


def test_gaps_show_that_a_replica_fetched_from_a_cleaned_one(tmp_path: Path) -> None:
    """The checkpoint of the replica is 0, but the records that it fetched from the cleaned one have the gaps of a
    cleaner.
    """
    whole, leader = log(*WHOLE, cleaned_to=0), log((0, single(3)), *WHOLE[2:], cleaned_to=4)
    fetched = log((0, single(3, 4)), (5, single(5, 6)), cleaned_to=0)
    result = found([whole, leader, fetched], tmp_path)
    assert (dict(result.divergences), dict(result.explained)) == ({}, {"superseded": 3})
    without = log(*WHOLE[:1], *WHOLE[2:], cleaned_to=0)
    result = found([whole, leader, without], tmp_path)
    assert dict(result.divergences) == {"lost": 1}, "the last record before the gap is the latest of its key"
    assert dict(result.explained) == {"superseded": 2, "cleaning-unknown": 1}
    result = found([whole, log((0, single(5)), *WHOLE[3:], cleaned_to=6), without], tmp_path)
    assert dict(result.explained) == {"superseded": 3, "cleaning-unknown": 2}
    assert dict(result.divergences) == {}


def test_a_replica_fetched_from_a_cleaned_one_whose_checkpoint_is_unknown(tmp_path: Path) -> None:
    """The record after a gap may be the one that superseded the records in the gap."""
    leader, fetched = log((0, single(3)), *WHOLE[2:]), log((0, single(3, 4)), (5, single(5, 6)), cleaned_to=0)
    result = found([log(*WHOLE, cleaned_to=0), leader, fetched], tmp_path)
    assert (dict(result.divergences), dict(result.explained)) == ({}, {"superseded": 3})


def test_the_first_repeated_key_limits_the_cleaning_of_all_keys(tmp_path: Path) -> None:
    """The repeated key is in one shard; the lost record, which only a record above the repetition superseded, is in
    another. The gap in the first segment shows cleaning above the lost record."""
    keys = [b"k%d" % n for n in range(40)]
    first, lost = single(0, keys=b"x"), b"".join(single(1 + n, keys=key) for n, key in enumerate(keys))
    rest = single(50, keys=b"y") + single(51, keys=b"x")
    rest += b"".join(single(60 + n, keys=key) for n, key in enumerate(keys))
    for shards in (1, 8):
        result = found([log((0, first + lost + rest), cleaned_to=0), log((0, first + rest))], tmp_path, shards)
        assert (dict(result.divergences), dict(result.explained)) == ({"lost": 40}, {}), shards


offsets = st.integers(0, 20)


@given(st.lists(st.tuples(st.none() | offsets, offsets, offsets), min_size=2, max_size=4))
def test_known_cleaning_is_possible_cleaning(facts: list[tuple[int | None, int, int]]) -> None:
    replicas = [ReplicaLog("r", "", (), 0, 30, None, cleaned_to) for cleaned_to, _, _ in facts]
    limits, last = cleaning_limits(replicas, [shown for _, shown, _ in facts], [first for _, _, first in facts])
    assert (limits[KNOWN] <= limits[POSSIBLE]).all()
    assert (last[KNOWN] <= last[POSSIBLE]).all()


def table(*rows: tuple[int, int, int, int]) -> np.ndarray:
    made = np.zeros(len(rows), BATCH_TABLE)
    for row, (base, last, records, attributes) in zip(made, rows, strict=True):
        row["base_offset"], row["last_offset"], row["record_count"], row["attributes"] = base, last, records, attributes
        row["magic"] = 2
    return made


@pytest.mark.parametrize(
    ("rows", "end_offset", "shown"),
    [
        ([(5, 9, 5, 0), (10, 10, 1, 0)], 5, 0),
        ([(5, 9, 5, 0), (11, 11, 1, 0)], 5, 11),
        ([(5, 9, 5, 0)], 3, 5),
        ([(5, 9, 5, 0)], None, 0),
        ([(5, 9, 4, 0), (10, 10, 1, 0)], 5, 10),
        ([(5, 9, 0, 0), (10, 10, 1, 0)], 5, 10),
        ([(5, 9, 5, DELETE_HORIZON), (10, 10, 1, 0)], 5, 10),
    ],
)
def test_gaps_inside_segments_show_that_a_cleaner_ran(rows: Any, end_offset: int | None, shown: int) -> None:
    assert shown_cleaned_to(table(*rows), end_offset) == shown


def audited(a: Path, b: Path, *topics: str) -> dict[str, AuditRow]:
    from keytail.cli.selection import PartitionFilter

    request = Request((f"a={a}", f"b={b}"), PartitionFilter((), topics))
    return {row.name: row for row in audit_replicas(request)}


def test_all_records_of_a_segment_missing_in_a_copy_of_a_real_log_are_lost(tmp_path: Path) -> None:
    """The replicas are copies of partition directories without checkpoints."""
    source = golden.unpack(tmp_path)
    chosen, gone = ("none-1", "gzip-0", "tombstones-0", "events-0"), Counter[str]()
    rng = random.Random(SEED)
    for name in chosen:
        for replica in "ab":
            shutil.copytree(source / name, tmp_path / replica / name)
        bases = sorted(int(path.stem) for path in (source / name).glob("*.log"))
        number = rng.randrange(2, len(bases) - 1)
        for path in (tmp_path / "b" / name).glob(f"{bases[number]:020d}.*"):
            path.unlink()
        gone[name] = bases[number + 1] - bases[number]
    rows = audited(tmp_path / "a", tmp_path / "b")
    for name, row in rows.items():
        assert (row.status, row.divergences, row.explained) == ("differs", {"lost": gone[name]}, {}), f"seed {SEED}"
        assert row.notes[1] == (
            "b has no cleaner-offset-checkpoint; nothing in its log shows that it was ever cleaned"
        )


@pytest.mark.long
def test_copies_of_real_logs_have_no_losses_after_a_compaction(run: Run, tmp_path: Path) -> None:
    """The logs are those of real brokers; keytail, whose results equal those of Kafka's cleaner, compacts one copy."""
    flags: dict[str, list[str]] = {"4.3.1": []}
    for version in older.VERSIONS:
        topics = [topic for topic in older.topics_of(version) if "v0" not in topic]
        policies = [part for topic in topics for part in ("--topic-config", f"{topic}:cleanup.policy=compact")]
        flags[version] = ["--topics-have-no-overrides", "--topic-list", ",".join(topics), *policies]
    for version, more in flags.items():
        home = tmp_path / version
        source = golden.unpack(home) if version == "4.3.1" else older.unpack(version, home)
        shutil.copytree(source, home / "a")
        shutil.copytree(source, home / "b")
        done = run("compact", "--log-dirs", home / "b", *more, "--from-log-start", "--execute")
        assert done.exit_code == 0, done.stderr
        for replica in "ab":
            (home / replica / "cleaner-offset-checkpoint").unlink(missing_ok=True)
        rows = audited(home / "a", home / "b")
        assert {name: row.divergences for name, row in rows.items() if row.divergences} == {}
        explained = sum((Counter(row.explained or {}) for row in rows.values()), Counter[str]())
        assert explained["superseded"] > 100, explained
