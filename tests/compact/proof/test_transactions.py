from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.proof import markers as proof_markers
from keytail.compact.proof import state as proof_state
from keytail.errors import CorruptLog, KeytailError
from keytail.kernels.proof import markers as marker_table
from keytail.log.fs import LOCAL
from tests.chance import draws
from tests.compact.proof.case import NOW, RETENTION, Case, SmallWindow
from tests.reference import cleaner
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker, with_bytes
from tests.reference.cleaner import Aborted, Segment


def data(offset: int, pid: int, *items: tuple[bytes, bytes | None], **fields) -> bytes:
    records = [Rec(offset + i, NOW - 500 + offset + i, key, value) for i, (key, value) in enumerate(items)]
    if pid >= 0:
        fields = {"producer_id": pid, "producer_epoch": 0, "base_sequence": 0, "transactional": True} | fields
    return encode_batch(records, **fields)


def commit(offset: int, pid: int, **fields) -> bytes:
    return encode_marker(offset, NOW, commit=True, producer_id=pid, producer_epoch=0, **fields)


def abort(offset: int, pid: int, **fields) -> bytes:
    return encode_marker(offset, NOW, commit=False, producer_id=pid, producer_epoch=0, **fields)


def _example(codec: int = 0) -> Case:
    """Return a log with transactions in every state that can occur below the last stable offset, and in some above it.
    """
    pack = {"codec": codec}
    first = (
        data(0, 9, (b"below", b"log start"), **pack)
        + abort(1, 9)  # not needed, because it is below the log start
        + data(2, -1, (b"a", b"1"), (b"b", b"2" * 30), (b"f", b"not superseded"), **pack)
        + data(5, 1, (b"a", b"aborted"), (b"b", b"aborted"), **pack)
        + data(7, 2, (b"c", b"committed"), (b"a", b"3"), **pack)
        + abort(9, 1)
        + commit(10, 2)
        + commit(11, 3)  # a COMMIT marker without data, which the previous round removed
        + commit(12, 4, delete_horizon_ms=NOW - 1)
        + abort(13, 5, delete_horizon_ms=NOW + 1)
        + data(14, 6, (b"d", b"aborted, and the producer's last"), **pack)
        + abort(15, 6)
        + data(16, 8, (b"e", b"aborted far behind"), (b"a", b"x"), **pack)
    )
    second = (
        data(20, 1, (b"g", b"aborted again"), **pack)
        + data(21, 1, (b"f", b"aborted too"), **pack)
        + data(22, 2, (b"c", b"newest"), (b"t", None), **pack)
        + abort(24, 1)
        + commit(25, 2)
        + data(26, -1, (b"a", b"4"), (b"h", b"5"), **pack)
        + data(28, 7, (b"open", b"6"), (b"a", b"7"), **pack)
        + data(30, 10, (b"i", b"8"), (b"a", b"8"), **pack)
        + data(32, 10, (b"i", b"9"), **pack)
        + commit(33, 10)
        + data(34, -1, (b"a", b"10"), **pack)
    )
    active = data(40, 1, (b"z", b"next"), **pack) + abort(41, 8) + data(42, 8, (b"y", b"open"), **pack)
    segments = [
        Segment(0, first, aborted=(Aborted(9, 0, 1, 2), Aborted(1, 5, 9, 7), Aborted(6, 14, 15, 16))),
        Segment(20, second, aborted=(Aborted(1, 20, 24, 16),)),
        Segment(40, active, aborted=(Aborted(8, 16, 41, 28),)),
    ]
    producers = {6: (14, 0), 10: (32, 0), 3: (None, 0), 4: (900, 0)}
    return Case(
        segments,
        first_dirty=2,
        log_start_offset=2,
        producers=producers,
        segment_bytes=1,
    )


def _emptied(batch: Batch) -> bytes:
    return cleaner._emptied(batch)


@pytest.mark.parametrize("codec", range(5))
def test_a_correct_round_passes(tmp_path, codec):
    case = _example(codec)
    report = case.prove(tmp_path)
    kept = [b for o in case.outputs for b in decode_log(b"".join(o.batches))]
    assert report.batches_kept == len(kept)
    assert report.records_kept == sum(b.record_count for b in kept)
    bases = [b.base_offset for b in kept]
    assert 14 in bases and 12 not in bases and 13 in bases and 20 not in bases and 9 in bases


def test_without_active_producers_no_batch_is_protected(tmp_path):
    case = _example()
    case.producers = {}
    case.prove(tmp_path)


def test_data_of_a_producer_known_only_by_its_epoch_may_be_removed(tmp_path):
    log = data(0, 3, (b"a", b"1")) + commit(1, 3) + data(2, -1, (b"a", b"2"))
    case = Case([Segment(0, log), Segment(10, b"")], first_dirty=0, producers={3: (None, 0)})
    assert [b.base_offset for o in case.outputs for b in decode_log(b"".join(o.batches))] == [1, 2]
    case.prove(tmp_path)
    case.drop(1)
    with pytest.raises(KeytailError, match="producer"):
        case.prove(tmp_path)


def test_a_proof_with_growing_windows_and_tables_passes(tmp_path, monkeypatch):
    expected = _example().prove(tmp_path)
    monkeypatch.setattr(proof_markers, "Window", SmallWindow)
    monkeypatch.setattr(proof_markers, "_FIRST_ROWS", 1)
    assert _example(3).prove(tmp_path).records_kept == expected.records_kept


def _m_abort_marker_removed(c):
    c.drop(9)


def _m_abort_marker_of_an_emptied_batch_removed(c):
    c.drop(15)


def _m_abort_marker_emptied(c):
    c.put(_emptied(c.source(9)[0]))


def _m_abort_changed_to_commit(c):
    c.put(commit(9, 1))


def _m_abort_marker_of_other_producer(c):
    c.put(abort(9, 2))


def _m_commit_marker_removed(c):
    c.drop(10)


def _m_commit_marker_emptied(c):
    c.put(_emptied(c.source(25)[0]))


def _m_marker_without_horizon_removed(c):
    c.drop(11)


def _m_marker_before_its_horizon_removed(c):
    c.drop(13)


def _m_marker_before_its_horizon_emptied(c):
    c.put(_emptied(c.source(13)[0]))


def _m_needed_marker_with_horizon(c):
    batch, _ = c.source(10)
    c.put(cleaner._rebuilt(batch, batch.records, NOW + RETENTION))


def _m_unneeded_marker_with_other_horizon(c):
    batch, _ = c.source(11)
    c.put(cleaner._rebuilt(batch, batch.records, NOW + RETENTION + 1))


def _m_horizon_of_a_marker_moved(c):
    batch, _ = c.source(13)
    c.put(cleaner._rebuilt(batch, batch.records, NOW + RETENTION))


def _m_marker_epoch_changed(c):
    output, i = c.at(10)
    c.put(with_bytes(output.batches[i], 51, struct.pack(">h", 5)))


def _m_marker_value_changed(c):
    c.put(commit(10, 2, coordinator_epoch=7))


def _m_marker_no_longer_control(c):
    output, i = c.at(10)
    c.put(with_bytes(output.batches[i], 22, b"\x10"))


def _m_committed_batch_removed(c):
    c.drop(22)


def _m_committed_batch_emptied(c):
    c.put(_emptied(c.source(22)[0]))


def _m_committed_record_removed(c):
    batch, _ = c.source(22)
    c.put(cleaner._rebuilt(batch, batch.records[1:], NOW + RETENTION))


def _m_committed_value_that_only_aborted_data_supersedes(c):
    c.drop(2)


def _m_committed_record_that_only_aborted_data_supersedes(c):
    batch, _ = c.source(2)
    c.put(cleaner._rebuilt(batch, batch.records[2:], None))


def _m_aborted_batch_retained(c):
    c.put(c.source(5)[1])


def _m_aborted_batch_of_a_later_transaction_retained(c):
    c.put(c.source(21)[1])


def _m_aborted_record_retained(c):
    batch, _ = c.source(5)
    c.put(cleaner._rebuilt(batch, batch.records[1:], None))


def _m_aborted_batch_with_the_marker_above_retained(c):
    c.put(c.source(16)[1])


def _m_aborted_batch_of_an_active_producer_not_emptied(c):
    c.put(c.source(14)[1])


def _m_last_batch_of_an_active_producer_removed(c):
    c.drop(14)


def _m_last_batch_of_another_active_producer_removed(c):
    c.drop(32)


def _m_marker_of_an_active_producer_without_data_removed(c):
    case_marker = c.source(11)[0]
    assert case_marker.control
    c.drop(11)


def _m_open_batch_removed(c):
    c.drop(28)


def _m_open_batch_emptied(c):
    c.put(_emptied(c.source(28)[0]))


def _m_open_record_removed(c):
    batch, _ = c.source(28)
    c.put(cleaner._rebuilt(batch, batch.records[1:], None))


def _m_transactional_bit_removed(c):
    output, i = c.at(22)
    attributes = output.batches[i][22] & ~0x10
    c.put(with_bytes(output.batches[i], 22, bytes([attributes])))


def _m_entries_missing(c):
    c.outputs[0].entries = []


def _m_entry_of_an_emptied_batch_missing(c):
    del c.outputs[0].entries[1]


def _m_entry_of_second_output_missing(c):
    c.outputs[1].entries = []


def _m_entry_in_the_output_before(c):
    c.outputs[0].entries += c.outputs[1].entries
    c.outputs[1].entries = []


def _m_entry_also_in_the_output_before(c):
    c.outputs[0].entries += c.outputs[1].entries


def _m_entry_of_a_commit(c):
    c.outputs[0].entries.insert(1, Aborted(2, 7, 10, 11).encode())


def _m_entry_of_no_marker(c):
    c.outputs[0].entries.append(Aborted(8, 16, 17, 18).encode())


def _m_entry_of_no_marker_that_begins_early(c):
    c.outputs[0].entries.append(Aborted(8, 2, 17, 18).encode())


def _m_entry_of_a_marker_above(c):
    c.outputs[1].entries.append(Aborted(8, 16, 41, 28).encode())


def _m_entry_of_a_removed_marker(c):
    c.outputs[0].entries.insert(1, Aborted(4, 12, 12, 13).encode())


def _m_entry_doubled(c):
    c.outputs[0].entries.insert(0, c.outputs[0].entries[0])


def _m_entries_swapped(c):
    c.outputs[0].entries.reverse()


def _m_entry_of_another_producer(c):
    c.outputs[0].entries[0] = Aborted(2, 5, 9, 7).encode()


def _m_entry_begins_too_late(c):
    c.outputs[0].entries[0] = Aborted(1, 6, 9, 7).encode()


def _m_entry_begins_in_the_transaction_before(c):
    c.outputs[1].entries[0] = Aborted(1, 9, 24, 16).encode()


def _m_entry_begins_after_its_end(c):
    c.outputs[0].entries[0] = Aborted(1, 10, 9, 7).encode()


def _m_entry_with_impossible_stable_offset(c):
    c.outputs[0].entries[0] = Aborted(1, 5, 9, 11).encode()


def _m_entry_of_another_version(c):
    c.outputs[0].entries[0] = b"\0\1" + c.outputs[0].entries[0][2:]


def _m_entry_truncated(c):
    c.outputs[0].entries[-1] = c.outputs[0].entries[-1][:-1]


MUTATIONS = {name[3:]: f for name, f in sorted(globals().items()) if name.startswith("_m_")}


def test_there_are_as_many_mutations_as_documented():
    assert len(MUTATIONS) == 52


@pytest.mark.parametrize("codec", [0, 4])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_with_its_position(tmp_path, name, codec):
    case = _example(codec)
    before = case.files()
    MUTATIONS[name](case)
    assert case.files() != before, "the mutation changed nothing"
    with pytest.raises(KeytailError) as caught:
        case.prove(tmp_path)
    error = caught.value
    assert not isinstance(error, CorruptLog), error
    assert error.path and error.path.startswith(str(tmp_path))
    assert error.remedy
    assert (error.byte_position is not None and error.offset is not None) or "truncated" in name


def test_a_marker_above_the_cleaned_range_is_read(tmp_path):
    """Without that marker the transaction is open, and its data must be retained."""
    case = _example()
    case.prove(tmp_path)
    active = case.segments[-1]
    case.segments[-1] = replace(active, log=active.log.replace(abort(41, 8), commit(41, 8)))
    with pytest.raises(KeytailError, match="latest record of its key") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 16
    case.segments[-1] = replace(active, log=active.log.replace(abort(41, 8), b""))
    with pytest.raises(KeytailError, match="has not ended") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 16


@pytest.mark.parametrize("crc", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_a_marker_with_a_wrong_checksum_is_not_used(tmp_path, crc):
    """It is in the last segment, whose valid part ends before it."""
    case = _example()
    active, marker = case.segments[-1], abort(41, 8)
    case.segments[-1] = replace(active, log=active.log.replace(marker, marker[:17] + crc + marker[21:]))
    with pytest.raises(KeytailError, match="has not ended") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 16


def test_an_entry_may_have_the_stable_offset_0(tmp_path):
    """The transaction of producer 2 began at offset 0, and was open when that of producer 1 ended."""
    log = data(0, 2, (b"a", b"1")) + data(1, 1, (b"b", b"aborted")) + abort(2, 1) + commit(3, 2)
    entry = Aborted(1, 1, 2, 0)
    case = Case([Segment(0, log, aborted=(entry,)), Segment(4, b"")], first_dirty=0, producers={1: (1, 0)})
    assert case.outputs[0].entries == [entry.encode()]
    case.prove(tmp_path)


@pytest.mark.parametrize("found_offsets", [[10, 25], []])
def test_a_marker_that_was_not_collected_is_an_error(tmp_path, monkeypatch, found_offsets):
    collect = proof_state.collect_markers

    def collect_some(*arguments):
        found = collect(*arguments)
        return found[np.isin(found[:, marker_table.OFFSET], found_offsets)]

    monkeypatch.setattr(proof_state, "collect_markers", collect_some)
    log = commit(9, 1) + commit(10, 1) + data(11, -1, (b"a", b"1")) + commit(25, 2)
    with pytest.raises(CorruptLog) as caught:
        Case([Segment(0, log), Segment(30, b"")], first_dirty=0).prove(tmp_path)
    assert caught.value.offset == 9


def test_a_batch_of_an_open_transaction_is_not_removed_although_its_records_are_superseded(tmp_path):
    """The batch has a record, or lost it in an earlier round."""
    first = data(0, 1, (b"a", b"1"))
    batch = decode_log(first)[0]
    for log in (first, _emptied(batch)):
        case = Case([Segment(0, log + data(1, -1, (b"a", b"2"))), Segment(4, b"")], first_dirty=0)
        with pytest.raises(KeytailError, match="data of a transaction that has not ended"):
            case.prove(tmp_path)
        case.put(log)
        case.prove(tmp_path)
    case = Case([Segment(0, first + data(1, -1, (b"a", b"2"))), Segment(4, b"")], first_dirty=0)
    case.put(_emptied(batch))
    with pytest.raises(KeytailError, match="data of a transaction that has not ended"):
        case.prove(tmp_path)


def test_a_marker_whose_data_is_still_there_is_not_removed_after_its_horizon(tmp_path):
    log = data(0, 4, (b"a", b"1")) + commit(1, 4, delete_horizon_ms=NOW - 1) + data(2, -1, (b"b", b"2"))
    case = Case([Segment(0, log), Segment(4, b"")], first_dirty=0)
    case.prove(tmp_path)
    case.drop(1)
    with pytest.raises(KeytailError, match="the marker of a transaction that had data"):
        case.prove(tmp_path)


def test_control_records_of_an_unknown_type_are_retained(tmp_path):
    records = [Rec(offset, NOW, b"\0\0\0\2", b"%d" % offset) for offset in range(2)]
    control = encode_batch(records, control=True)
    case = Case([Segment(0, control + data(2, -1, (b"a", b"1"))), Segment(4, b"")], first_dirty=0)
    case.prove(tmp_path)
    case.put(encode_batch(records[:1], last_offset=1, control=True))
    with pytest.raises(KeytailError, match="record count"):
        case.prove(tmp_path)
    case.drop(0)
    with pytest.raises(KeytailError, match="the marker of a transaction that had data"):
        case.prove(tmp_path)


def test_a_torn_tail_of_the_last_segment_is_not_read(tmp_path):
    case = _example()
    active = case.segments[-1]
    for tail in (b"\0" * 40, b"\0" * 500, data(43, 8, (b"y", b"z"))[:-1], b"\x7f" * 61):
        case.segments[-1] = replace(active, log=active.log + tail)
        case.prove(tmp_path)
    case.segments[-1] = replace(active, log=active.log + b"\0" * 70)
    case.segments.append(Segment(50, b""))
    with pytest.raises(CorruptLog):
        case.prove(tmp_path)


# Several outputs in a group


@pytest.mark.parametrize("bases", [[9], [7, 10], [5, 6, 9], [16], [17], [2, 5, 7, 9, 10, 11, 13, 14, 15]])
def test_a_group_of_several_outputs_passes(tmp_path, bases):
    case = _example()
    whole = case.prove(tmp_path)
    case.split(0, bases)
    split = case.prove(tmp_path)
    assert (split.records_kept, split.batches_kept) == (whole.records_kept, whole.batches_kept)


def test_outputs_that_contain_each_others_batches_are_found(tmp_path):
    for change in range(6):
        case = _example()
        case.split(0, [2, 10])
        first, second, third = case.groups[0][1]
        if change == 0:
            first.batches.append(second.batches.pop(0))
        elif change == 1:
            second.batches.insert(0, first.batches.pop())
        elif change == 2:
            third.base = 11  # the first batch of this output is below its base offset
        elif change == 3:
            second.base = 3  # the base offset is inside the batch at 2
        elif change == 4:
            second.batches, third.batches = third.batches, second.batches
        else:
            third.batches = []
        with pytest.raises(KeytailError):
            case.prove(tmp_path)


def test_an_output_must_not_extend_past_the_base_of_the_next(tmp_path):
    case = _example()
    case.split(0, [3])
    assert struct.unpack_from(">q", case.outputs[0].batches[-1])[0] == 2
    with pytest.raises(KeytailError, match="are outside its segment"):
        case.prove(tmp_path)


def test_an_index_above_its_capacity_is_found(tmp_path):
    case = _example()
    sizes = [len(d) for (_, suffix), d in case.files().items() if suffix in (".index", ".timeindex")]
    case.index_limit = max(sizes)
    case.prove(tmp_path)
    case.index_limit = max(sizes) - 1
    with pytest.raises(KeytailError, match="more than the"):
        case.prove(tmp_path)


# Random logs


def _random_transactional_log(rng: random.Random) -> tuple[list[Segment], dict]:
    """Return a log of alternating producers, in which all transactions end before the last segment."""
    keys = [b"k%d" % i for i in range(rng.choice([2, 5, 20]))]
    offset, opened, producers = rng.choice([0, 100]), {}, {}
    segments = []
    count = rng.randint(1, 4)
    for number in range(count):
        base, parts, entries = offset, [], []

        def end(pid: int, parts=parts, entries=entries) -> None:
            nonlocal offset
            first = opened.pop(pid)
            keep = rng.random() < 0.5
            horizon = rng.choice([None, None, NOW - 1, NOW + 1]) if first is None else None
            make = commit if keep else abort
            parts.append(make(offset, pid, delete_horizon_ms=horizon))
            if not keep and first is not None:
                stable = min([f for f in opened.values() if f is not None], default=offset + 1)
                entries.append(Aborted(pid, first, offset, stable))
            offset += 1

        for _ in range(rng.choice([1, 3, 10, 25])):
            pid = rng.choice([-1, 1, 2, 3, 4])
            if pid in opened and rng.random() < 0.4:
                end(pid)
                continue
            if pid >= 0 and pid not in opened and rng.random() < 0.15:
                opened[pid] = None  # an earlier round removed the data of this transaction
                end(pid)
                continue
            n = rng.randint(1, 4)
            items = [(rng.choice(keys), rng.choice([None, b"", b"v" * 20])) for _ in range(n)]
            parts.append(data(offset, pid, *items, codec=rng.choice([0, 0, 1, 4])))
            if pid >= 0:
                if opened.get(pid) is None:
                    opened[pid] = offset
                producers[pid] = (offset + n - 1, 0)
            offset += n + rng.choice([0, 0, 2])
        if number + 1 == count:
            for pid in list(opened):
                end(pid)
        segments.append(Segment(base, b"".join(parts), mtime_ms=NOW - 1000 + number, aborted=tuple(entries)))
    segments.append(Segment(offset, b"", mtime_ms=NOW))
    return segments, {pid: where for pid, where in producers.items() if rng.random() < 0.7}


@pytest.mark.parametrize("number", range(draws(60)))
def test_random_rounds_pass_and_random_losses_fail(tmp_path, number):
    seed = f"proof-transactions-{number}"
    print(seed)
    rng = random.Random(seed)
    segments, producers = _random_transactional_log(rng)
    first = segments[0].base_offset
    now_ms, dirty = NOW, first
    for round_number in range(4):
        case = Case(
            segments,
            first_dirty=dirty,
            now_ms=now_ms,
            producers=producers,
            segment_bytes=rng.choice([300, 10**6]),
            log_start_offset=first,
        )
        case.prove(tmp_path / str(round_number))
        _random_losses(case, rng, tmp_path / "broken")
        segments, dirty = case.after(), rng.choice([first, case.round.end_offset - 1])
        now_ms += rng.choice([1, RETENTION, RETENTION + 1])


def _random_losses(case: Case, rng: random.Random, directory: Path) -> None:
    """Remove markers of retained data, then insert aborted records: the proof must reject each change."""
    sources = [b for s in case.segments[:-1] for b in decode_log(s.log)]
    markers = [b for b in sources if b.control and b.records]
    for marker in rng.sample(markers, min(3, len(markers))):
        before = max(
            (
                m.base_offset
                for m in markers
                if m.producer_id == marker.producer_id and m.base_offset < marker.base_offset
            ),
            default=-1,
        )
        own = [
            b
            for b in sources
            if b.transactional
            and not b.control
            and b.producer_id == marker.producer_id
            and before < b.base_offset < marker.base_offset
        ]
        saved = [list(o.batches) for o in case.outputs]
        if own:
            case.drop(marker.base_offset)
            with pytest.raises(KeytailError, match=r"marker of a transaction|ends the cleaned range"):
                case.prove(directory)
        is_abort = marker.records[0].key == b"\0\0\0\0"
        for output, batches in zip(case.outputs, saved, strict=True):
            output.batches = batches
        holding = [b for b in own if b.record_count]
        if is_abort and holding:
            case.put(case.source(rng.choice(holding).base_offset)[1])
            with pytest.raises(KeytailError, match="data of an aborted transaction"):
                case.prove(directory)
        for output, batches in zip(case.outputs, saved, strict=True):
            output.batches = batches


def test_markers_that_exceed_the_memory_are_an_error_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_state, "_MIN_MEMORY_BYTES", 0)
    monkeypatch.setattr(proof_markers, "_FIRST_ROWS", 4)
    case = _example()
    with pytest.raises(KeytailError, match="memory"):
        case.prove(tmp_path, memory_bytes=500)
    case.prove(tmp_path, memory_bytes=3000)


def test_the_table_of_markers_does_not_grow_beyond_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_markers, "_FIRST_ROWS", 1)
    spec = _example().spec(tmp_path)

    def collect(limit_bytes: int):
        return proof_markers.collect_markers(LOCAL, spec.partition_path, spec.segments, limit_bytes)

    found = collect(1 << 20)
    row_bytes = found.nbytes // len(found)
    grown_bytes = row_bytes << (len(found) - 1).bit_length()
    assert len(collect(grown_bytes)) == len(found) > 8
    assert collect(grown_bytes - 1) is None
