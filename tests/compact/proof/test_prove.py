from __future__ import annotations

import gzip
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.proof import keys as proof_keys
from keytail.compact.proof import state as proof_state
from keytail.compact.proof.prove import ProofReport, prove
from keytail.compact.proof.state import ProofSpec
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.kernels.proof.key_hash import SECRET_BYTES
from keytail.limits import MAX_RECORD_VARIABLE
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from tests.chance import SEED, draws
from tests.compact.proof.case import SmallWindow
from tests.compact.reference_round import Out, Round, clean, index_bytes, newest_offsets, rebuild
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec, decode_log, encode_batch, with_bytes, with_crc, with_tail
from tests.reference.varints import longer_varint

NOW = 1_700_000_000_000
INTERVAL = 200


class Case:
    """Source segments and their cleaned output, in one directory."""

    def __init__(self, segments: dict[int, bytes], groups: list[list[int]], round_: Round) -> None:
        self.segments = segments
        self.groups = groups
        self.round = round_
        newest = newest_offsets(segments.values(), round_)
        self.out: list[list[Out]] = [
            [o for base in group for o in clean(segments[base], round_, newest)] for group in groups
        ]
        self.files: dict[tuple[int, str], bytes] = {}  # bytes that replace those of `out`
        self.sizes: dict[tuple[int, str], int] = {}
        self.interval = INTERVAL

    def outputs(self) -> dict[tuple[int, str], bytes]:
        files = {}
        for group, out in zip(self.groups, self.out, strict=True):
            data = [o.data for o in out]
            index, time_index = index_bytes(data, group[0], self.interval)
            files[group[0], ".log"] = b"".join(data)
            files[group[0], ".index"] = index
            files[group[0], ".timeindex"] = time_index
        return {**files, **self.files}

    def batches(self) -> list[Out]:
        return [o for group in self.out for o in group]

    def drop(self, out: Out) -> None:
        for group in self.out:
            group[:] = [o for o in group if o is not out]

    def prove(self, directory: Path, memory_bytes: int = 1 << 24) -> ProofReport:
        return prove(LOCAL, self.spec(directory, memory_bytes))

    def spec(self, directory: Path, memory_bytes: int = 1 << 24) -> ProofSpec:
        """Write the files, and return what to prove."""
        directory.mkdir(exist_ok=True)
        for base, data in self.segments.items():
            (directory / f"{base:020d}.log").write_bytes(data)
        facts = [SegmentFacts(b, len(d), 0, 0, 0, None, 0, 0) for b, d in sorted(self.segments.items())]
        by_group: dict[int, list[CleanFile]] = {}
        for (base, suffix), data in self.outputs().items():
            name = f"{base:020d}{suffix}.r.a.clean"
            (directory / name).write_bytes(data)
            size = self.sizes.get((base, suffix), len(data))
            by_group.setdefault(base, []).append(CleanFile(suffix, name, size, ""))
        groups = [GroupOutput(tuple(g), (OutputSegment(g[0], tuple(by_group[g[0]])),)) for g in self.groups]
        return ProofSpec(
            str(directory),
            facts,
            groups,
            first_dirty_offset=self.round.first_dirty,
            end_offset=self.round.end,
            first_uncleanable_offset=self.round.first_uncleanable,
            now_ms=self.round.now_ms,
            delete_retention_ms=self.round.delete_retention_ms,
            index_interval_bytes=self.interval,
            drop_keyless=self.round.drop_keyless,
            memory_bytes=memory_bytes,
            secret=os.urandom(SECRET_BYTES),
        )


def _example(codec: int = 0, timestamp_type: int = 0) -> Case:
    """Return three segments in two groups, with the batches that the mutations below change."""
    fields = {"codec": codec, "timestamp_type": timestamp_type, "leader_epoch": 3}

    def batch(offset: int, *items: tuple[bytes | None, bytes | None], **more) -> bytes:
        headers = ((b"h", b"x" * 3), (b"n", None))
        records = [
            Rec(offset + i, NOW - 500 + offset + i, key, value, headers if i % 2 else ())
            for i, (key, value) in enumerate(items)
        ]
        return encode_batch(records, **{**fields, **more})

    first = (
        batch(0, (b"a", b"1" * 40), (b"b", b"2" * 40), (b"", b"empty key"))
        + batch(3, (b"gone", b"3"), (b"clean-only", b"4"), producer_id=7, producer_epoch=1, base_sequence=5)
        + batch(5, (b"gone", None), (b"late", None), (b"kept", b""), delete_horizon_ms=NOW - 10)
        + batch(8, (b"waiting", None), (b"a", b"5"), delete_horizon_ms=NOW + 10)
    )
    second = (
        batch(10, (b"a", b"6" * 30), (b"k1", b"7"), (b"k2", b"8"), (b"late", b"9"))
        + batch(14, (b"k1", b"whole"), (b"k3", b"whole"))
        + batch(20, (b"a", b"x"), (b"b", b"y"), producer_id=9, producer_epoch=0, base_sequence=0)
        + batch(22, (b"a", b"z"), (b"k2", None))
    )
    third = (
        batch(30, (b"a", b"q"), (b"m", b"r" * 300), (b"a", b"s"))
        + batch(33, (b"z", b"t"))
        + batch(34, (b"z", b"u"), (b"y", b"w"), (b"a", b"beyond"))
        + batch(37, (b"z", b"v"))
    )
    active = batch(40, (b"z", b"last"))
    segments = {0: first, 10: second, 30: third, 40: active}
    return Case(segments, [[0, 10], [30]], Round(10, 35, 40, NOW))


def _rebuilt(case: Case) -> Out:
    """Return an output batch that retained two records or more, and lost some."""
    return next(o for o in case.batches() if 2 <= len(o.records) < o.source.record_count)


def _whole(case: Case) -> Out:
    return next(o for o in case.batches() if len(o.records) == o.source.record_count)


def _holding(case: Case, key: bytes) -> Out:
    return [o for o in case.batches() if any(r.key == key for r in o.records)][-1]


def _again(out: Out, records, horizon="same", **changes) -> None:
    kept = decode_log(out.data)[0].delete_horizon_ms
    out.data = rebuild(out.source, records, kept if horizon == "same" else horizon, **changes)


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("timestamp_type", [0, 1])
def test_a_correct_compaction_passes(tmp_path, codec, timestamp_type):
    case = _example(codec, timestamp_type)
    report = case.prove(tmp_path)
    records = [r for base in (0, 10, 30) for b in decode_log(case.segments[base]) for r in b.records]
    assert report.records_checked == len(records) == 28
    assert report.records_kept == sum(len(o.records) for o in case.batches())
    assert report.batches_checked == 12
    assert report.batches_kept == len(case.batches())
    assert report.keys == len({b"a", b"k1", b"k2", b"late", b"k3", b"b", b"m", b"z"})


def test_a_proof_with_small_windows_and_growing_tables_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_state, "Window", SmallWindow)
    monkeypatch.setattr(proof_keys, "_FIRST_SLOTS", 2)
    monkeypatch.setattr(proof_keys, "_NOTES", 1)
    for codec in (0, 3):
        report = _example(codec).prove(tmp_path)
        assert report == _example(codec).prove(tmp_path)
        assert report.records_checked == 28


def test_keys_that_exceed_the_memory_are_an_error_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_state, "_MIN_MEMORY_BYTES", 0)
    monkeypatch.setattr(proof_keys, "_FIRST_SLOTS", 2)
    keys = _example().prove(tmp_path).keys
    # The largest table uses two thirds of the memory, and one slot is free.
    enough = (keys + 2) * 24 * 3 // 2
    assert _example().prove(tmp_path, memory_bytes=enough).keys == keys
    with pytest.raises(KeytailError, match="memory"):
        _example().prove(tmp_path, memory_bytes=enough - 36)


def _m_drop_batch(c):
    c.drop(_holding(c, b"m"))


def _m_drop_latest_of_a_key(c):
    o = _holding(c, b"m")
    _again(o, [r for r in o.records if r.key != b"m"])


def _m_drop_whole_batch(c):
    c.drop(_holding(c, b"k3"))


def _m_drop_clean_record_not_superseded(c):
    c.drop(_holding(c, b"kept"))  # which holds no other record


def _m_drop_clean_batch_not_superseded(c):
    c.drop(_holding(c, b"clean-only"))


def _m_drop_empty_key(c):
    o = _holding(c, b"")
    _again(o, [r for r in o.records if r.key != b""])


def _m_drop_tombstone_too_early(c):
    o = _holding(c, b"waiting")
    _again(o, [r for r in o.records if r.key != b"waiting"])
    if not decode_log(o.data)[0].records:
        c.drop(o)


def _m_drop_new_tombstone(c):
    o = _holding(c, b"k2")
    _again(o, [r for r in o.records if r.key != b"k2"], horizon=None)
    if len(o.records) == 1:
        c.drop(o)


def _m_drop_record_above_the_end(c):
    o = _holding(c, b"z")
    c.drop(o) if o.source.base_offset != 37 else _again(o, ())


def _m_drop_above_the_end_inside_a_batch(c):
    o = next(o for o in c.batches() if o.source.base_offset == 34)
    _again(o, [r for r in o.records if r.key != b"y"])


def _m_drop_last_batch_of_the_range(c):
    c.drop(next(o for o in c.batches() if o.source.base_offset == 37))


def _m_older_instead_of_latest(c):
    o = _holding(c, b"a")
    older = next(x for x in c.batches() if x.source.base_offset == 0)
    c.drop(o)
    _again(older, older.source.records[:1])


def _m_change_value(c):
    o = _rebuilt(c)
    _again(o, [replace(o.records[0], value=b"other"), *o.records[1:]])


def _m_change_value_bit_of_a_whole_batch(c):
    o = _whole(c)
    _again(o, [replace(o.records[0], value=b"other"), *o.records[1:]])


def _m_change_key(c):
    o = _rebuilt(c)
    _again(o, [replace(o.records[0], key=b"other"), *o.records[1:]])


def _m_value_to_null(c):
    o = _rebuilt(c)
    _again(o, [replace(o.records[0], value=None), *o.records[1:]])


def _m_null_to_empty(c):
    o = _holding(c, b"k2")
    _again(o, [replace(r, value=r.value or b"") for r in o.records])


def _m_change_header_value(c):
    o = next(o for o in c.batches() if any(r.headers for r in o.records))
    _again(o, [replace(r, headers=tuple((k, b"y") for k, _ in r.headers)) for r in o.records])


def _m_drop_a_header(c):
    o = next(o for o in c.batches() if any(r.headers for r in o.records))
    _again(o, [replace(r, headers=r.headers[:1]) for r in o.records])


def _m_change_timestamp(c):
    o = _rebuilt(c)
    if o.source.timestamp_type:
        _again(o, o.records, max_timestamp=o.source.max_timestamp + 1)
    else:
        _again(o, [*o.records[:-1], replace(o.records[-1], timestamp=o.records[-1].timestamp - 1)])


def _m_swap_offsets(c):
    o = _rebuilt(c)
    a, b = o.records[:2]
    _again(o, [replace(b, offset=a.offset), replace(a, offset=b.offset), *o.records[2:]])


def _m_swap_order(c):
    o = _rebuilt(c)
    a, b = o.records[:2]
    _again(o, [b, a, *o.records[2:]])


def _m_duplicate_record(c):
    o = _rebuilt(c)
    _again(o, [o.records[0], *o.records])


def _m_extra_record_at_the_end(c):
    o = _rebuilt(c)
    last = replace(o.records[-1], offset=o.source.last_offset + 1)
    _again(o, [*o.records, last])


def _m_extra_record_in_a_gap(c):
    o = next(o for o in c.batches() if o.source.base_offset == 30)
    removed = o.source.records[0]
    _again(o, [replace(removed, value=b"never written"), *o.records])


def _m_record_count(c):
    o = _rebuilt(c)
    _again(o, o.records, record_count=len(o.records) - 1)


def _m_record_count_more(c):
    o = _rebuilt(c)
    _again(o, o.records, record_count=len(o.records) + 1)


def _m_last_offset(c):
    o = _rebuilt(c)
    _again(o, o.records, last_offset=o.source.last_offset - 1)


def _m_base_offset(c):
    o = _rebuilt(c)
    o.data = with_bytes(o.data, 0, struct.pack(">q", o.source.base_offset + 1))


def _m_leader_epoch(c):
    o = _rebuilt(c)
    _again(o, o.records, leader_epoch=4)


def _m_leader_epoch_of_a_whole_batch(c):
    o = _whole(c)
    o.data = with_bytes(o.data, 12, struct.pack(">i", 77))


def _m_producer_id(c):
    o = _rebuilt(c)
    _again(o, o.records, producer_id=1)


def _m_producer_epoch(c):
    _again(_rebuilt(c), _rebuilt(c).records, producer_epoch=1)


def _m_base_sequence(c):
    _again(_rebuilt(c), _rebuilt(c).records, base_sequence=1)


def _m_codec(c):
    o = _rebuilt(c)
    _again(o, o.records, codec=(o.source.codec + 1) % 5)


def _m_timestamp_type(c):
    o = _rebuilt(c)
    _again(o, o.records, timestamp_type=1 - o.source.timestamp_type)


def _m_transactional(c):
    _again(_rebuilt(c), _rebuilt(c).records, transactional=True)


def _m_control(c):
    _again(_rebuilt(c), _rebuilt(c).records, control=True)


def _m_unused_attribute_bit(c):
    _again(_rebuilt(c), _rebuilt(c).records, extra_attributes=0x100)


def _m_magic(c):
    o = _whole(c)
    o.data = o.data[:16] + b"\x01" + o.data[17:]


def _m_impossible_size(c):
    o = _whole(c)
    o.data = o.data[:8] + b"\xff\xff\xff\xff" + o.data[12:]


def _m_base_timestamp(c):
    o = next(o for o in c.batches() if o.source.base_offset == 30)
    _again(o, o.records, base_timestamp=o.records[0].timestamp - 1)


def _m_max_timestamp(c):
    o = _rebuilt(c)
    _again(o, o.records, max_timestamp=o.source.max_timestamp + 5)


def _m_max_timestamp_too_low(c):
    o = _rebuilt(c)
    _again(o, o.records, max_timestamp=o.source.max_timestamp - 100)


def _m_new_horizon_missing(c):
    o = _holding(c, b"k2")
    _again(o, o.records, horizon=None)


def _m_new_horizon_later(c):
    o = _holding(c, b"k2")
    _again(o, o.records, horizon=NOW + c.round.delete_retention_ms + 1)


def _m_old_horizon_moved(c):
    o = _holding(c, b"kept")
    _again(o, o.records, horizon=NOW + 1000)


def _m_horizon_without_tombstone(c):
    o = next(o for o in c.batches() if o.source.base_offset == 30)
    _again(o, o.records, horizon=NOW + 1000)


def _m_tombstone_copied_without_horizon(c):
    o = _holding(c, b"k2")
    segment = c.segments[10]
    o.data = segment[o.source.position : o.source.position + o.source.size]


def _m_whole_batch_rebuilt(c):
    o = next(o for o in c.batches() if o.source.base_offset == 14 or o.source.base_offset == 3)
    o.data = rebuild(o.source, o.records, None, base_timestamp=o.records[0].timestamp - 1)


def _m_crc(c):
    o = _rebuilt(c)
    o.data = o.data[:-1] + bytes([o.data[-1] ^ 1])


def _m_crc_field(c):
    o = _whole(c)
    o.data = o.data[:20] + bytes([o.data[20] ^ 1]) + o.data[21:]


def _m_crc_field_of_a_rebuilt_batch(c):
    o = _rebuilt(c)
    o.data = o.data[:20] + bytes([o.data[20] ^ 1]) + o.data[21:]


def _m_byte_after_the_records(c):
    o = _rebuilt(c)
    o.data = with_tail(o.data, b"\0")


def _m_duplicate_batch(c):
    o = c.out[0][1]
    c.out[0].insert(2, Out(o.data, o.source, o.records))


def _m_swapped_batches(c):
    c.out[0][0], c.out[0][1] = c.out[0][1], c.out[0][0]


def _m_extra_batch_between(c):
    o = c.out[0][0]
    c.out[1].insert(0, Out(encode_batch([Rec(29, NOW, b"new", b"x")]), o.source, ()))


def _m_extra_batch_in_a_gap(c):
    at = next(i for i, o in enumerate(c.out[0]) if o.source.base_offset == 14)
    c.out[0].insert(at + 1, Out(encode_batch([Rec(17, NOW, b"new", b"x")]), c.out[0][at].source, ()))


def _m_extra_batch_at_the_end(c):
    o = c.out[1][0]
    c.out[1].append(Out(encode_batch([Rec(39, NOW, b"new", b"x")]), o.source, ()))


def _m_batch_in_the_wrong_group(c):
    c.out[0].append(c.out[1].pop(0))


def _m_emptied_batch_with_codec(c):
    o = c.out[1][-1]
    o.data = rebuild(o.source, (), None, extra_attributes=1, codec=0)


def _m_emptied_batch_with_base_timestamp(c):
    o = next(o for o in c.batches() if o.source.base_offset == 30)
    c.drop(o)
    keep = next(x for x in c.batches() if x.source.base_offset == 34)
    c.out[1].insert(c.out[1].index(keep), Out(rebuild(o.source, (), None, base_timestamp=5), o.source, ()))


def _m_emptied_batch_that_held_the_latest(c):
    o = _holding(c, b"m")
    o.data = rebuild(o.source, (), None)


def _m_log_truncated_in_a_batch(c):
    c.files[30, ".log"] = c.outputs()[30, ".log"][:-1]


def _m_log_truncated_in_a_header(c):
    data = c.outputs()[30, ".log"]
    c.files[30, ".log"] = data[: -len(c.out[1][-1].data) + 5]


def _m_log_with_zeros_after(c):
    c.files[30, ".log"] = c.outputs()[30, ".log"] + bytes(70)


def _m_log_empty(c):
    c.files[0, ".log"] = b""


def _m_size_too_small(c):
    c.sizes[30, ".log"] = len(c.outputs()[30, ".log"]) - 1


def _m_size_of_index_wrong(c):
    c.sizes[30, ".index"] = len(c.outputs()[30, ".index"]) + 8


def _m_index_entry_missing(c):
    c.files[0, ".index"] = c.outputs()[0, ".index"][:-8]


def _m_index_entry_doubled(c):
    data = c.outputs()[0, ".index"]
    c.files[0, ".index"] = data + data[-8:]


def _m_index_empty(c):
    c.files[0, ".index"] = b""


def _m_index_untrimmed(c):
    c.files[0, ".index"] = c.outputs()[0, ".index"] + bytes(80)


def _m_index_with_a_part_of_an_entry(c):
    c.files[0, ".index"] = c.outputs()[0, ".index"] + b"\0"


def _m_index_position(c):
    data = c.outputs()[0, ".index"]
    c.files[0, ".index"] = data[:-1] + bytes([data[-1] ^ 1])


def _m_index_offset(c):
    data = c.outputs()[0, ".index"]
    c.files[0, ".index"] = data[:3] + bytes([data[3] ^ 1]) + data[4:]


def _m_index_of_another_interval(c):
    data = [o.data for o in c.out[0]]
    c.files[0, ".index"] = index_bytes(data, 0, 4 * c.interval)[0]


def _m_index_of_another_base(c):
    data = [o.data for o in c.out[1]]
    c.files[30, ".index"], c.files[30, ".timeindex"] = index_bytes(data, 29, INTERVAL)


def _m_time_entry_missing(c):
    c.files[0, ".timeindex"] = c.outputs()[0, ".timeindex"][:-12]


def _m_time_index_empty(c):
    c.files[30, ".timeindex"] = b""


def _m_time_index_untrimmed(c):
    c.files[30, ".timeindex"] = c.outputs()[30, ".timeindex"] + bytes(12)


def _m_time_entry_timestamp(c):
    data = c.outputs()[0, ".timeindex"]
    c.files[0, ".timeindex"] = data[:7] + bytes([data[7] ^ 1]) + data[8:]


def _m_time_entry_offset(c):
    data = c.outputs()[0, ".timeindex"]
    c.files[0, ".timeindex"] = data[:-1] + bytes([data[-1] ^ 1])


MUTATIONS = {name[3:]: f for name, f in sorted(globals().items()) if name.startswith("_m_")}


def test_there_are_as_many_mutations_as_documented():
    assert len(MUTATIONS) == 83


@pytest.fixture(params=[(0, False), (1, False), (4, False), (0, True), (1, True)], ids=lambda p: f"{p[0]}-{p[1]}")
def to_mutate(request, monkeypatch):
    """Return the examples of both timestamp types, for proofs of whole batches or of pieces."""
    codec, in_pieces = request.param
    if in_pieces:
        read_in_pieces(monkeypatch, records=1 + SEED % 3)
    cases = [_example(codec, timestamp_type) for timestamp_type in (0, 1)]
    for case in cases:
        case.interval = 60  # a short interval, so that compressed outputs also have entries
    return cases


def test_the_proof_passes_without_a_mutation(tmp_path, to_mutate):
    for case in to_mutate:
        case.prove(tmp_path)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_with_its_position(tmp_path, name, to_mutate):
    for case in to_mutate:
        before = case.outputs()
        MUTATIONS[name](case)
        assert case.outputs() != before or case.sizes, "the mutation changed nothing"
        with pytest.raises(KeytailError) as caught:
            case.prove(tmp_path)
        error = caught.value
        assert not isinstance(error, CorruptLog | Refused), error
        assert error.path and error.path.startswith(str(tmp_path))
        assert error.remedy
        if not name.startswith("size"):
            assert error.byte_position is not None, error


@pytest.mark.parametrize("name", [f"{30:020d}.log", f"{0:020d}.log.r.a.clean", f"{30:020d}.index.r.a.clean"])
def test_a_file_that_is_longer_than_known_is_an_error(tmp_path, name):
    spec = _example().spec(tmp_path)
    with open(tmp_path / name, "ab") as file:
        file.write(b"\0")
    with pytest.raises(KeytailError, match="bytes instead of") as caught:
        prove(LOCAL, spec)
    assert caught.value.path == f"{tmp_path}/{name}"


def test_a_corrupt_source_is_reported_as_corrupt(tmp_path):
    """The magic is not part of the checksum."""
    for position, new in (
        (25, b"\x01"),
        (16, b"\x01"),
        (16, b"\x03"),
        (16, b"\xff"),
        (8, b"\xff\xff\xff\xff"),
        (8, b"\x7f\xff\xff\xff"),
    ):
        case = _example()
        broken = bytearray(case.segments[10])
        broken[position : position + len(new)] = new
        case.segments[10] = bytes(broken)
        with pytest.raises(CorruptLog) as caught:
            case.prove(tmp_path)
        assert caught.value.path == f"{tmp_path}/{10:020d}.log"
        assert caught.value.byte_position == 0


def test_a_copy_of_a_corrupt_batch_is_reported_as_a_corrupt_source(tmp_path):
    case = Case({0: encode_batch([Rec(0, NOW, b"k", b"x")]), 4: b""}, [[0]], Round(0, 4, 4, NOW))
    case.segments[0] = case.files[0, ".log"] = case.segments[0][:-1] + b"?"
    with pytest.raises(CorruptLog, match="invalid CRC") as caught:
        case.prove(tmp_path)
    assert caught.value.path == f"{tmp_path}/{0:020d}.log"


def test_a_source_truncated_within_a_batch_is_corrupt(tmp_path):
    for cut in (1, 40, 60):
        case = _example()
        case.segments[30] = case.segments[30][:-cut]
        with pytest.raises(CorruptLog, match="cut off"):
            case.prove(tmp_path)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda first, second: second + first, "offsets do not follow"),
        (lambda first, second: first + struct.pack(">q", 1) + second[8:], "offsets do not follow"),
        (lambda first, second: first + struct.pack(">q", (1 << 62) + 1) + second[8:], "offsets do not follow"),
        (lambda first, second: first + with_bytes(second, 23, struct.pack(">i", -1)), "offsets do not follow"),
        (lambda first, second: first + with_bytes(second, 57, struct.pack(">i", -1)), "record count"),
    ],
    ids=["swapped", "overlapping", "far too high", "negative last offset delta", "negative record count"],
)
def test_impossible_batches_of_a_source_are_corrupt(tmp_path, change, match):
    """The output has only the first batch of the source, which is correct."""
    batches = [encode_batch([Rec(i, NOW, b"%d" % i, b"x"), Rec(i + 1, NOW, b"k%d" % i, b"x")]) for i in (0, 2)]
    case = Case({0: b"".join(batches), 4: b""}, [[0]], Round(0, 4, 4, NOW))
    case.prove(tmp_path)
    case.segments[0] = change(*batches)
    case.files[0, ".log"] = case.segments[0][: len(batches[0])]
    with pytest.raises(CorruptLog, match=match):
        case.prove(tmp_path)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (-1, 0)])
def test_a_source_whose_offsets_do_not_ascend_is_corrupt(tmp_path, offsets):
    """Two records have the same offset or are in the wrong order, or one is below the batch's base offset."""
    records = [Rec(offset, NOW, b"%d" % i, b"x") for i, offset in enumerate(offsets)]
    case = Case({0: encode_batch(records, base_offset=0, last_offset=1), 2: b""}, [[0]], Round(2, 2, 2, NOW))
    with pytest.raises(CorruptLog, match="its offset does not follow"):
        case.prove(tmp_path)


IMPOSSIBLE_RECORDS = {
    "size of a key": (lambda batch: with_bytes(batch, 65, b"\x7e"), "a record cannot be parsed"),
    "offset": (lambda batch: encode_batch([Rec(2, NOW, b"b", b"x")], base_offset=1, last_offset=1), "does not follow"),
    "bytes after the records": (lambda batch: with_tail(batch, b"\0"), "record count"),
    "record count": (lambda batch: with_bytes(batch, 57, struct.pack(">i", 2**31 - 1)), "record count"),
}


@pytest.mark.parametrize("change, match", IMPOSSIBLE_RECORDS.values(), ids=IMPOSSIBLE_RECORDS)
@pytest.mark.parametrize("pass_segments", [None, (0, 1)], ids=["in this pass", "in a later pass"])
def test_impossible_records_of_a_source_are_corrupt(tmp_path, change, match, pass_segments):
    segments = {base: encode_batch([Rec(base, NOW, key, b"x")]) for base, key in enumerate((b"a", b"b"))}
    case = Case({**segments, 2: b""}, [[0], [1]], Round(0, 2, 2, NOW))

    def prove_it() -> None:
        spec = case.spec(tmp_path)
        if pass_segments:
            spec = replace(spec, pass_segments=pass_segments, groups=spec.groups[:1])
        prove(LOCAL, spec)

    prove_it()
    case.segments[1] = change(segments[1])
    with pytest.raises(CorruptLog, match=match) as caught:
        prove_it()
    assert (caught.value.path, caught.value.byte_position) == (f"{tmp_path}/{1:020d}.log", 0)


def test_a_missing_record_of_a_source_is_reported_with_the_offset_after_the_last_one(tmp_path):
    record = Rec(0, NOW, b"a", b"x" * 9)
    case = Case({0: encode_batch([record], last_offset=5), 6: b""}, [[0]], Round(0, 6, 6, NOW))
    case.segments[0] = encode_batch([record], last_offset=5, record_count=2)
    with pytest.raises(CorruptLog, match="a record cannot be parsed") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 1


@pytest.mark.parametrize("codec", [0, 1])
def test_records_of_a_source_that_are_too_small_are_reported_in_pieces(tmp_path, monkeypatch, codec):
    read_in_pieces(monkeypatch)
    records = [Rec(i, NOW, b"%d" % i, b"x" * 200) for i in range(4)]
    good = encode_batch(records, codec=codec)
    case = Case({0: good, 4: b""}, [[0]], Round(0, 4, 4, NOW))
    case.segments[0] = with_bytes(with_tail(good, b"\x02\0" * 37), 57, struct.pack(">i", 41))  # records of one byte
    with pytest.raises(CorruptLog, match="record count is not the number of its records") as caught:
        case.prove(tmp_path)
    assert (caught.value.byte_position, caught.value.offset) == (0, 4)


@pytest.mark.parametrize("pass_segments", [None, (0, 1)], ids=["in this pass", "in a later pass"])
def test_compressed_records_without_bytes_are_corrupt(tmp_path, pass_segments):
    segments = {base: encode_batch([Rec(base, NOW, key, b"x")], codec=1) for base, key in enumerate((b"a", b"b"))}
    case = Case({**segments, 2: b""}, [[0], [1]], Round(0, 2, 2, NOW))
    block = gzip.compress(b"")
    case.segments[1] = with_crc(segments[1][:8] + struct.pack(">i", 49 + len(block)) + segments[1][12:61] + block)
    spec = case.spec(tmp_path)
    if pass_segments:
        spec = replace(spec, pass_segments=pass_segments, groups=spec.groups[:1])
    with pytest.raises(CorruptLog, match="record count") as caught:
        prove(LOCAL, spec)
    assert caught.value.path == f"{tmp_path}/{1:020d}.log"


@pytest.mark.parametrize(
    "change, limit, kind, match",
    [
        (lambda batch: with_bytes(batch, len(batch) - 8, bytes(4)), "", CorruptLog, "a batch cannot be decompressed"),
        (bytes, "100", Refused, "a batch is not opened: a record has 210 bytes"),
    ],
    ids=["checksum of the codec", "size of a record"],
)
def test_a_source_that_cannot_be_read_in_pieces_is_reported(tmp_path, monkeypatch, change, limit, kind, match):
    good = encode_batch([Rec(i, NOW, b"%d" % i, b"x" * 200) for i in range(4)], codec=1)
    case = Case({0: good, 4: b""}, [[0]], Round(0, 4, 4, NOW))
    case.segments[0] = change(good)
    read_in_pieces(monkeypatch)
    monkeypatch.setenv(MAX_RECORD_VARIABLE, limit)
    with pytest.raises(kind, match=match) as caught:
        case.prove(tmp_path)
    assert (caught.value.path, caught.value.byte_position) == (f"{tmp_path}/{0:020d}.log", 0)


def test_records_that_grow_are_read_in_pieces(tmp_path, monkeypatch):
    """The first retained record has a far later timestamp than the first two that follow. A piece of these two has 80
    bytes in the source and 88 in the output."""
    early = NOW - 10**9
    times = [early, NOW, early, early, NOW]
    records = [Rec(i, time, b"%d" % (i % 4), b"x" * 32) for i, time in enumerate(times)]
    case = Case({0: encode_batch(records), 5: b""}, [[0]], Round(0, 5, 5, NOW))
    [output] = case.batches()
    assert len(output.records) == 4
    read_in_pieces(monkeypatch, records=2, piece_bytes=100)
    assert case.prove(tmp_path).records_kept == 4


def test_a_batch_from_which_nothing_is_removed_keeps_its_bytes(tmp_path):
    """The rebuilt batch has the same records, but shorter varints."""
    records = [Rec(i, NOW, b"%d" % i, b"x") for i in range(2)]
    batch = encode_batch(records, spell=longer_varint)
    case = Case({0: batch, 2: b""}, [[0]], Round(0, 2, 2, NOW))
    case.prove(tmp_path)
    case.batches()[0].data = encode_batch(records)
    with pytest.raises(KeytailError, match="a batch from which nothing was removed differs"):
        case.prove(tmp_path)


def test_a_delete_horizon_may_be_0(tmp_path):
    first = encode_batch([Rec(0, NOW, b"a", b"1"), Rec(1, NOW, b"b", b"2")], delete_horizon_ms=0)
    case = Case({0: first + encode_batch([Rec(2, NOW, b"a", b"3")]), 3: b""}, [[0]], Round(0, 3, 3, NOW))
    case.prove(tmp_path)
    _again(case.batches()[0], case.batches()[0].records, horizon=None)
    with pytest.raises(KeytailError, match="delete horizon is missing"):
        case.prove(tmp_path)


def test_an_index_entry_is_required_after_more_bytes_than_the_interval(tmp_path):
    case = _example()
    first = case.out[0][0].data
    entries = []
    for interval in (len(first) - 1, len(first)):
        case.interval = interval
        case.prove(tmp_path)
        entries.append(case.outputs()[0, ".index"][:8])
    assert entries[0] != entries[1], "the second batch must have an entry if the first exceeds the interval"


def test_groups_must_cover_the_segments_below_the_end(tmp_path):
    for groups in ([[0, 10]], [[10], [30]], [[0], [30]], [[30], [0, 10]], [[0, 10], [30], [40]]):
        case = _example()
        case.groups = groups
        case.out = [[] for _ in groups]
        with pytest.raises(KeytailError, match="groups cover"):
            case.prove(tmp_path)


@pytest.mark.parametrize(
    "source_bases, bases",
    [
        ([[0, 10], [30]], [[0], []]),
        ([[0, 10], [30]], [[0], [31]]),
        ([[0, 10], [30]], [[0], [29]]),
        ([[0, 10], [30]], [[0, 30], [30]]),
        ([[0, 10], [30]], [[0, 20, 20], [30]]),
        ([[0, 10], [30]], [[0, 20, 15], [30]]),
        ([[0, 10], [30]], [[0], [30, 40]]),
        ([[0, 10], [], [30]], [[0], [20], [30]]),
    ],
)
def test_the_outputs_of_a_group_must_begin_within_it(tmp_path, source_bases, bases):
    spec = _example().spec(tmp_path)
    first, _ = spec.groups
    files = first.segments[0].files
    groups = [
        GroupOutput(tuple(sources), tuple(OutputSegment(base, files) for base in own))
        for sources, own in zip(source_bases, bases, strict=True)
    ]
    with pytest.raises(KeytailError, match=r"has the output segments|has the wrong base offset"):
        prove(LOCAL, replace(spec, groups=groups))


@pytest.mark.parametrize("change", ["without", "twice", "unknown"])
@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex"])
def test_an_output_must_have_the_files_of_a_segment(tmp_path, suffix, change):
    spec = _example().spec(tmp_path)
    first, second = spec.groups
    [output] = second.segments
    [named] = [file for file in output.files if file.suffix == suffix]
    files = {
        "without": tuple(file for file in output.files if file != named),
        "twice": (*output.files, named),
        "unknown": (*output.files, replace(named, suffix=".snapshot")),
    }[change]
    groups = [first, replace(second, segments=(replace(output, files=files),))]
    with pytest.raises(KeytailError, match="the output segment 30 has the files"):
        prove(LOCAL, replace(spec, groups=groups))


def test_keyless_records_are_removed_only_if_allowed(tmp_path):
    segments = {0: encode_batch([Rec(0, NOW, None, b"x"), Rec(1, NOW, b"k", b"y")]), 2: b""}
    case = Case(segments, [[0]], Round(0, 2, 2, NOW))
    with pytest.raises(KeytailError, match="without a key"):
        case.prove(tmp_path)
    removed = case.batches()[0].data
    case.batches()[0].data = segments[0]
    case.prove(tmp_path)
    case.batches()[0].data = removed
    case.round = replace(case.round, drop_keyless=True)
    case.prove(tmp_path)


def test_a_tombstone_is_not_removed_before_the_records_that_it_deletes(tmp_path):
    batches = [
        encode_batch([Rec(0, NOW, b"k", b"old"), Rec(1, NOW, b"j", b"x")]),
        encode_batch([Rec(2, NOW, b"k", None), Rec(3, NOW, b"i", b"x")], delete_horizon_ms=NOW - 1),
    ]
    case = Case({0: b"".join(batches), 4: b""}, [[0]], Round(0, 4, 4, NOW))
    case.prove(tmp_path)
    o = case.out[0][0]
    o.data = batches[0]
    with pytest.raises(KeytailError, match="before an older record") as caught:
        case.prove(tmp_path)
    assert (caught.value.offset, caught.value.byte_position) == (2, len(batches[0]))
    assert "Run again with --from-log-start" in caught.value.remedy


@pytest.mark.parametrize("codec", [0, 1])
@pytest.mark.parametrize("of_key", [b"c", None])
def test_a_change_of_a_timestamp_or_of_the_last_byte_of_any_part_is_found(tmp_path, codec, of_key):
    keys = (b"a", b"b", of_key, b"d", b"a")
    first = encode_batch([Rec(i, NOW - 500 + i, key, b"value") for i, key in enumerate(keys)], codec=codec)
    segments = {0: first, 10: encode_batch([Rec(10, NOW, b"z", b"last")])}
    end = 10 if of_key else 2  # records without a key are retained only above the end offset
    for part, spoil in (
        ("timestamp", lambda timestamp: timestamp + 1),
        ("timestamp", lambda timestamp: timestamp - 1),
        ("value", lambda value: value[:-1] + b"?"),
        ("key", lambda key: key[:-1] + b"?" if key else b""),
    ):
        case = Case(segments, [[0]], Round(0, end, 10, NOW))
        [o] = case.batches()
        # neither the first record nor that with the latest timestamp, on which headers depend
        i = [record.key for record in o.records].index(of_key)
        spoiled = replace(o.records[i], **{part: spoil(getattr(o.records[i], part))})
        _again(o, [*o.records[:i], spoiled, *o.records[i + 1 :]])
        with pytest.raises(KeytailError, match="a record's timestamp, key, value or headers differ"):
            case.prove(tmp_path)


def test_only_the_batch_that_ends_the_cleaned_range_must_be_retained_without_records(tmp_path):
    tombstone = encode_batch([Rec(1, NOW, b"a", None)], delete_horizon_ms=NOW - 1)
    first = encode_batch([Rec(0, NOW, b"a", b"1")]) + tombstone
    case = Case({0: first, 2: b""}, [[0]], Round(0, 2, 2, NOW))
    case.prove(tmp_path)
    [last] = case.batches()
    assert not last.records
    case.drop(last)
    with pytest.raises(KeytailError, match="the batch that ends the cleaned range"):
        case.prove(tmp_path)
    emptied = rebuild(decode_log(tombstone)[0], (), None)  # above the range, this batch may be removed
    case = Case({0: encode_batch([Rec(0, NOW, b"a", b"1")]) + emptied, 2: b""}, [[0]], Round(0, 1, 1, NOW))
    assert len(case.batches()) == 1
    case.prove(tmp_path)


@pytest.mark.parametrize(
    "horizon, changes, what",
    [
        (None, {"codec": 1}, "an emptied batch is not just the source's header"),
        (None, {"base_timestamp": 5}, "an emptied batch is not just the source's header"),
        (None, {"max_timestamp": NOW + 1}, "an emptied batch is not just the source's header"),
        (None, {"record_count": -1}, "a batch's record count is not the number of its records"),
        (NOW, {}, "an emptied batch is not just the source's header"),
    ],
)
def test_the_fields_of_a_batch_without_records_are_checked(tmp_path, horizon, changes, what):
    tombstone = encode_batch([Rec(1, NOW, b"a", None)], delete_horizon_ms=NOW - 1)
    first = encode_batch([Rec(0, NOW, b"a", b"1")]) + tombstone
    case = Case({0: first, 2: b""}, [[0]], Round(0, 2, 2, NOW))
    [last] = case.batches()
    _again(last, (), horizon, **changes)
    with pytest.raises(KeytailError, match=what):
        case.prove(tmp_path)


@pytest.mark.parametrize("distance", [2**31 - 1, 2**31])
def test_the_offsets_of_an_output_are_at_most_an_int32_above_its_base(tmp_path, distance):
    """The first record has the latest timestamp, so that no index entry has the distance."""
    segments = {0: encode_batch([Rec(0, NOW, b"a", b"1")]), 10: encode_batch([Rec(distance, NOW - 1, b"b", b"2")])}
    case = Case({**segments, 2**33: b""}, [[0, 10]], Round(0, 2**33, 2**33, NOW))
    if distance < 2**31:
        case.prove(tmp_path)
    else:
        with pytest.raises(KeytailError, match="offsets are outside its segment"):
            case.prove(tmp_path)


def test_the_position_of_a_lost_record_is_reported(tmp_path):
    case = _example()
    _m_drop_latest_of_a_key(case)
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    error = caught.value
    assert (error.path, error.byte_position, error.offset) == (f"{tmp_path}/{30:020d}.log", 0, 31)


def test_a_record_of_an_output_that_cannot_be_parsed_is_found(tmp_path):
    case = _example()
    o = _rebuilt(case)
    o.data = with_bytes(o.data, 61, b"\x01")  # the size of the record: -1
    with pytest.raises(KeytailError, match="a record cannot be parsed") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == o.source.base_offset


@pytest.mark.parametrize("offset", [1, 5])
def test_an_extra_record_between_records_of_the_source_or_above_them_is_found(tmp_path, offset):
    """The last record of the source is removed, so that no other record is missing."""
    records = [Rec(0, NOW, b"a", b"1"), Rec(2, NOW, b"b", b"2"), Rec(4, NOW, b"c", b"3")]
    log = encode_batch(records, last_offset=6) + encode_batch([Rec(7, NOW, b"c", b"4")])
    case = Case({0: log, 8: b""}, [[0]], Round(0, 8, 8, NOW))
    o = case.batches()[0]
    assert len(o.records) == 2
    _again(o, sorted([*o.records, Rec(offset, NOW, b"new", b"x")], key=lambda record: record.offset))
    with pytest.raises(KeytailError, match="has a record that the source's does not have") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == offset


@pytest.mark.parametrize(
    "mutate, what",
    [
        (_m_log_truncated_in_a_batch, "a batch is cut off by the end of the file"),
        (_m_impossible_size, "a batch has an impossible size"),
        (_m_extra_batch_in_a_gap, "no batch of the source has this base offset at this place"),
    ],
)
def test_errors_are_named_where_they_begin(tmp_path, mutate, what):
    case = _example()
    mutate(case)
    with pytest.raises(KeytailError, match=what):
        case.prove(tmp_path)


def test_the_offset_of_an_extra_record_is_reported(tmp_path):
    case = _example()
    _m_extra_record_at_the_end(case)
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    assert caught.value.offset == _rebuilt(case).source.last_offset + 1


# Random logs

_keys = st.one_of(st.sampled_from([b"", b"a", b"b", b"c", b"d" * 130]), st.none())
_values = st.one_of(st.none(), st.binary(max_size=30))
_headers = st.lists(st.tuples(st.binary(max_size=4), st.one_of(st.none(), st.binary(max_size=4))), max_size=2)
_record = st.tuples(_keys, _values, _headers, st.integers(-400, 400), st.integers(1, 3))


@st.composite
def _cases(draw) -> Case:
    offset = draw(st.integers(0, 100))
    segments: dict[int, bytes] = {}
    for _ in range(draw(st.integers(1, 4))):
        base = offset
        data = b""
        for _ in range(draw(st.integers(0, 4))):
            records = []
            start = offset
            for key, value, headers, time, gap in draw(st.lists(_record, min_size=1, max_size=6)):
                records.append(Rec(offset, max(-1, NOW + time), key, value, tuple(headers)))
                offset += gap
            data += encode_batch(
                records,
                base_offset=start,
                last_offset=offset - 1,
                codec=draw(st.integers(0, 4)),
                timestamp_type=draw(st.integers(0, 1)),
                delete_horizon_ms=draw(st.sampled_from([None, None, NOW - 1, NOW, NOW + 1])),
            )
        if base not in segments and (data or not segments or base > max(segments)):
            segments[base] = data
            offset = max(offset, base + 1)
    segments[offset] = b""
    first = min(segments)
    dirty = draw(st.integers(first, offset))
    end = draw(st.integers(dirty, offset))
    bases = [b for b in sorted(segments) if b < end]
    groups: list[list[int]] = []
    for b in bases:
        if not groups or draw(st.booleans()):
            groups.append([])
        groups[-1].append(b)
    return Case(segments, groups, Round(dirty, end, offset, NOW, drop_keyless=True))


@settings(deadline=None, max_examples=draws(150))
@given(_cases())
def test_random_correct_compactions_pass(tmp_path_factory, case):
    report = case.prove(tmp_path_factory.mktemp("p"))
    assert report.records_kept == sum(len(o.records) for o in case.batches())


@settings(deadline=None, max_examples=draws(150))
@given(_cases(), st.data())
def test_a_random_flipped_bit_is_found(tmp_path_factory, case, data):
    files = case.outputs()
    names = sorted(k for k, v in files.items() if v)
    if not names:
        return
    where = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(files[where]) - 1))
    flipped = bytearray(files[where])
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    case.files[where] = bytes(flipped)
    with pytest.raises(KeytailError):
        case.prove(tmp_path_factory.mktemp("p"))


@settings(deadline=None, max_examples=draws(150))
@given(_cases(), st.data())
def test_a_random_flipped_bit_under_a_valid_checksum_is_found(tmp_path_factory, case, data):
    plain = [o for o in case.batches() if o.source.codec == 0 or not o.records]
    if not plain:
        return
    o = data.draw(st.sampled_from(plain))
    at = data.draw(st.integers(21, len(o.data) - 1))
    flipped = bytearray(o.data)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    o.data = with_crc(bytes(flipped))
    with pytest.raises(KeytailError):
        case.prove(tmp_path_factory.mktemp("p"))


@settings(deadline=None, max_examples=draws(150))
@given(_cases(), st.data())
def test_a_missing_record_is_found(tmp_path_factory, case, data):
    holding = [o for o in case.batches() if o.records]
    if not holding:
        return
    o = data.draw(st.sampled_from(holding))
    removed = data.draw(st.sampled_from(o.records))
    dirty = range(case.round.first_dirty, case.round.end)
    deleted = any(
        r.key == removed.key and r.value is None and r.offset > removed.offset and r.offset in dirty
        for segment in case.segments.values()
        for b in decode_log(segment)
        for r in b.records
        if b.delete_horizon_ms is not None and b.delete_horizon_ms <= NOW
    )
    if removed.offset < case.round.end and (removed.key is None or deleted):
        return  # the record may be missing: it has no key, or an expired tombstone deleted it
    rest = tuple(r for r in o.records if r is not removed)
    kept = decode_log(o.data)[0]
    nulls = any(r.value is None for r in rest)
    horizon = kept.delete_horizon_ms if o.source.delete_horizon_ms is not None or nulls else None
    if rest:
        o.data = rebuild(o.source, rest, horizon)
    else:
        case.drop(o)
    with pytest.raises(KeytailError):
        case.prove(tmp_path_factory.mktemp("p"))
