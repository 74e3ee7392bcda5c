from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import pytest

from keytail.compact.proof.legacy import read_message
from keytail.compact.proof.prove import prove
from keytail.errors import CorruptLog, KeytailError
from keytail.log.fs import LOCAL
from tests.chance import draws
from tests.compact.proof.case import NOW, RETENTION, Case
from tests.reference import cleaner
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.cleaner import Segment
from tests.reference.legacy import decode_any_log, encode_message, encode_single, encode_wrapper


def _records(offset: int, *items: tuple[bytes | None, bytes | None]) -> list[Rec]:
    return [Rec(offset + i, NOW - 500 + offset + i, key, value) for i, (key, value) in enumerate(items)]


def _example(codec: int = 1, magic: int = 1, append_time: int | None = None, **given) -> Case:
    """Return messages of magic 0 and 1, alone and in wrappers, and a batch of magic 2."""
    append = NOW - 100 if append_time and magic else None
    pack = {"codec": codec, "magic": magic, "append_time": append}
    first = (
        encode_single(Rec(0, -1, b"a", b"1"), magic=0)
        + encode_single(Rec(1, NOW - 400, b"b", b"2"), magic=1)
        + encode_wrapper(_records(2, (b"a", b"3"), (b"c", None), (b"d", b"4"), (b"e", b"5")), **pack)
    )
    second = (
        encode_wrapper(_records(10, (b"a", b"6"), (b"f", None), (b"g", b"7"), (b"a", b"8")), **pack)
        + encode_single(Rec(14, NOW - 300, b"h", None), magic=1)
        + encode_wrapper(_records(15, (b"a", b"x"), (b"h", b"y")), **pack)
        + encode_batch(_records(20, (b"a", b"9"), (b"b", b"10"), (b"f", b"11")))
        + encode_single(Rec(24, NOW - 200, b"g", b"12"), magic=1, append_time=True)
        + encode_wrapper(_records(25, (b"a", b"13"), (b"i", b"14"), (b"h", b"15"), (b"a", b"16")), **pack)
    )
    segments = [
        Segment(0, first, mtime_ms=NOW - 5000),
        Segment(10, second, mtime_ms=NOW - 1000),
        Segment(40, b"", mtime_ms=NOW),
    ]
    return Case(segments, first_dirty=10, segment_bytes=1, **given)


@pytest.mark.parametrize("codec", [1, 2, 3])
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("append_time", [None, 1])
def test_a_correct_round_passes(tmp_path, codec, magic, append_time):
    case = _example(codec, magic, append_time)
    report = case.prove(tmp_path)
    kept = [b for o in case.outputs for b in decode_log(b"".join(o.batches))]
    assert (report.batches_kept, report.batches_checked) == (len(kept), 9)
    assert report.records_kept == sum(b.record_count for b in kept)
    assert report.records_checked == 21


def test_a_group_of_several_outputs_passes(tmp_path):
    for bases in ([26], [23], [20, 26], [24], [14, 15, 16, 20, 23, 24, 25]):
        case = _example()
        case.split(1, bases)
        case.prove(tmp_path)


def _at(case: Case, offset: int):
    """Return the source message that contains `offset`, and the decoded batch of its output, with its position."""
    for output in case.outputs:
        for i, data in enumerate(output.batches):
            batch = decode_log(data)[0]
            if batch.base_offset <= offset <= batch.last_offset:
                return output, i, batch
    raise AssertionError(offset)


def _again(case: Case, offset: int, records=None, **changes) -> None:
    output, i, batch = _at(case, offset)
    fields = {
        "codec": batch.codec,
        "timestamp_type": batch.timestamp_type,
        "leader_epoch": -1,
        "max_timestamp": batch.max_timestamp if batch.timestamp_type else None,
        "delete_horizon_ms": batch.delete_horizon_ms,
    }
    output.batches[i] = encode_batch(batch.records if records is None else records, **{**fields, **changes})


def _m_latest_removed(c):
    output, i, _ = _at(c, 24)
    del output.batches[i]


def _m_latest_inside_removed(c):
    _again(c, 26, [r for r in _at(c, 26)[2].records if r.key != b"i"])


def _m_clean_record_removed(c):
    _again(c, 4, [r for r in _at(c, 4)[2].records if r.key != b"d"])


def _m_single_message_removed(c):
    """Remove h, which first occurs at offset 27; key b of the first segment is superseded."""
    output, i, _ = _at(c, 20)
    del output.batches[i]


def _m_value(c):
    records = _at(c, 4)[2].records
    _again(c, 4, [replace(records[0], value=b"other"), *records[1:]])


def _m_value_to_null(c):
    records = _at(c, 26)[2].records
    _again(c, 26, [replace(records[0], value=None), *records[1:]])


def _m_key(c):
    records = _at(c, 4)[2].records
    _again(c, 4, [replace(records[0], key=b"other"), *records[1:]])


def _m_timestamp(c):
    records = _at(c, 4)[2].records
    _again(c, 4, [replace(records[0], timestamp=NOW), *records[1:]])


def _m_header(c):
    records = _at(c, 4)[2].records
    _again(c, 4, [replace(records[0], headers=((b"h", b"x"),)), *records[1:]])


def _m_order(c):
    records = _at(c, 4)[2].records
    base, last = records[0].offset, records[-1].offset
    _again(c, 4, records[::-1], base_offset=base, last_offset=last, base_timestamp=records[0].timestamp)


def _m_order_of_the_last_two(c):
    first, second, third = _at(c, 26)[2].records
    _again(c, 26, [first, third, second], last_offset=second.offset)


def _m_twice(c):
    records = _at(c, 4)[2].records
    _again(c, 4, [records[0], *records])


def _m_base_offset_of_the_message(c):
    _again(c, 26, base_offset=25)


def _m_last_offset_above(c):
    _again(c, 4, last_offset=6)


def _m_leader_epoch(c):
    _again(c, 4, leader_epoch=0)


def _m_producer(c):
    _again(c, 4, producer_id=1, producer_epoch=0, base_sequence=0)


def _m_codec(c):
    _again(c, 4, codec=4)


def _m_timestamp_type(c):
    _again(c, 4, timestamp_type=1, max_timestamp=_at(c, 4)[2].max_timestamp)


def _m_transactional(c):
    _again(c, 4, transactional=True)


def _m_unused_bit(c):
    _again(c, 4, extra_attributes=0x80)


def _m_horizon_without_tombstone(c):
    _again(c, 26, delete_horizon_ms=NOW + RETENTION)


def _m_max_timestamp(c):
    _again(c, 4, max_timestamp=NOW)


def _m_base_timestamp(c):
    _again(c, 26, base_timestamp=NOW)


def _m_emptied(c):
    output, i, _ = _at(c, 4)
    output.batches[i] = encode_batch([], base_offset=2, last_offset=5, base_timestamp=-1)


def _m_emptied_message_of_one_record(c):
    output, i, batch = _at(c, 24)
    fields = {"timestamp_type": batch.timestamp_type, "leader_epoch": -1, "max_timestamp": batch.max_timestamp}
    output.batches[i] = encode_batch([], base_offset=24, last_offset=24, base_timestamp=-1, **fields)


def _m_count(c):
    _again(c, 4, record_count=1)


def _m_copied_unchanged(c):
    output, i, _ = _at(c, 24)
    output.batches[i] = encode_single(Rec(24, NOW - 200, b"g", b"12"), magic=1, append_time=True)


def _m_last_message_of_the_range_removed(c):
    c.uncleanable = 29
    output, i, _ = _at(c, 26)
    del output.batches[i]


MUTATIONS = {name[3:]: f for name, f in sorted(globals().items()) if name.startswith("_m_")}


def test_there_are_as_many_mutations_as_documented():
    assert len(MUTATIONS) == 28


@pytest.mark.parametrize("codec", [1, 2])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_with_its_position(tmp_path, name, codec):
    case = _example(codec)
    before = case.files() if "copied" not in name else None
    MUTATIONS[name](case)
    assert before is None or case.files() != before, "the mutation changed nothing"
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    error = caught.value
    assert not isinstance(error, CorruptLog), error
    assert error.path and error.remedy and error.byte_position is not None


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_an_impossible_record_count_is_found(tmp_path, count):
    case = _example()
    _again(case, 4, record_count=count)
    with pytest.raises(KeytailError, match="impossible record count"):
        case.prove(tmp_path)


def _holding(case: Case, key: bytes) -> list[int]:
    return [
        r.offset
        for o in case.outputs
        for b in decode_log(b"".join(o.batches))
        for r in b.records
        if r.key == key and r.value is None
    ]


def test_a_tombstone_is_removed_by_the_time_of_its_file(tmp_path):
    """The horizon of old messages follows from the last segment before the first dirty offset."""
    items = [(b"x", None), (b"y", b"1")]
    segments = [
        Segment(0, encode_wrapper(_records(0, *items), 1), mtime_ms=NOW - 5000),
        Segment(10, encode_single(Rec(10, NOW, b"z", b"1")), mtime_ms=NOW - 5000 + RETENTION),
        Segment(20, encode_single(Rec(20, NOW, b"q", b"1")), mtime_ms=NOW),
        Segment(30, b"", mtime_ms=NOW),
    ]
    case = Case(segments, first_dirty=20)
    assert not _holding(case, b"x")
    case.prove(tmp_path)
    case.segments[1] = replace(segments[1], mtime_ms=NOW - 5001 + RETENTION)
    with pytest.raises(KeytailError, match="latest record of its key") as caught:
        case.prove(tmp_path)
    assert (caught.value.offset, caught.value.byte_position) == (0, 0)
    later = Case(case.segments, first_dirty=20)
    assert _holding(later, b"x") == [0]
    later.prove(tmp_path)


@pytest.mark.parametrize("key", [b"x", b"y"], ids=["a tombstone without the flag", "a value with the flag"])
def test_only_a_tombstone_has_the_flag_of_a_delete_horizon(tmp_path, key):
    """The base timestamp is that which the flag, or its absence, requires."""
    [tombstone, value, newest] = _records(0, (b"x", None), (b"y", b"1"), (b"z", b"2"))
    old = [replace(tombstone if key == b"x" else value, offset=0), replace(newest, offset=1)]
    log = encode_wrapper([*old, replace(newest, offset=2)], 1)
    case = Case([Segment(0, log, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0)
    case.prove(tmp_path)
    [output] = case.outputs
    [batch] = decode_log(output.batches[0])
    assert [record.offset for record in batch.records] == [0, 2]
    assert batch.delete_horizon_ms == (NOW + RETENTION if key == b"x" else None)
    fields = {"codec": 1, "leader_epoch": -1, "base_timestamp": batch.delete_horizon_ms}
    if key == b"y":
        fields["delete_horizon_ms"] = batch.records[0].timestamp
    output.batches[0] = encode_batch(batch.records, **fields)
    with pytest.raises(KeytailError, match="delete horizon is missing or should not be there"):
        case.prove(tmp_path)


def _short(key: bytes) -> bytes:
    """Return a message that ends after `key`, which begins with the length of the key."""
    body = b"\1\0" + struct.pack(">q", NOW) + key
    return struct.pack(">qiI", 0, 4 + len(body), zlib.crc32(body)) + body


def test_corrupt_messages_are_reported_as_corrupt(tmp_path):
    good, [one] = encode_wrapper(_records(0, (b"a", b"1"), (b"b", b"2")), 1), _records(0, (b"a", b"1"))
    bad = {
        "invalid CRC": good[:-1] + bytes([good[-1] ^ 1]),
        "do not increase": encode_wrapper(_records(0, (b"a", b"1"), (b"b", b"2")), 1, inner_offsets=[1, 1]),
        "no messages": encode_wrapper(_records(0, (b"a", b"1")), 1, inner=b""),
        "below": encode_wrapper(_records(5, (b"a", b"1")), 1, offset=3, inner_offsets=[5]),
        "decompress": encode_wrapper(_records(0, (b"a", b"1")), 4),
        "nothing to decompress": encode_message(0, b"a", None, attributes=1),
        "also compressed": encode_wrapper([one], 1, inner=encode_wrapper([one], 1)),
        "message is below": encode_wrapper(_records(0, (b"a", b"1"), (b"b", b"2")), 1, magic=0, offset=0),
        "impossible offsets": encode_single(replace(one, offset=-5)),
        "has impossible offsets": encode_wrapper([one, one], 1, offset=2**31, inner_offsets=[0, 2**31]),
        "impossible size": encode_wrapper([one], 1, inner=struct.pack(">qiI", 0, 4, 0)),
        "unknown magic": encode_wrapper([one], 1, inner=encode_message(0, b"a", b"1", magic=2)),
        "shorter than its fixed fields": _short(b"\0\0\0\4abcd"),
        "longer than the message": _short(b"\0\0\0\x7fabcd"),
    }
    for reason, message in bad.items():
        case = Case([Segment(0, good, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0)
        case.segments[0] = replace(case.segments[0], log=message)
        with pytest.raises(CorruptLog, match=reason) as caught:
            case.prove(tmp_path)
        assert caught.value.byte_position == 0
    case = Case([Segment(0, good, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0)
    case.segments[0] = replace(case.segments[0], log=good + good)
    with pytest.raises(CorruptLog, match="do not follow"):
        case.prove(tmp_path)
    case = Case([Segment(0, good, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0)
    case.segments[0] = replace(case.segments[0], log=encode_wrapper(_records(8, (b"a", b"1"), (b"b", b"2")), 1))
    case.groups[0][1][0].batches.clear()
    with pytest.raises(CorruptLog, match="do not follow") as caught:  # ends at the next segment's base
        case.prove(tmp_path)
    assert caught.value.byte_position == 0


@pytest.mark.parametrize("number", range(draws(40)))
def test_random_rounds_pass_and_flipped_values_fail(tmp_path, number):
    seed = f"proof-legacy-{number}"
    print(seed)
    rng = random.Random(seed)
    offset, segments = rng.choice([0, 50]), []
    for segment_number in range(rng.randint(1, 4)):
        base, parts = offset, []
        for _ in range(rng.choice([1, 3, 8])):
            n = rng.choice([1, 1, 3, 6])
            values = [(rng.choice([b"a", b"b", b"c", b""]), rng.choice([None, b"", b"v" * 9])) for _ in range(n)]
            records = _records(offset, *values)
            kind = rng.choice(["single", "wrapper", "wrapper", "v2"])
            magic = rng.choice([0, 1])
            if kind == "v2":
                parts.append(encode_batch(records, codec=rng.choice([0, 1])))
            elif kind == "single":
                parts.append(encode_single(records[0], magic=magic, append_time=rng.random() < 0.3))
                n = 1
            else:
                append = rng.choice([None, NOW]) if magic else None
                parts.append(encode_wrapper(records, rng.choice([1, 2, 3]), magic=magic, append_time=append))
            offset += n + rng.choice([0, 0, 3])
        mtime_ms = NOW - rng.choice([0, 500, 1500, 2500])
        segments.append(Segment(base, b"".join(parts), mtime_ms=mtime_ms))
    segments.append(Segment(offset + 1, b"", mtime_ms=NOW))
    first = segments[0].base_offset
    dirty = rng.choice([first, segments[-2].base_offset])
    case = Case(segments, first_dirty=dirty, segment_bytes=rng.choice([1, 10**6]))
    case.prove(tmp_path)
    holding = [(o, i) for o in case.outputs for i in range(len(o.batches))]
    output, i = rng.choice(holding)
    batch = decode_log(output.batches[i])[0]
    changed = [replace(batch.records[0], value=b"never written"), *batch.records[1:]]
    output.batches[i] = cleaner._rebuilt(batch, changed, batch.delete_horizon_ms)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)
    (base,) = struct.unpack_from(">q", output.batches[i])
    assert base == batch.base_offset


# Mutations of rounds that keep the magic (LEGACY.md 5): each returns a wrong result for the retained records of a
# message and its codec.


def _inner(records: list[Rec], base: int, *, magic: int = 1, attributes: int = 0) -> bytes:
    return b"".join(
        encode_message(r.offset - base, r.key, r.value, magic=magic, timestamp=r.timestamp, attributes=attributes)
        for r in records
    )


def _wrapped(records: list[Rec], codec: int, **changes) -> bytes:
    fields = {"magic": 1, "offset": records[-1].offset, "inner": _inner(records, records[0].offset), **changes}
    return encode_wrapper(records, codec, **fields)


KEPT = {
    "outer offset too high": lambda r, codec: _wrapped(r, codec, offset=r[-1].offset + 1),
    "outer offset of a removed one": lambda r, codec: _wrapped(r, codec, offset=28, inner=_inner(r, r[-1].offset - 28)),
    "outer timestamp": lambda r, codec: _wrapped(r, codec, timestamp=NOW + 1),
    "timestamp of the first": lambda r, codec: _wrapped(r, codec, timestamp=r[0].timestamp),
    "checksum": lambda r, codec: _wrapped(r, codec, crc=1),
    "checksum inside": lambda r, codec: _wrapped(
        r, codec, inner=_inner(r[:-1], r[0].offset)
        + encode_message(r[-1].offset - r[0].offset, r[-1].key, r[-1].value, timestamp=r[-1].timestamp, crc=7),
    ),
    "offsets inside from elsewhere": lambda r, codec: _wrapped(r, codec, inner=_inner(r, r[0].offset - 1)),
    "absolute offsets inside": lambda r, codec: _wrapped(r, codec, inner=_inner(r, 0)),
    "append time": lambda r, codec: _wrapped(r, codec, append_time=max(x.timestamp for x in r)),
    "append time inside": lambda r, codec: _wrapped(r, codec, inner=_inner(r, r[0].offset, attributes=8)),
    "other magic": lambda r, codec: _wrapped(r, codec, magic=0, inner=_inner(r, 0, magic=0)),
    "other magic inside": lambda r, codec: _wrapped(r, codec, inner=_inner(r, r[0].offset, magic=0)),
    "other codec": lambda r, codec: _wrapped(r, 3),
    "unused bit": lambda r, codec: _wrapped(r, codec, attributes=codec | 0x40),
    "a key": lambda r, codec: encode_message(
        r[-1].offset, b"", _wrapped(r, codec)[34:], timestamp=max(x.timestamp for x in r), attributes=codec
    ),
    "bytes after it": lambda r, codec: _wrapped(r, codec, tail=b"x"),
    "a value": lambda r, codec: _wrapped(r, codec, inner=_inner([replace(r[0], value=b"?"), *r[1:]], r[0].offset)),
    "a key inside": lambda r, codec: _wrapped(r, codec, inner=_inner([replace(r[0], key=b"?"), *r[1:]], r[0].offset)),
    "a timestamp": lambda r, codec: _wrapped(
        r, codec, inner=_inner([replace(r[0], timestamp=5), *r[1:]], r[0].offset), timestamp=max(x.timestamp for x in r)
    ),
    "one more": lambda r, codec: _wrapped([*r, Rec(27, NOW, b"?", b"?")], codec),
    "one is missing": lambda r, codec: _wrapped(r[1:], codec),
    "not compressed": lambda r, codec: encode_single(r[-1]),
    "version 2": lambda r, codec: encode_batch(r, codec=codec, leader_epoch=-1),
}


@pytest.mark.parametrize("codec", [1, 2])
@pytest.mark.parametrize("name", KEPT)
def test_every_mutation_of_a_message_that_keeps_its_magic_is_found(tmp_path, name, codec):
    case = _example(codec, keep_magic=True)
    [(output, i, message)] = [
        (o, i, decode_any_log(data)[0])
        for o in case.outputs for i, data in enumerate(o.batches) if data[:8] == (28).to_bytes(8, "big")
    ]  # fmt: skip
    kept = list(message.records)
    assert len(kept) == 3 and _wrapped(kept, codec) == output.batches[i], "the mutation changed nothing"
    case.prove(tmp_path)
    output.batches[i] = KEPT[name](kept, codec)
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    assert not isinstance(caught.value, CorruptLog) and caught.value.byte_position is not None


def test_a_wrapper_with_offset_0_ends_at_its_last_message():
    message = read_message(_wrapped(_records(0, (b"a", b"1"), (b"b", b"2"), (b"c", b"3")), 1, offset=0))
    assert (message.first_offset, message.last_offset, message.is_uniform) == (0, 2, False)


def test_unused_bits_of_a_source_are_not_rewritten(tmp_path):
    """The attributes of a rewritten message are only codec and timestamp type, as in Kafka."""
    dropped, kept = Rec(0, NOW - 10, b"a", b"1"), Rec(1, NOW - 9, b"b", b"2")
    wrapper = _wrapped([dropped, kept], 1, attributes=1 | 0x40)
    segments = [Segment(0, wrapper + encode_single(Rec(2, NOW, b"a", b"3"))), Segment(10, b"")]
    case = Case(segments, first_dirty=0, keep_magic=True)
    assert case.outputs[0].batches[0] == _wrapped([kept], 1)
    case.prove(tmp_path)


@pytest.mark.parametrize("codec", [1, 2, 3])
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("append_time", [None, 1])
def test_a_correct_round_that_keeps_the_magic_passes(tmp_path, codec, magic, append_time):
    case = _example(codec, magic, append_time, keep_magic=True)
    report = case.prove(tmp_path)
    kept = [b for o in case.outputs for b in decode_any_log(b"".join(o.batches))]
    assert (report.batches_kept, report.batches_checked) == (len(kept), 9)
    assert report.records_kept == sum(b.record_count for b in kept)
    case.keep_magic = False
    with pytest.raises(KeytailError, match="not of format v2"):
        case.prove(tmp_path)


def test_the_message_that_ends_the_cleaned_range_is_in_the_output(tmp_path):
    singles = [encode_single(record) for record in _records(0, (b"a", b"1"), (b"b", b"2"))]
    case = Case([Segment(0, b"".join(singles), mtime_ms=NOW), Segment(2, b"")], first_dirty=0)
    case.drop(1)
    with pytest.raises(KeytailError, match="the batch that ends the cleaned range"):
        case.prove(tmp_path)


@pytest.mark.parametrize("rules", [{}, {"by_file_time": True}, {"keep_magic": True}], ids=lambda r: "".join(r) or "v2")
def test_only_for_brokers_with_format_v2_must_the_last_message_of_the_range_be_retained(tmp_path, rules):
    records = _records(0, (b"x", None), (b"y", b"1"), (b"z", b"2"))
    tombstone, value, dirty = (encode_single(record) for record in records)
    segments = [
        Segment(0, tombstone, mtime_ms=NOW - 5000),
        Segment(1, value, mtime_ms=NOW - 5000 + RETENTION),
        Segment(2, dirty, mtime_ms=NOW),
        Segment(3, b""),
    ]
    case = Case(segments, first_dirty=2, **rules)
    assert struct.unpack_from(">q", case.outputs[0].batches[0]) == (1,), "the tombstone has expired"
    case.uncleanable = 1
    if rules:
        case.prove(tmp_path)
    else:
        with pytest.raises(KeytailError, match="the batch that ends the cleaned range"):
            case.prove(tmp_path)


@pytest.mark.parametrize("pass_segments", [None, (0, 1)], ids=["in this pass", "in a later pass"])
def test_messages_without_a_key_are_removed_only_if_allowed(tmp_path, pass_segments):
    segments = [Segment(0, encode_single(Rec(0, NOW, b"a", b"1"))), Segment(1, encode_single(Rec(1, NOW, b"b", b"2")))]
    case = Case([*segments, Segment(40, b"")], first_dirty=0, segment_bytes=1)
    keyless = Rec(1, NOW, None, b"2")
    case.segments[1] = replace(segments[1], log=encode_single(keyless))
    case.put(encode_batch([keyless], leader_epoch=-1))
    case.prove(tmp_path)
    case.drop(1)
    spec = case.spec(tmp_path)
    if pass_segments:
        spec = replace(spec, pass_segments=pass_segments, groups=spec.groups[:1])
    with pytest.raises(KeytailError, match="without a key") as caught:
        prove(LOCAL, spec)
    assert (caught.value.path, caught.value.offset) == (f"{tmp_path}/{1:020d}.log", 1)
    prove(LOCAL, replace(spec, drop_keyless=True))


def test_a_message_beyond_the_cleaned_range_must_be_retained(tmp_path):
    log = b"".join(encode_single(Rec(offset, NOW, b"a", b"%d" % offset)) for offset in range(3))
    case = Case([Segment(0, log), Segment(40, b"")], first_dirty=0)
    with pytest.raises(KeytailError, match="a record beyond the cleaned range is not in the output") as caught:
        prove(LOCAL, replace(case.spec(tmp_path), end_offset=1))
    assert caught.value.offset == 1


def test_the_message_at_the_first_dirty_offset_supersedes_others(tmp_path):
    singles = [encode_single(record) for record in _records(0, (b"a", b"1"), (b"a", b"2"), (b"b", b"3"))]
    case = Case([Segment(0, b"".join(singles)), Segment(3, b"")], first_dirty=1)
    assert case.prove(tmp_path).records_kept == 2


def test_a_message_that_lost_no_record_must_have_the_same_bytes(tmp_path):
    single = encode_single(Rec(0, NOW, b"a", b"1"))
    whole = encode_wrapper(_records(1, (b"b", b"1"), (b"c", b"2")), 1)
    segments = [Segment(0, single + whole, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)]
    for at, other in ((0, encode_single(Rec(0, NOW, b"a", b"1"), append_time=True)), (1, None)):
        case = Case(segments, first_dirty=0, keep_magic=True)
        [output] = case.outputs
        output.batches[at] = other or _wrapped(_records(1, (b"b", b"1"), (b"c", b"2")), 1, tail=b"?")
        with pytest.raises(KeytailError, match="source's bytes"):
            case.prove(tmp_path)


def test_a_wrapper_around_another_magic_must_be_rebuilt(tmp_path):
    mixed = encode_wrapper(_records(0, (b"a", b"1"), (b"b", b"2")), 1, inner_magics=[0, 1])
    case = Case([Segment(0, mixed, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0, keep_magic=True)
    case.prove(tmp_path)
    [output] = case.outputs
    output.batches = [mixed]
    what = "inner messages have another magic or its offset is not that of the last inner message"
    with pytest.raises(KeytailError, match=what):
        case.prove(tmp_path)


def test_lz4_of_magic_0_has_the_header_checksum_of_old_clients(tmp_path):
    records = [Rec(i, -1, key, b"v") for i, key in enumerate([b"a", b"b", b"a"])]
    old = encode_wrapper(records, 3, magic=0)
    case = Case([Segment(0, old, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0, keep_magic=True)
    case.prove(tmp_path)
    [output] = case.outputs
    output.batches = [encode_wrapper(records[1:], 3, magic=0, wrong_lz4_checksum=False)]
    with pytest.raises(KeytailError, match="clients before"):
        case.prove(tmp_path)


def test_the_offset_of_a_message_of_magic_0_is_that_of_its_last_record(tmp_path):
    """Offsets inside a message of magic 0 do not depend on the offset of the message."""
    records = [Rec(i, -1, key, b"v") for i, key in enumerate([b"a", b"b", b"a", b"a"])]
    log = encode_wrapper(records[:3], 1, magic=0) + encode_single(records[3], magic=0)
    case = Case([Segment(0, log), Segment(9, b"")], first_dirty=0, keep_magic=True)
    [output] = case.outputs
    assert output.batches[0] == encode_wrapper(records[1:2], 1, magic=0)
    output.batches[0] = encode_wrapper(records[1:2], 1, magic=0, offset=2)
    with pytest.raises(KeytailError, match="another offset than the last record in it"):
        case.prove(tmp_path)


def test_a_message_in_place_of_a_batch_is_found(tmp_path):
    log = encode_batch(_records(0, (b"a", b"1"))) + encode_single(Rec(1, NOW, b"b", b"1"))
    case = Case([Segment(0, log, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)], first_dirty=0, keep_magic=True)
    [output] = case.outputs
    output.batches[0] = encode_single(Rec(0, NOW - 500, b"a", b"1"))
    with pytest.raises(KeytailError, match="not of format v2"):
        case.prove(tmp_path)
