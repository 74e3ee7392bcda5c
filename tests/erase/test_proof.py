"""The rules of an erasure in the proof: each change of a correct output is found."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.proof.prove import prove
from keytail.compact.proof.state import ProofSpec
from keytail.errors import KeytailError
from keytail.kernels.proof.key_hash import SECRET_BYTES, coefficients_of, hash_one
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from tests.in_pieces import read_in_pieces
from tests.reference import erasure
from tests.reference.batches import Batch, Rec, encode_batch, encode_marker, with_bytes
from tests.reference.cleaner import Segment, _emptied, _rebuilt
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log, encode_single, encode_wrapper
from tests.reference.varints import longer_varint

NOW = 1_700_000_000_000
KEYS = [b"x", b"y", b"\0\0\0\0"]
PRODUCERS = {9: (5, 1)}
TXN_ENTRY = struct.Struct(">hqqqq")


def data(offset: int, *items: tuple[bytes | None, bytes | None], pid: int = -1, **fields) -> bytes:
    records = [
        Rec(offset + i, NOW - 500 + offset + i, key, value, ((b"h", b"z"),) if i % 2 else ())
        for i, (key, value) in enumerate(items)
    ]
    if pid >= 0:
        fields = {"producer_id": pid, "producer_epoch": 0, "base_sequence": 4, "transactional": True} | fields
    return encode_batch(records, **{"leader_epoch": 3, **fields})


def marker(offset: int, pid: int, *, commit: bool, **fields) -> bytes:
    return encode_marker(offset, NOW, commit=commit, producer_id=pid, producer_epoch=0, **fields)


@dataclass
class Case:
    """A log, of which segments 0 and 40 are rewritten, and segment 20, which has no erased key, is not."""

    segments: list[Segment]
    keys: list[bytes] = field(default_factory=lambda: [*KEYS])
    entries: dict[int, list[bytes]] = field(default_factory=dict)  # transaction indexes of the outputs
    log_start: int = 0
    files: dict[tuple[int, str], bytes] = field(default_factory=dict)  # bytes that replace those of the outputs

    def __post_init__(self) -> None:
        self.outputs = {
            base: [log[batch.position : batch.position + batch.size] for batch in decode_any_log(log)]
            for base, log in erasure.erase(self.segments, self.keys, PRODUCERS).items()
        }

    def source(self, base_offset: int) -> tuple[Batch, bytes]:
        for segment in self.segments:
            for batch in decode_any_log(segment.log):
                if batch.base_offset == base_offset:
                    return batch, segment.log[batch.position : batch.position + batch.size]
        raise AssertionError(base_offset)

    def put(self, data: bytes) -> None:
        base = decode_any_log(data)[0].base_offset
        output = self._output(base)
        by_base = {decode_any_log(other)[0].base_offset: other for other in output} | {base: data}
        output[:] = [by_base[at] for at in sorted(by_base)]

    def drop(self, base_offset: int) -> None:
        output = self._output(base_offset)
        left = [other for other in output if decode_any_log(other)[0].base_offset != base_offset]
        assert len(left) < len(output)
        output[:] = left

    def _output(self, base_offset: int) -> list[bytes]:
        return self.outputs[max(base for base in self.outputs if base <= base_offset)]

    def patch(self, base_offset: int, at: int, new: bytes) -> None:
        [old] = [o for o in self._output(base_offset) if decode_any_log(o)[0].base_offset == base_offset]
        changed = with_bytes(old, at, new)
        assert changed != old
        output = self._output(base_offset)
        output[output.index(old)] = changed

    def prove(self, directory: Path) -> None:
        secret = os.urandom(SECRET_BYTES)
        facts = []
        for s in self.segments:
            (directory / f"{s.base_offset:020d}.log").write_bytes(s.log)
            facts.append(SegmentFacts(s.base_offset, len(s.log), 0, 0, 0, None, 0, 0))
        groups = []
        for base, batches in self.outputs.items():
            log = b"".join(batches)
            files = {(base, ".log"): log}
            files[base, ".index"], files[base, ".timeindex"] = index_files(log, base, 150)
            if entries := self.entries.get(base):
                files[base, ".txnindex"] = b"".join(entries)
            clean = []
            for (of, suffix), content in {**files, **self.files}.items():
                if of == base:
                    name = f"{base:020d}{suffix}.r.a.clean"
                    (directory / name).write_bytes(content)
                    clean.append(CleanFile(suffix, name, len(content), ""))
            groups.append(GroupOutput((base,), (OutputSegment(base, tuple(clean)),)))
        end = self.segments[-1].base_offset
        coefficients = coefficients_of(secret)
        hashes = sorted(hash_one(np.frombuffer(bytearray(k), np.uint8), len(k), coefficients) for k in self.keys)
        prove(
            LOCAL,
            ProofSpec(
                str(directory), facts, groups, first_dirty_offset=0, end_offset=end, first_uncleanable_offset=end,
                now_ms=NOW, delete_retention_ms=1000, index_interval_bytes=150, drop_keyless=False,
                active_producers=tuple(np.array([value]) for value in (9, *PRODUCERS[9])),  # type: ignore[arg-type]
                memory_bytes=1 << 22, secret=secret, log_start_offset=self.log_start, keep_magic=True,
                erased_keys=np.array(hashes, np.uint64).T.copy(),
            ),
        )  # fmt: skip


def example(codec: int = 0) -> Case:
    pack = {"codec": codec}
    first = (
        data(0, (b"x", b"1" * 40), (b"a", b"2"), (b"y", None), (b"b", b"3"), **pack)
        + data(4, (b"x", b"all go"), (b"y", b"4"), producer_id=9, producer_epoch=1, base_sequence=7, **pack)
        + data(6, (b"a", None), (None, b"no key"), **pack)
        + data(8, (b"a", None), (b"x", b"5"), delete_horizon_ms=NOW - 5, **pack)
        + data(10, (b"c", b"aborted"), (b"x", b"aborted"), pid=1, **pack)
        + encode_batch(
            [], base_offset=12, last_offset=13, max_timestamp=NOW, producer_id=8, producer_epoch=0, base_sequence=1
        )
        + marker(14, 1, commit=False)
        + data(15, (None, b"no key"), (b"y", b"6"), (b"d", None), **pack)
        + encode_batch(
            [], base_offset=18, last_offset=18, max_timestamp=NOW + 9, producer_id=7, producer_epoch=0, control=True
        )
    )
    second = data(20, (b"d", b"aborted later"), pid=2, **pack) + data(21, (b"e", b"7"), **pack)
    third = (
        marker(40, 2, commit=False)
        + data(41, (b"f", b"8"), (b"x", b"9"), (b"g", b"10" * 30), pid=3, **pack)
        + marker(44, 3, commit=True)
        + marker(45, 5, commit=True, delete_horizon_ms=NOW - 9)
        + data(46, (b"h", b"open"), (b"w", b"open"), pid=4, **pack)
        + data(48, (b"y", b"11"), **pack)
    )
    case = Case([Segment(0, first), Segment(20, second), Segment(40, third), Segment(60, b"")])
    case.entries = {0: [TXN_ENTRY.pack(0, 1, 10, 14, 15)], 40: [TXN_ENTRY.pack(0, 2, 20, 40, 41)]}
    assert sorted(case.outputs) == [0, 40]
    return case


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_correct_erasure_passes(tmp_path, monkeypatch, codec, in_pieces):
    if in_pieces:
        read_in_pieces(monkeypatch)
    example(codec).prove(tmp_path)


def _without(case: Case, base: int, *offsets: int, **fields) -> None:
    """Put a rebuilt batch without the records at these offsets."""
    batch, _ = case.source(base)
    kept = [record for record in batch.records if record.offset not in offsets]
    case.put(_rebuilt(batch, kept, fields.get("horizon", batch.delete_horizon_ms)) if kept else _emptied(batch))


# One mutation per function; the name says what is wrong.
def _m_erased_record_left_in_a_rebuilt_batch(c):
    _without(c, 0, 2)


def _m_batch_with_an_erased_record_copied(c):
    c.put(c.source(0)[1])


def _m_emptied_batch_copied(c):
    c.put(c.source(4)[1])


def _m_erased_tombstone_left(c):
    _without(c, 0, 0)


def _m_erased_record_left_in_aborted_data(c):
    c.put(c.source(10)[1])


def _m_erased_record_left_in_committed_data(c):
    c.put(c.source(41)[1])


def _m_erased_record_left_in_the_last_batch(c):
    c.put(c.source(48)[1])


def _m_other_record_removed_too(c):
    _without(c, 0, 0, 1, 2)


def _m_other_record_removed_alone(c):
    _without(c, 6, 6)


def _m_record_without_a_key_removed(c):
    _without(c, 15, 15, 16)


def _m_tombstone_past_its_horizon_removed(c):
    _without(c, 8, 8, 9)


def _m_other_aborted_record_removed(c):
    _without(c, 10, 10, 11)


def _m_other_batch_emptied(c):
    c.put(_emptied(c.source(6)[0]))


def _m_emptied_batch_dropped(c):
    c.drop(4)


def _m_last_batch_dropped(c):
    c.drop(48)


def _m_other_batch_dropped(c):
    c.drop(6)


def _m_batch_without_records_dropped(c):
    c.drop(12)


def _m_batch_without_records_changed(c):
    c.patch(12, 27, struct.pack(">q", 5))


def _m_time_of_a_batch_without_records_left(c):
    c.put(c.source(12)[1])


def _m_time_of_a_batch_without_records_lowered_too_far(c):
    c.patch(12, 35, struct.pack(">q", 5))


def _m_time_of_an_emptied_batch_lowered_too_far(c):
    c.patch(48, 35, struct.pack(">q", 5))


def _m_marker_without_a_record_changed(c):
    c.patch(18, 35, struct.pack(">q", 5))


def _m_marker_dropped(c):
    c.drop(44)


def _m_marker_without_data_dropped(c):
    c.drop(45)


def _m_marker_emptied(c):
    c.put(_emptied(c.source(45)[0]))


def _m_marker_gets_a_horizon(c):
    c.put(marker(44, 3, commit=True, delete_horizon_ms=NOW + 1000))


def _m_marker_changed_to_commit(c):
    c.put(marker(14, 1, commit=True))


def _m_record_of_an_open_transaction_removed(c):
    c.keys.append(b"w")
    _without(c, 46, 47)


def _m_batch_of_an_open_transaction_emptied(c):
    c.keys += [b"w", b"h"]
    c.put(_emptied(c.source(46)[0]))


def _m_horizon_added(c):
    batch, _ = c.source(15)
    c.put(_rebuilt(batch, [batch.records[0], batch.records[2]], NOW + 1000))


def _m_horizon_removed(c):
    _without(c, 8, 9, horizon=None)


def _m_horizon_changed(c):
    _without(c, 8, 9, horizon=NOW)


def _m_horizon_added_to_an_unchanged_batch(c):
    batch, _ = c.source(6)
    c.put(_rebuilt(batch, batch.records, NOW + 1000))


def _m_last_offset_lowered(c):
    c.patch(4, 23, struct.pack(">i", 0))


def _m_leader_epoch_changed(c):
    c.patch(4, 12, struct.pack(">i", 4))


def _m_sequence_changed(c):
    c.patch(4, 53, struct.pack(">i", 8))


def _m_producer_epoch_changed(c):
    c.patch(41, 51, struct.pack(">h", 1))


def _m_max_timestamp_of_an_emptied_batch_changed(c):
    c.patch(4, 35, struct.pack(">q", NOW))


def _m_max_timestamp_of_an_emptied_batch_negative(c):
    c.patch(48, 35, struct.pack(">q", -1))


def _m_time_of_an_active_producers_last_batch_lowered(c):
    c.patch(4, 35, struct.pack(">q", 0))


def _m_max_timestamp_of_a_rebuilt_batch_changed(c):
    c.patch(0, 35, struct.pack(">q", NOW))


def _m_value_changed(c):
    batch, _ = c.source(0)
    c.put(_rebuilt(batch, [batch.records[1], Rec(3, batch.records[3].timestamp, b"b", b"4", ((b"h", b"z"),))], None))


def _m_header_removed(c):
    batch, _ = c.source(0)
    c.put(_rebuilt(batch, [batch.records[1], Rec(3, batch.records[3].timestamp, b"b", b"3")], None))


def _m_record_added(c):
    batch, _ = c.source(4)
    c.put(_rebuilt(batch, [Rec(4, NOW, b"new", b"v")], None))


def _m_batch_added(c):
    c.put(data(50, (b"new", b"v")))


def _m_unchanged_batch_rebuilt(c):
    c.patch(6, 21, b"\x01")


def _m_transaction_index_entry_missing(c):
    del c.entries[0]


def _m_entry_of_data_in_a_segment_that_is_not_rewritten_missing(c):
    del c.entries[40]


def _m_transaction_index_entry_of_another_segment(c):
    c.entries[0].append(c.entries[40][0])


def _m_offset_index_wrong(c):
    c.files[0, ".index"] = struct.pack(">ii", 4, 0)


def _m_time_index_missing(c):
    c.files[40, ".timeindex"] = b""


def _m_output_of_a_segment_is_that_of_another(c):
    c.outputs[0], c.outputs[40] = c.outputs[40], c.outputs[0]


MUTATIONS = {name[3:]: function for name, function in sorted(globals().items()) if name.startswith("_m_")}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("codec", [0, 1])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found(tmp_path, monkeypatch, name, codec, in_pieces):
    if in_pieces:
        read_in_pieces(monkeypatch)
    case = example(codec)
    MUTATIONS[name](case)
    with pytest.raises(KeytailError) as error:
        case.prove(tmp_path)
    assert error.value.slug in ("missing-in-output", "invalid-output-batch", "invalid-output-index")


def test_a_batch_from_which_nothing_is_erased_keeps_its_bytes(tmp_path):
    """The rebuilt batch has the same records, but shorter varints. A tombstone gets no delete horizon."""
    records = [Rec(1, NOW, b"a", None)]
    batch = encode_batch(records, leader_epoch=3, spell=longer_varint)
    case = Case([Segment(0, data(0, (b"x", b"1")) + batch), Segment(60, b"")])
    case.prove(tmp_path)
    case.put(encode_batch(records, leader_epoch=3))
    with pytest.raises(KeytailError, match="a batch from which nothing was removed differs"):
        case.prove(tmp_path)


def test_the_max_timestamp_of_an_emptied_batch_that_begins_an_output_is_checked(tmp_path):
    case = Case([Segment(0, data(0, (b"x", b"1")) + data(1, (b"a", b"2"))), Segment(60, b"")])
    case.prove(tmp_path)
    case.patch(0, 35, struct.pack(">q", 1))
    with pytest.raises(KeytailError, match="an emptied batch is not just the source's header"):
        case.prove(tmp_path)


def old_example() -> Case:
    keys = [b"x", b"a", b"b", b"y", b"c", b"x", b"x"]
    records = [Rec(offset, NOW + offset, key, b"v%d" % offset) for offset, key in enumerate(keys)]
    first = (
        encode_single(records[0])
        + encode_single(records[1])
        + encode_wrapper(records[2:5], 1, magic=1)
        + encode_wrapper(records[5:7], 1, magic=1)
    )
    return Case([Segment(0, first), Segment(7, b"")])


def test_a_correct_erasure_of_messages_passes(tmp_path):
    old_example().prove(tmp_path)


OLD_MUTATIONS = {
    "message_left": lambda c: c.put(c.source(0)[1]),
    "other_message_removed": lambda c: c.drop(1),
    "compressed_message_copied": lambda c: c.outputs.update({0: [*c.outputs[0][:1], c.source(2)[1]]}),
    "message_to_be_emptied_copied": lambda c: c.outputs[0].append(c.source(5)[1]),
    "compressed_message_removed": lambda c: c.outputs[0].pop(),
    "other_message_inside_removed": lambda c: c.outputs.update(
        {0: [c.outputs[0][0], encode_wrapper([c.source(2)[0].records[0]], 1, magic=1)]}
    ),
}


@pytest.mark.parametrize("name", OLD_MUTATIONS)
def test_every_mutation_of_messages_is_found(tmp_path, name):
    case = old_example()
    OLD_MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)
