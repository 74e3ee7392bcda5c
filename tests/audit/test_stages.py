"""Audits of replicas in this process, compared with the reference model: only inserted differences are found, and all
of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.audit.stages import Alone, Audit, audit
from keytail.log.fs import LOCAL
from tests.audit.logs import (
    DIFFERENCES,
    NOW,
    Replica,
    expected,
    insert_difference,
    random_segments,
    task_of,
    variants,
)
from tests.chance import SEED, draws
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Segment
from tests.reference.varints import crc32c


def found(replicas: list[Replica], home: Path, shards: int = 1) -> tuple[Audit, int]:
    task, first = task_of(replicas, home, shards=shards)
    return audit(task, first, Alone(LOCAL)), task.end_offset


def counts(result: Audit) -> tuple:
    return dict(result.divergences), dict(result.explained), dict(result.early), result.common


@pytest.mark.parametrize("case", range(draws(60)))
def test_intact_replicas_do_not_differ_and_all_missing_records_are_explained(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    segments = random_segments(rng)
    replicas = variants(rng, segments, rng.choice([2, 2, 3]))
    task, _ = task_of(replicas, tmp_path)
    model = expected(replicas, task)
    assert not model.divergences
    for shards in (1, 3):
        result, _ = found(replicas, tmp_path, shards)
        assert counts(result) == (dict(model.divergences), dict(model.explained), dict(model.early), model.common)
        assert result.gaps == []


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("case", range(draws(8)))
def test_every_inserted_difference_is_found(kind: str, case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(f"{SEED} {case} {kind}")
    for _ in range(20):
        replicas = variants(rng, random_segments(rng), rng.choice([2, 3]))
        task, _ = task_of(replicas, tmp_path)
        offset = insert_difference(rng, replicas, kind, task.end_offset)
        if offset is not None:
            break
    else:
        pytest.fail("the difference could not be inserted in any log")
    task, _ = task_of(replicas, tmp_path)
    model = expected(replicas, task)
    for shards in (1, 4):
        result, _ = found(replicas, tmp_path, shards)
        planted = [item for item in result.examples if item["kind"] == kind and item["offset"] == offset]
        assert planted, (kind, offset, result.divergences, result.examples)
        assert counts(result) == (dict(model.divergences), dict(model.explained), dict(model.early), model.common)


@pytest.mark.parametrize("case", range(draws(15)))
def test_many_differences_are_counted_as_by_the_model(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    replicas = variants(rng, random_segments(rng, keyless=rng.random() < 0.3), rng.choice([2, 3, 4]))
    for _ in range(rng.randint(2, 8)):
        task, _ = task_of(replicas, tmp_path)
        insert_difference(rng, replicas, rng.choice(DIFFERENCES), task.end_offset)
    task, _ = task_of(replicas, tmp_path)
    model = expected(replicas, task)
    for shards in (1, 5):
        result, _ = found(replicas, tmp_path, shards)
        assert counts(result) == (dict(model.divergences), dict(model.explained), dict(model.early), model.common)


def one_batch(*batches: bytes) -> Replica:
    log = b"".join(batches)
    end = decode_log(log)[-1].last_offset + 1
    return Replica([Segment(0, log, mtime_ms=NOW), Segment(end, b"", mtime_ms=NOW)])


def with_checksum(data: bytearray) -> bytes:
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return bytes(data)


def test_lengths_that_a_cleaner_rewrites_are_not_differences(tmp_path: Path) -> None:
    """A length is encoded in two bytes instead of one; a cleaner that rebuilds the batch writes one."""
    plain = encode_batch([Rec(0, NOW, b"k", b"v", ((b"h", None),))])
    assert plain.endswith(b"\x02\x02h\x01")
    longer = bytearray(plain[:-4] + b"\x82\x00" + plain[-3:])
    longer[61] += 2  # the length of the record, in zig-zag encoding
    longer[8:12] = (len(longer) - 12).to_bytes(4, "big")
    for other, kinds in ((with_checksum(longer), {}), (encode_batch([Rec(0, NOW, b"k", b"v")]), {"headers": 1})):
        result, _ = found([one_batch(plain), one_batch(other)], tmp_path)
        assert dict(result.divergences) == kinds
        assert result.common == 1


def test_a_marker_and_a_record_at_the_same_offset_differ(tmp_path: Path) -> None:
    marker = encode_marker(1, NOW, commit=True, producer_id=4, producer_epoch=0)
    first = encode_batch([Rec(0, NOW, b"k", b"v")])
    for shards in (1, 7):
        record = encode_batch([Rec(1, NOW, b"x", b"v")])
        result, _ = found([one_batch(first, marker), one_batch(first, record)], tmp_path, shards)
        assert dict(result.divergences) == {"control": 1}
        assert [(item["kind"], item["offset"]) for item in result.examples] == [("control", 1)]


def test_unparsable_records_with_a_valid_checksum_are_damage_of_one_batch(
    tmp_path: Path,
) -> None:
    batches = [encode_batch([Rec(n, NOW, b"k%d" % n, b"v")], codec=n % 2) for n in range(5)]
    spoiled = bytearray(batches[2])
    spoiled[61] += 2
    other = [*batches[:2], with_checksum(spoiled), *batches[3:]]
    for shards in (1, 3):
        spoiled_one = Replica([Segment(0, b"".join(other), mtime_ms=NOW), Segment(5, b"", mtime_ms=NOW)], end=5)
        result, _ = found([one_batch(*batches), spoiled_one], tmp_path, shards)
        [gap] = result.gaps
        assert (gap.replica, gap.first_offset, gap.end_offset) == (1, 2, 3)
        assert gap.byte_position == len(batches[0]) + len(batches[1])
        assert not result.divergences
        assert result.common == 4


def test_epochs_with_different_starts_differ_if_a_record_is_between_the_starts(tmp_path: Path) -> None:
    batches = [encode_batch([Rec(n, NOW, b"k%d" % n, b"v")]) for n in (0, 1, 9)]
    replicas = [one_batch(*batches), one_batch(*batches)]
    for starts, kinds in (((2, 9), {}), ((1, 9), {"epoch-start": 1}), ((5, 5), {})):
        task, first = task_of(replicas, tmp_path)
        logs = tuple(
            replace(log, epochs=((0, 0), (3, start))) for log, start in zip(task.replicas, starts, strict=True)
        )
        result = audit(replace(task, replicas=logs), first, Alone(LOCAL))
        assert dict(result.divergences) == kinds, starts


def test_above_the_cleaned_offset_no_record_may_be_missing(tmp_path: Path) -> None:
    """A missing record is explained by a later record of its key only below the largest checkpoint: the record at the
    checkpoint itself was not cleaned."""
    whole = [encode_batch([Rec(n, NOW, b"k", b"v")]) for n in range(4)]
    lost = {"lost": 1}
    cases = ((0, 0), lost), ((2, 0), lost), ((3, 0), {}), ((0, 2), lost), ((0, 3), {}), ((0, None), lost)
    for cleaned_to, kinds in cases:
        replicas = [one_batch(*whole), one_batch(whole[0], *whole[2:])]
        for replica, offset in zip(replicas, cleaned_to, strict=True):
            replica.cleaned_to = offset
        result, _ = found(replicas, tmp_path)
        assert dict(result.divergences) == kinds, cleaned_to


def test_a_marker_that_is_unreadable_or_below_a_log_start_is_not_missing(tmp_path: Path) -> None:
    own = {"producer_id": 4, "producer_epoch": 0}
    data = encode_batch([Rec(0, NOW, b"k", b"v")], base_sequence=0, transactional=True, **own)
    marker = bytearray(encode_marker(1, NOW, commit=True, **own))
    rest = encode_batch([Rec(2, NOW, b"x", b"v")])
    whole = one_batch(data, bytes(marker), rest)
    without, _ = found([whole, one_batch(data, rest)], tmp_path)
    assert dict(without.divergences) == {"marker-lost": 1}
    marker[70] ^= 1
    log = data + bytes(marker) + rest
    damaged = Replica([Segment(0, log, mtime_ms=NOW), Segment(3, b"", mtime_ms=NOW)], end=3)
    result, _ = found([whole, damaged], tmp_path)
    assert not result.divergences
    assert [(gap.first_offset, gap.end_offset) for gap in result.gaps] == [(1, 2)]
    later = one_batch(rest)
    later.log_start = 2
    result, _ = found([whole, whole, later], tmp_path)
    assert (dict(result.divergences), dict(result.early), result.common) == ({}, {}, 3)
