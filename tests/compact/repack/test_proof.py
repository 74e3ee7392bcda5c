"""The proof of a repack: it passes for every correct output, and reports the position of each violation."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.proof import markers as proof_markers
from keytail.compact.proof import output as proof_output
from keytail.compact.proof import state as proof_state
from keytail.compact.repack import proof as repack_proof
from keytail.compact.repack.proof import RepackReport, RepackSpec, prove_repack
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from tests.chance import SEED, draws
from tests.compact.proof.case import SmallWindow
from tests.compact.repack.cases import NOW, OF_PRODUCERS, expected, forgetting, rules, segments
from tests.reference.batches import Batch, Rec, encode_batch, encode_marker, with_bytes, with_crc, with_tail
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log, encode_wrapper
from tests.reference.repack import Rules

INTERVAL = 100


@dataclass
class Case:
    """A segment at offset `base`, which ends below `end`, and its repacked output as a list of batches."""

    source: bytes
    rules: Rules
    base: int = 0
    end: int = 100
    txn_index: bytes = b""
    producer_ids: tuple[int, ...] = ()
    expired_before_ms: int = NOW + 10**7
    end_offset: int = 2**62
    active: bytes = b""
    out: list[bytes] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # replace the files that follow from `out`

    def __post_init__(self) -> None:
        made = expected(self.source, self.rules)
        self.out = [made[batch.position : batch.position + batch.size] for batch in decode_any_log(made)]

    def batch(self, number: int) -> Batch:
        return decode_any_log(self.out[number])[0]

    def position(self, number: int) -> int:
        return sum(map(len, self.out[:number]))

    def rebuild(self, number: int, records: list[Rec] | None = None, **more) -> None:
        """Encode an output batch again, with other records or fields."""
        batch = self.batch(number)
        fields = {
            "base_offset": batch.base_offset, "last_offset": batch.last_offset, "codec": batch.codec,
            "timestamp_type": batch.timestamp_type, "leader_epoch": batch.leader_epoch,
            "producer_id": batch.producer_id, "producer_epoch": batch.producer_epoch,
            "base_sequence": batch.base_sequence, "transactional": batch.transactional,
            "delete_horizon_ms": batch.delete_horizon_ms,
            "max_timestamp": batch.max_timestamp if batch.timestamp_type else None,
        }  # fmt: skip
        self.out[number] = encode_batch(list(batch.records) if records is None else records, **{**fields, **more})

    def outputs(self) -> dict[str, bytes]:
        log = b"".join(self.out)
        index, time_index = index_files(log, self.base, INTERVAL)
        files = {".log": log, ".index": index, ".timeindex": time_index}
        if self.txn_index:
            files[".txnindex"] = self.txn_index
        return {**files, **self.files}

    def prove(self, directory: Path) -> RepackReport:
        return prove_repack(LOCAL, self.spec(directory))

    def spec(self, directory: Path) -> RepackSpec:
        """Write the files, and return what to prove."""
        directory.mkdir(exist_ok=True)
        for base, data in ((self.base, self.source), (self.end, self.active)):
            (directory / f"{base:020d}.log").write_bytes(data)
        if self.txn_index:
            (directory / f"{self.base:020d}.txnindex").write_bytes(self.txn_index)
        facts = [
            SegmentFacts(self.base, len(self.source), 0, 0, 0, len(self.txn_index) or None, 0, 0),
            SegmentFacts(self.end, len(self.active), 0, 0, 0, None, 0, 0),
        ]
        made = []
        for suffix, data in self.outputs().items():
            name = f"{self.base:020d}{suffix}.r.a.clean"
            (directory / name).write_bytes(data)
            made.append(CleanFile(suffix, name, len(data), ""))
        limit = min(self.rules.batch_bytes, self.rules.max_message_bytes - 61)
        return RepackSpec(
            str(directory),
            facts,
            [GroupOutput((self.base,), (OutputSegment(self.base, tuple(made)),))],
            log_end_offset=self.end + 50,
            max_block_bytes=limit if self.rules.batch_bytes else -1,
            max_batch_bytes=self.rules.max_message_bytes,
            codec=self.rules.codec,
            producer_ids=np.array(self.producer_ids, np.int64),
            index_interval_bytes=INTERVAL,
            segment_index_bytes=10**6,
            scratch_path=str(directory),
            forgotten_ids=np.array(sorted(self.rules.forgotten), np.int64),
            expired_before_ms=self.expired_before_ms,
            end_offset=self.end_offset,
        )


def example(**more) -> Case:
    """Return a segment whose output has these batches: 0: offsets 0 to 5 of three batches; 1: a marker; 2: a batch of a
    producer with another codec; 3: tombstones with a horizon, of two batches; 4: an append time, of two batches; 5: a
    batch that is not merged; 6: an emptied batch.
    """
    fields = {"leader_epoch": 3}
    times = {**fields, "timestamp_type": 1, "max_timestamp": NOW + 7}
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 1}
    headers = ((b"h", b"x"), (b"n", None))
    parts = [
        encode_batch([Rec(0, NOW, b"a", b"1" * 30), Rec(2, NOW - 5, None, b"", headers)], **fields),
        encode_batch([Rec(3, NOW + 9, b"b", None)], **fields),
        encode_batch([Rec(4, NOW + 1, b"a", b"2" * 30, headers), Rec(5, NOW, b"c", b"3")], **fields),
        encode_marker(6, NOW, commit=True, producer_id=7, producer_epoch=0, leader_epoch=3),
        encode_batch([Rec(7, NOW, b"p", b"4" * 50)], codec=1, **producer, **fields),
        encode_batch([Rec(8, NOW, b"t", None)], delete_horizon_ms=NOW + 50, **fields),
        encode_batch([Rec(9, NOW + 2, b"u", None)], delete_horizon_ms=NOW + 50, **fields),
        encode_batch([Rec(10, NOW + 7, b"x", b"5")], **times),
        encode_batch([Rec(11, NOW + 7, b"y", b"6")], **times),
        encode_batch([Rec(12, NOW, b"z", b"7" * 20)], last_offset=14, leader_epoch=4),
        encode_batch([], base_offset=15, last_offset=16, max_timestamp=NOW, leader_epoch=4),
    ]
    return Case(b"".join(parts), **{"rules": Rules(10**4, 10**5, codec=0), **more})


@pytest.fixture(params=["windows of 2 MiB", "windows below a batch"])
def windows(request, monkeypatch):
    if request.param != "windows of 2 MiB":
        monkeypatch.setattr(proof_state, "Window", SmallWindow)
        monkeypatch.setattr(proof_state, "_BLOCK_BYTES", 40)


@pytest.mark.parametrize("codec", [None, 0, 1, 2, 3, 4])
def test_the_proof_passes_without_a_mutation(tmp_path, windows, codec):
    case = example(rules=Rules(10**4, 10**5, codec=codec))
    report = case.prove(tmp_path)
    assert (report.source_batches, report.output_batches) == (11, len(case.out))
    assert len(case.out) == 7


@settings(deadline=None, max_examples=draws(300))
@given(segments(), rules())
def test_every_correct_output_passes(tmp_path_factory, log, rules):
    batches = decode_any_log(log)
    if batches:
        case = Case(log, rules, base=batches[0].base_offset, end=batches[-1].last_offset + 1)
        report = case.prove(tmp_path_factory.mktemp("p"))
        assert report.output_batches == len(case.out)


@settings(deadline=None, max_examples=draws(300))
@given(segments(OF_PRODUCERS), rules(), st.sets(st.integers(0, 1)))
def test_every_correct_output_without_forgotten_producers_passes(tmp_path_factory, log, rules, ids):
    batches = decode_any_log(log)
    if batches:
        rules = forgetting(log, rules, ids)
        case = Case(log, rules, base=batches[0].base_offset, end=batches[-1].last_offset + 1)
        report = case.prove(tmp_path_factory.mktemp("p"))
        assert report.output_batches == len(case.out)


@pytest.mark.parametrize("case", range(draws(200)))
def test_a_flipped_bit_is_found(tmp_path, case):
    rng = random.Random(SEED * 1000 + case)
    changed = example()
    files = changed.outputs()
    suffix = rng.choice([name for name, data in files.items() if data])
    data = bytearray(files[suffix])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    changed.files[suffix] = bytes(data)
    with pytest.raises(KeytailError):
        changed.prove(tmp_path)


@pytest.mark.parametrize("case", range(draws(200)))
def test_a_flipped_bit_under_a_valid_checksum_is_found(tmp_path, case):
    rng = random.Random(SEED * 1000 + case)
    changed = example()
    number = rng.randrange(len(changed.out))
    data = bytearray(changed.out[number])
    data[rng.randrange(21, len(data))] ^= 1 << rng.randrange(8)
    changed.out[number] = with_crc(bytes(data))
    changed.files = {suffix: data for suffix, data in example().outputs().items() if suffix != ".log"}
    with pytest.raises(KeytailError):
        changed.prove(tmp_path)


# Mutations.


def _lose_record(case: Case) -> None:
    case.rebuild(0, [record for record in case.batch(0).records if record.offset != 4])


def _lose_last_record(case: Case) -> None:
    case.rebuild(0, list(case.batch(0).records[:-1]))


def _lose_batch(case: Case) -> None:
    del case.out[3]


def _lose_all_from(case: Case) -> None:
    del case.out[5:]


def _add_record(case: Case) -> None:
    records = list(case.batch(0).records)
    case.rebuild(0, [*records[:1], Rec(1, NOW, b"new", b""), *records[1:]])


def _add_last_record(case: Case) -> None:
    case.rebuild(0, [*case.batch(0).records[:-1], Rec(5, NOW, b"c", b"3"), Rec(5, NOW, b"c", b"3")])


def _change(**fields) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        records = list(case.batch(0).records)
        at = next(i for i, record in enumerate(records) if record.offset == 4)
        records[at] = Rec(**{**vars(records[at]), **fields})
        case.rebuild(0, records)

    return change


def _fields(number: int, **fields) -> Callable[[Case], None]:
    return lambda case: case.rebuild(number, **fields)


def _patched(number: int, at: int, new: bytes) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.out[number] = with_bytes(case.out[number], at, new)

    return change


def _merge_over_marker(case: Case) -> None:
    case.rebuild(0, [*case.batch(0).records, *case.batch(2).records], last_offset=7)
    del case.out[1:3]


def _merge(number: int) -> Callable[[Case], None]:
    """Merge an output batch with the next one, whose headers differ."""

    def change(case: Case) -> None:
        first, second = case.batch(number), case.batch(number + 1)
        case.rebuild(number, [*first.records, *second.records], last_offset=second.last_offset)
        del case.out[number + 1]

    return change


def _split(case: Case) -> None:
    records = list(case.batch(0).records)
    rest = encode_batch(records[-1:], leader_epoch=3)
    case.rebuild(0, records[:-1], last_offset=4)
    case.out.insert(1, rest)


def _rebuild_alone(case: Case) -> None:
    """Encode the batch with another base timestamp: the bytes differ, but the record is the same."""
    case.rebuild(5, base_timestamp=NOW - 1)


def _change_marker(case: Case) -> None:
    case.out[1] = encode_marker(6, NOW, commit=False, producer_id=7, producer_epoch=0, leader_epoch=3)


def _wrong_crc(case: Case) -> None:
    case.out[0] = case.out[0][:17] + bytes([case.out[0][17] ^ 1]) + case.out[0][18:]


def _cut(case: Case) -> None:
    case.files[".log"] = b"".join(case.out)[:-1]


def _add_a_byte(case: Case) -> None:
    case.out[0] = with_tail(case.out[0], b"\0")


def _attributes_in_record(case: Case) -> None:
    case.out[0] = with_bytes(case.out[0], 62, b"\x01")


def _other_order(case: Case) -> None:
    case.out[3], case.out[4] = case.out[4], case.out[3]


def _twice(case: Case) -> None:
    case.out.insert(6, case.out[5])


# Name, change, text of the error, number of the output batch (None: in the source), offset.
MUTATIONS: list[tuple[Callable[[Case], None], str, int | None, int | None]] = [
    (_lose_record, "a record is not in the output", None, 4),
    (_lose_last_record, "a record is not in the output", None, 5),
    (_lose_batch, "has this base offset at this place", 3, 10),
    (_lose_all_from, "a batch is not in the output", None, 12),
    (_add_record, "has a record that the source's does not have", 0, 1),
    (_add_last_record, "has a record that the source's does not have", 0, 0),
    (_change(key=b"b"), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(key=None), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(value=b"2" * 29 + b"x"), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(value=None), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(timestamp=NOW + 2), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(headers=()), "a record's timestamp, key, value or headers differ", 0, 4),
    (_change(headers=((b"h", b"x"), (b"n", b""))), "a record's timestamp, key, value or headers differ", 0, 4),
    (_attributes_in_record, "a record cannot be parsed", 0, 0),
    (_fields(0, leader_epoch=4), "leader epoch differs", 0, 0),
    (_fields(0, producer_id=7), "producer id, epoch or sequence differs", 0, 0),
    (_fields(0, producer_epoch=0), "producer id, epoch or sequence differs", 0, 0),
    (_fields(0, base_sequence=0), "producer id, epoch or sequence differs", 0, 0),
    (_fields(2, producer_id=-1, producer_epoch=-1, base_sequence=-1), "producer id, epoch or sequence", 2, 7),
    (_fields(0, codec=3), "codec differs", 0, 0),
    (_fields(0, transactional=True), "attributes differ", 0, 0),
    (_fields(0, extra_attributes=0x80), "attributes differ", 0, 0),
    (_fields(0, timestamp_type=1, max_timestamp=NOW + 9), "attributes differ", 0, 0),
    (_fields(0, delete_horizon_ms=NOW), "attributes differ", 0, 0),
    (_fields(3, delete_horizon_ms=None), "attributes differ", 3, 8),
    (_fields(3, delete_horizon_ms=NOW + 51), "delete horizon is missing or should not be there", 3, 8),
    (_fields(0, base_timestamp=NOW - 1), "base timestamp is wrong", 0, 0),
    (_fields(0, max_timestamp=NOW + 10), "max timestamp is wrong", 0, 0),
    (_fields(4, max_timestamp=NOW + 8), "max timestamp is wrong", 4, 10),
    (_fields(0, last_offset=4), "last offset differs", 0, 4),
    (_fields(6, last_offset=17), "a batch differs from its source batch, which must not be changed", 6, 15),
    (_fields(0, record_count=4), "a record is not in the output", None, 5),
    (_fields(0, record_count=6), "has a record that the source's does not have", 0, 0),
    (_add_a_byte, "a batch's record count is not the number of its records", 0, 0),
    (_patched(0, 57, struct.pack(">i", -1)), "a record is not in the output", None, 0),
    (_patched(0, 16, b"\x01"), "a batch is not of format v2", 0, 0),
    (_merge_over_marker, "a batch differs from its source batch, which must not be changed", 0, 6),
    (_merge(2), "producer id, epoch or sequence differs", 2, 7),
    (_merge(3), "attributes differ", 3, 10),
    (_merge(4), "attributes differ", 4, 12),
    (_split, "last offset differs", 0, 4),
    (_rebuild_alone, "a batch from which nothing was removed differs", 5, 12),
    (_change_marker, "a batch differs from its source batch, which must not be changed", 1, 6),
    (_wrong_crc, "invalid CRC", 0, 0),
    (_cut, "cut off by the end of the file", 6, None),
    (_other_order, "has this base offset at this place", 3, 10),
    (_twice, "do not follow those of the previous batch", 6, 12),
]


@pytest.mark.parametrize(("mutate", "text", "number", "offset"), MUTATIONS)
def test_a_violation_is_found_with_its_position(tmp_path, windows, mutate, text, number, offset):
    case = example()
    before = list(case.out)
    mutate(case)
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    problem = caught.value
    assert text in str(problem.what)
    assert problem.offset == offset
    if number is None:
        assert problem.path == str(tmp_path / f"{0:020d}.log")
        assert problem.byte_position == next(
            b.position for b in decode_any_log(case.source) if b.base_offset <= offset <= b.last_offset
        )
    else:
        assert problem.path == str(tmp_path / f"{0:020d}.log.r.a.clean")
        at = case.position(number) if ".log" not in case.files else sum(map(len, before[:number]))
        assert problem.byte_position == at


@pytest.mark.parametrize(
    ("suffix", "change", "text"),
    [
        (".index", lambda data: data[:-8], "an offset index entry is missing"),
        (".index", lambda data: data + data[-8:], "more bytes than the entries of its segment need"),
        (".index", lambda data: data[:3] + bytes([data[3] ^ 1]) + data[4:], "offset index entry does not match"),
        (".timeindex", lambda data: data[:-12], "a time index entry is missing"),
        (".timeindex", lambda data: data + data[-12:], "more bytes than the entries of its segment need"),
        (".timeindex", lambda data: data[:7] + bytes([data[7] ^ 1]) + data[8:], "time index entry does not match"),
        (".txnindex", lambda data: data[:-1], "transaction indexes of the outputs differ"),
        (".txnindex", lambda data: b"", "transaction indexes of the outputs differ"),
    ],
)
def test_a_wrong_index_is_found(tmp_path, suffix, change, text):
    case = example(txn_index=struct.pack(">hqqqq", 0, 7, 1, 6, 7))
    case.prove(tmp_path)
    case.files[suffix] = change(case.outputs()[suffix])
    with pytest.raises(KeytailError, match=text):
        case.prove(tmp_path)


def test_a_transaction_index_that_grew_after_the_plan_is_found(tmp_path):
    spec = example(txn_index=struct.pack(">hqqqq", 0, 7, 1, 6, 7)).spec(tmp_path)
    with open(tmp_path / f"{0:020d}.txnindex", "ab") as file:
        file.write(b"\0")
    with pytest.raises(KeytailError, match="the file has 35 bytes; it had 34 bytes when the run was planned"):
        prove_repack(LOCAL, spec)


@pytest.mark.parametrize("sources", [(), (0, 100), (5,)])
def test_a_group_has_one_source_segment(tmp_path, sources):
    spec = example().spec(tmp_path)
    [group] = spec.groups
    with pytest.raises(KeytailError, match="a group does not have exactly one source segment"):
        prove_repack(LOCAL, replace(spec, groups=[replace(group, source_bases=sources)]))


@pytest.mark.parametrize(("base", "text"), [(50, "has no batches: 50"), (150, "has the wrong base offset 150")])
def test_an_output_above_all_batches_of_the_source_is_found(tmp_path, base, text):
    """The source is the last segment of a log that ends at offset 150."""
    spec = example().spec(tmp_path)
    [group] = spec.groups
    [output] = group.segments
    group = replace(group, segments=(output, replace(output, base_offset=base)))
    with pytest.raises(KeytailError, match=text):
        prove_repack(LOCAL, replace(spec, segments=spec.segments[:1], groups=[group]))


def test_a_source_batch_above_the_base_offset_of_the_next_segment_is_reported_as_damage(tmp_path):
    case = example(end=12)
    del case.out[5:]
    with pytest.raises(CorruptLog, match="offsets do not follow") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 12


def test_a_last_offset_above_all_batches_of_the_source_is_found(tmp_path):
    case = Case(b"".join(encode_batch([Rec(offset, NOW, b"k", b"v")]) for offset in range(2)), Rules(10**4, 10**5))
    [_] = case.out
    case.rebuild(0, last_offset=5)
    with pytest.raises(KeytailError, match="last offset differs"):
        case.prove(tmp_path)


@pytest.mark.parametrize(
    ("codec", "text", "number"),
    [(0, "which must not be changed", 2), (1, "a batch is larger than allowed", 0)],
    ids=["source", "output"],
)
def test_a_batch_that_is_too_large_when_decompressed_is_not_rebuilt(tmp_path, monkeypatch, codec, text, number):
    case = example(rules=Rules(10**4, 10**5, codec=codec))
    case.prove(tmp_path / "small")
    monkeypatch.setattr(proof_output, "WHOLE_BLOCK_BYTES", 40)
    monkeypatch.setattr(proof_state, "_BLOCK_BYTES", 40)
    with pytest.raises(KeytailError, match=text) as caught:
        case.prove(tmp_path / "large")
    assert caught.value.byte_position == case.position(number)


def test_a_merge_that_was_not_requested_is_found(tmp_path):
    case = example(rules=Rules(10**4, 10**5))
    case.rules = Rules(0, 10**5)
    with pytest.raises(KeytailError, match="although merging is disabled"):
        case.prove(tmp_path)


@pytest.mark.parametrize("limits", [(100, 10**5), (10**4, 150)])
def test_a_batch_above_a_limit_is_found(tmp_path, limits):
    case = example()
    case.rules = Rules(*limits, codec=0)
    with pytest.raises(KeytailError, match="a batch is larger than allowed") as caught:
        case.prove(tmp_path)
    assert (caught.value.byte_position, caught.value.offset) == (0, 0)


def test_a_batch_that_has_another_codec_and_is_above_the_limit_is_found(tmp_path):
    case = Case(encode_batch([Rec(0, NOW, b"k", b"v" * 500)], codec=4), Rules(10**4, 10**5, codec=0))
    assert case.batch(0).codec == 0
    case.prove(tmp_path)
    case.rules = Rules(10**4, 300, codec=0)
    with pytest.raises(KeytailError, match="a batch is larger than allowed"):
        case.prove(tmp_path)


def test_two_batches_above_the_limit_of_a_merged_batch_are_found(tmp_path):
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v" * 60)]) for offset in range(2)]
    case = Case(b"".join(batches), Rules(10**4, 10**5))
    assert len(case.out) == 1
    case.rules = Rules(100, 10**5)
    with pytest.raises(KeytailError, match="a batch is larger than allowed"):
        case.prove(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}, {"transactional": True}],
    ids=["producer", "transactional without a producer"],
)
def test_a_batch_of_a_producer_or_transaction_is_not_merged(tmp_path, fields):
    """A batch of a producer is not even merged with another batch of the same producer."""
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v" * 9)], **fields) for offset in range(2)]
    case = Case(b"".join(batches), Rules(10**4, 10**5))
    case.rebuild(0, [record for number in (0, 1) for record in case.batch(number).records], last_offset=1)
    del case.out[1]
    with pytest.raises(KeytailError, match="producer id, epoch or sequence"):
        case.prove(tmp_path)


def forgetful(*, commit: bool = True, **more) -> Case:
    """Return a segment with two batches of a transaction of producer 7, its marker, and two batches of producer 8, both
    forgotten. The output has the batches 0 (offsets 0 and 1), 1 (the marker), and 2 (offsets 3 and 4)."""
    fields = {"producer_epoch": 0, "leader_epoch": 3}

    def batch(offset: int, producer_id: int, **more: object) -> bytes:
        record = Rec(offset, NOW, b"k", b"v" * 9)
        return encode_batch([record], producer_id=producer_id, base_sequence=offset, **fields, **more)

    source = b"".join([
        batch(0, 7, transactional=True),
        batch(1, 7, transactional=True),
        encode_marker(2, NOW + 5, commit=commit, producer_id=7, **fields),
        batch(3, 8),
        batch(4, 8),
    ])  # fmt: skip
    return Case(source, forgetting(source, Rules(10**4, 10**5), (7, 8)), **more)


def _merge_of_producer(case: Case, number: int) -> None:
    """Merge two output batches without their producer."""
    first, second = case.batch(number), case.batch(number + 1)
    of = {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1, "transactional": False}
    case.rebuild(number, [*first.records, *second.records], last_offset=second.last_offset, **of)
    del case.out[number + 1]


def test_a_merged_batch_may_lose_a_producer_that_has_expired(tmp_path):
    case = forgetful(expired_before_ms=NOW + 5)
    found = [(batch.record_count, batch.producer_id) for batch in map(case.batch, range(3))]
    assert found == [(2, -1), (1, 7), (2, -1)]
    report = case.prove(tmp_path)
    assert (report.source_batches, report.output_batches) == (5, 3)


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"producer_id": 7}),
        (0, {"producer_epoch": 0}),
        (0, {"base_sequence": 0}),
        (2, {"producer_id": 8, "producer_epoch": 0, "base_sequence": 3}),
    ],
)
def test_a_merged_batch_with_a_part_of_its_producer_is_found(tmp_path, number, fields):
    case = forgetful()
    case.rebuild(number, **fields)
    with pytest.raises(KeytailError, match=r"producer id, epoch or sequence|attributes differ"):
        case.prove(tmp_path)


def test_a_merged_batch_that_is_still_transactional_is_found(tmp_path):
    case = forgetful()
    case.rebuild(0, transactional=True)
    with pytest.raises(KeytailError, match="attributes differ"):
        case.prove(tmp_path)


@pytest.mark.parametrize("commit", [True, False], ids=["marker above the section", "aborted"])
def test_a_transaction_that_is_not_known_to_be_committed_keeps_its_producer(tmp_path, commit):
    case = forgetful(commit=commit, end_offset=2)
    if not commit:
        assert [case.batch(number).producer_id for number in (0, 1)] == [7, 7]
        case.end_offset = 100
        _merge_of_producer(case, 0)
    with pytest.raises(KeytailError, match="attributes differ") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 0


def test_a_batch_that_is_not_merged_keeps_its_producer(tmp_path):
    case = forgetful()
    case.source += encode_batch([Rec(5, NOW, b"k", b"v")], producer_id=8, producer_epoch=0, base_sequence=5)
    case.__post_init__()
    assert case.batch(3).producer_id == 8  # another leader epoch
    case.prove(tmp_path / "kept")
    case.rebuild(3, producer_id=-1, producer_epoch=-1, base_sequence=-1)
    with pytest.raises(KeytailError, match="producer id, epoch or sequence differs"):
        case.prove(tmp_path / "lost")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"expired_before_ms": NOW + 4}, "producer id 7 has not expired"),  # by the time of its marker
        ({"expired_before_ms": NOW - 1}, "has not expired"),
        ({"producer_ids": (3, 8)}, "producer id 8 has not expired"),
    ],
)
def test_a_producer_that_has_not_expired_is_not_forgotten(tmp_path, change, text):
    case = forgetful(**change)
    with pytest.raises(KeytailError, match=text):
        case.prove(tmp_path)


def test_markers_that_exceed_the_memory_are_an_error_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_markers, "_FIRST_ROWS", 1)
    monkeypatch.setattr(repack_proof, "_MAX_MARKERS_BYTES", 0)
    case = forgetful(active=encode_marker(100, NOW, commit=True, producer_id=9, producer_epoch=0))
    with pytest.raises(Refused, match="transaction markers"):
        case.prove(tmp_path)


def test_a_later_batch_of_a_forgotten_producer_is_found(tmp_path):
    later = encode_batch([Rec(100, NOW + 9, b"k", b"v")], producer_id=8, producer_epoch=0, base_sequence=9)
    case = forgetful(active=later, expired_before_ms=NOW + 5)
    with pytest.raises(KeytailError, match="producer id 8 has not expired"):
        case.prove(tmp_path)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_of_magic_0_or_1_must_not_be_changed(tmp_path, magic):
    old = [Rec(offset, NOW if magic else -1, b"k", b"v") for offset in (2, 3)]
    before, after = (
        b"".join(encode_batch([Rec(offset, NOW, b"k", b"v")]) for offset in offsets) for offsets in ((0, 1), (4, 5))
    )
    case = Case(before + encode_wrapper(old, 1, magic=magic) + after, Rules(10**4, 10**5))
    assert [batch.record_count for batch in map(case.batch, range(3))] == [2, 2, 2]
    case.prove(tmp_path / "copied")
    case.out[1] = encode_wrapper([old[0], replace(old[1], value=b"w")], 1, magic=magic)
    with pytest.raises(KeytailError, match="a batch is not of format v2"):
        case.prove(tmp_path / "changed")
    case.out[1] = encode_batch(old, base_offset=2)
    with pytest.raises(KeytailError, match="must not be changed"):
        case.prove(tmp_path / "rebuilt")


@pytest.mark.parametrize("latest", [0, 1])
def test_a_change_of_one_of_the_last_batches_of_a_producer_is_found(tmp_path, latest):
    """The latest five may be in later segments."""
    fields = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v" * 99)], **fields) for offset in range(5 - latest)]
    active = encode_batch([Rec(100, NOW, b"k", b"v")], **fields) * latest
    case = Case(b"".join(batches), Rules(0, 10**5, codec=3), active=active)
    case.prove(tmp_path / "unknown")
    case.producer_ids = (3, 7)
    with pytest.raises(KeytailError, match="must not be changed") as caught:
        case.prove(tmp_path / "known")
    assert caught.value.offset == 0


def test_a_damaged_source_is_reported_as_damage(tmp_path):
    case = example()
    case.source = case.source[:100] + bytes([case.source[100] ^ 1]) + case.source[101:]
    with pytest.raises(CorruptLog, match="invalid CRC") as caught:
        case.prove(tmp_path)
    assert (caught.value.path, caught.value.byte_position) == (str(tmp_path / f"{0:020d}.log"), 0)


@pytest.mark.parametrize(
    "change",
    [lambda batch: with_tail(batch, b"\0"), lambda batch: with_bytes(batch, 57, struct.pack(">i", 2**31 - 1))],
    ids=["bytes", "count"],
)
def test_records_of_a_source_that_do_not_fill_it_are_reported_as_damage(tmp_path, change):
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v")]) for offset in range(2)]
    case = Case(b"".join(batches), Rules(10**4, 10**5))
    case.source = batches[0] + change(batches[1])
    with pytest.raises(CorruptLog, match="record count is not the number of its records") as caught:
        case.prove(tmp_path)
    assert caught.value.byte_position == len(batches[0])


def test_a_record_of_a_source_that_cannot_be_parsed_is_reported_as_damage(tmp_path):
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v")]) for offset in range(2)]
    case = Case(b"".join(batches), Rules(10**4, 10**5))
    case.source = batches[0] + with_bytes(batches[1], 65, b"\x7e")  # the size of the key
    with pytest.raises(CorruptLog, match="a record cannot be parsed") as caught:
        case.prove(tmp_path)
    assert (caught.value.byte_position, caught.value.offset) == (len(batches[0]), 1)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (-1, 0), (0, 2)])
def test_offsets_of_a_source_that_do_not_ascend_or_are_too_high_are_reported_as_damage(tmp_path, offsets):
    records = [Rec(offset, NOW, b"%d" % i, b"x" * 9) for i, offset in enumerate(offsets)]
    source = encode_batch(records, base_offset=0, last_offset=1) + encode_batch([Rec(2, NOW, b"k", b"v")])
    case = Case(source, Rules(10**4, 10**5, codec=0))
    assert len(case.out) == 1
    with pytest.raises(CorruptLog, match="its offset does not follow"):
        case.prove(tmp_path)
