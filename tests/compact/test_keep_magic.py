"""Rounds that keep the magic of messages of magic 0 and 1 (LEGACY.md 5), compared with the reference model."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.fan_out.stages import fan_out
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.errors import Refused
from keytail.log.fs import LOCAL
from tests.chance import draws
from tests.compact.fan_out.in_process import InProcess
from tests.compact.logs import RandomLog, task_for, write_log
from tests.reference.batches import Rec, encode_batch
from tests.reference.cleaner import Round, Segment, clean
from tests.reference.codecs import GZIP, LZ4, SNAPPY
from tests.reference.indexing import index_files
from tests.reference.legacy import (
    decode_any_log,
    encode_single,
    encode_wrapper,
    inner_messages,
    wrong_header_checksum,
)

NOW = 1_750_000_000_000
RETENTION = 1000


def log_of(rng: random.Random) -> RandomLog:
    """Return messages of magic 0 and 1, alone and in wrappers, and batches of magic 2, with tombstones of any age."""
    offset, made, ends = rng.choice([0, 0, 17, 2**40]), [], []
    keys = [b"k%d" % i for i in range(rng.choice([1, 3, 10, 40]))] + [b""]
    for number in range(rng.randint(1, 5)):
        base, parts = offset, []
        for _ in range(rng.choice([0, 1, 3, 8])):
            kind, magic = rng.choice(["single", "wrapper", "wrapper", "v2"]), rng.choice([0, 1])
            records = []
            for _ in range(1 if kind == "single" else rng.choice([1, 2, 5, 20])):
                value = rng.choice([None, b"", b"v" * rng.randint(1, 90), b"v%d" % offset])
                time = NOW - rng.randint(0, 10**6) if magic or kind == "v2" else -1
                records.append(Rec(offset, rng.choice([time, time, -1]), rng.choice(keys), value))
                offset += rng.choice([1, 1, 1, 3])
            append_time = NOW - rng.randint(0, 9) if magic and rng.random() < 0.3 else None
            if kind == "v2":
                parts.append(encode_batch(records, codec=rng.choice([0, GZIP])))
            elif kind == "single":
                parts.append(encode_single(records[0], magic=magic, append_time=append_time is not None))
            else:
                mixed = rng.random() < 0.2
                parts.append(
                    encode_wrapper(
                        records,
                        rng.choice([GZIP, SNAPPY, LZ4]),
                        magic=magic,
                        append_time=append_time,
                        inner_magics=[rng.choice([0, 1]) if mixed else magic for _ in records],
                        offset=records[-1].offset + (rng.choice([0, 0, 2]) if not magic else 0),
                    )
                )
                offset = decode_any_log(parts[-1])[0].last_offset + 1
            ends.append(offset)
        log = b"".join(parts)
        index, time_index = index_files(log, base, 64)
        made.append(Segment(base, log, len(index), len(time_index), NOW - 10**6 + number * rng.choice([0, 700, 2000])))
        offset = max(offset, base + 1)
    made.append(Segment(offset, b"", 0, 0, NOW))
    return RandomLog(made, ends, offset, {})


def task_of(path: Path, log: RandomLog, first_dirty: int, **fields: object) -> CleaningTask:
    facts = write_log(str(path), log.segments)
    config = {"delete_retention_ms": RETENTION, "segment_bytes": 1}
    fields = {"message_format": "keep", "config": config, "map_memory_bytes": 1 << 20, **fields}
    return task_for(str(path), log, facts, NOW, first_dirty=first_dirty, **fields)


def expected(log: RandomLog, first_dirty: int, segment_bytes: int = 1) -> Round:
    return clean(
        log.segments, first_dirty=first_dirty, first_uncleanable=log.segments[-1].base_offset, now_ms=NOW,
        delete_retention_ms=RETENTION, segment_bytes=segment_bytes, index_interval_bytes=64, keep_magic=True,
        log_start_offset=log.segments[0].base_offset,
    )  # fmt: skip


def contents(log: bytes) -> list[object]:
    """Return everything in a log that does not depend on compression: each header with its records."""
    found: list[object] = []
    for batch in decode_any_log(log):
        raw = log[batch.position : batch.position + batch.size]
        if raw[16] == 2:
            found.append({**vars(batch), "position": 0, "size": 0, "crc": 0})
        elif raw[17] & 7:
            found.append((raw[:8], raw[16 : 30 if raw[16] else 22], inner_messages(raw)))
        else:
            found.append(raw)
    return found


def assert_equal(path: Path, result: CleaningResult, round_: Round, *, same_groups: bool = True) -> None:
    assert result.end_offset == round_.end_offset
    written = {}
    for group in result.groups:
        for out in group.segments:
            of_suffix = {file.suffix: (path / file.name).read_bytes() for file in out.files}
            log = of_suffix[".log"]
            written[out.base_offset] = log
            assert (of_suffix[".index"], of_suffix[".timeindex"]) == index_files(log, out.base_offset, 64)
    if same_groups:
        assert {base: contents(log) for base, log in written.items()} == {
            segment.base_offset: contents(segment.log) for segment in round_.segments
        }
    else:
        assert contents(b"".join(written.values())) == contents(b"".join(s.log for s in round_.segments))


@pytest.mark.parametrize("number", range(draws(60)))
def test_a_round_has_the_result_of_the_reference_model(tmp_path: Path, number: int) -> None:
    rng = random.Random(f"keep-{number}")
    log = log_of(rng)
    first_dirty = rng.choice([segment.base_offset for segment in log.segments[:-1]])
    round_ = expected(log, first_dirty)
    path = tmp_path / "t-0"
    task = task_of(path, log, first_dirty)
    result = clean_partition(LOCAL, task)
    assert_equal(path, result, round_)
    result = clean_partition(LOCAL, task_of(tmp_path / "measured", log, first_dirty, grouping="measured"))
    assert_equal(tmp_path / "measured", result, round_, same_groups=False)
    whole = InProcess(tmp_path / "cells", rng=rng)
    result = fan_out(LOCAL, task_of(tmp_path / "fanned", log, first_dirty, fan_out="always"), whole)
    assert_equal(tmp_path / "fanned", result, round_)


@pytest.mark.parametrize("number", range(draws(10)))
def test_a_second_round_changes_nothing(tmp_path: Path, number: int) -> None:
    rng = random.Random(f"keep-again-{number}")
    log = log_of(rng)
    task = task_of(tmp_path / "t-0", log, log.segments[0].base_offset, max_scratch_bytes=1)
    while True:
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        if result.rest is None:
            break
        task = next_pass(task, result)
    once = sorted((tmp_path / "t-0").glob("*.log"))
    after = [Segment(int(p.stem), p.read_bytes(), 0, 0, p.stat().st_mtime_ns // 10**6) for p in once]
    log = RandomLog(after, [], log.log_end_offset, {})
    task = task_of(tmp_path / "again", log, after[0].base_offset)
    install(LOCAL, task, clean_partition(LOCAL, task))
    again = sorted((tmp_path / "again").glob("*.log"))
    assert b"".join(p.read_bytes() for p in again) == b"".join(s.log for s in after)


def test_messages_are_copied_and_wrappers_rebuilt_with_their_own_fields(tmp_path: Path) -> None:
    records = [Rec(5, 3000, b"a", b"1"), Rec(6, 9000, b"b", b"2"), Rec(8, 4000, b"c", b"3"), Rec(9, 1000, b"b", b"4")]
    whole = encode_wrapper([Rec(1, -1, b"x", b"1"), Rec(2, -1, b"y", b"2")], LZ4, magic=0)
    single = encode_single(Rec(20, 7000, b"z", b"9"), magic=1, append_time=True)
    old = encode_wrapper([Rec(21, -1, b"d", b"1"), Rec(22, -1, b"e", b"2")], LZ4, magic=0)
    newest = encode_single(Rec(30, 8000, b"b", b"newest"), magic=1) + encode_single(Rec(31, -1, b"d", b"n"), magic=0)
    source = whole + encode_wrapper(records, GZIP) + single + old + newest
    log = RandomLog([Segment(0, source, mtime_ms=NOW), Segment(40, b"")], [], 40, {})
    path = tmp_path / "t-0"
    task = task_of(path, log, 0)
    install(LOCAL, task, clean_partition(LOCAL, task))
    left = (path / f"{0:020d}.log").read_bytes()
    messages = [left[b.position : b.position + b.size] for b in decode_any_log(left)]
    assert messages[0] == whole and messages[2] == single and b"".join(messages[4:]) == newest
    offset, magic, attributes, timestamp = struct.unpack_from(">q8xbbq", messages[1])
    assert (offset, magic, attributes, timestamp) == (8, 1, GZIP, 4000), (
        "a wrapper must have the last offset and the latest timestamp of the retained messages"
    )
    fields = [struct.unpack_from(">q8xbbq", inner) for inner in inner_messages(messages[1])]
    assert fields == [(0, 1, 0, 3000), (3, 1, 0, 4000)], "offsets must be relative to the first retained message"
    (offset, magic, attributes), value = struct.unpack_from(">q8xbb", messages[3]), messages[3][26:]
    assert (offset, magic, attributes) == (22, 0, LZ4)
    assert value[6:7] == wrong_header_checksum(value[:6]), "clients before 0.10 require a wrong checksum"
    assert [struct.unpack_from(">q", inner)[0] for inner in inner_messages(messages[3])] == [22], "not absolute"


def test_a_wrapper_of_messages_of_another_magic_is_always_rebuilt(tmp_path: Path) -> None:
    """Damage by KAFKA-4298 is repaired as in Kafka, and an inner message of magic 0 gets the append time of its
    wrapper.
    """
    records = [Rec(0, -1, b"a", b"1"), Rec(1, 500, b"b", b"2")]
    mixed = encode_wrapper(records, GZIP, inner_magics=[0, 1], append_time=700)
    log = RandomLog([Segment(0, mixed, mtime_ms=NOW), Segment(40, b"")], [], 40, {})
    path = tmp_path / "t-0"
    task = task_of(path, log, 0)
    install(LOCAL, task, clean_partition(LOCAL, task))
    left = (path / f"{0:020d}.log").read_bytes()
    assert [(m[16], m[17], struct.unpack_from(">q", m, 18)[0]) for m in inner_messages(left)] == [(1, 8, 700)] * 2


def test_a_rebuilt_wrapper_of_magic_0_has_no_timestamp(tmp_path: Path) -> None:
    """With a timestamp in the wrapper, the time index would have a timestamp that no message of the segment has."""
    mixed = encode_wrapper([Rec(0, -1, b"a", b"1"), Rec(1, 500, b"b", b"2")], GZIP, magic=0, inner_magics=[0, 1])
    newer = encode_single(Rec(2, 400, b"a", b"3"), magic=1)
    log = RandomLog([Segment(0, mixed + newer, mtime_ms=NOW), Segment(40, b"")], [], 40, {})
    path = tmp_path / "t-0"
    assert_equal(path, clean_partition(LOCAL, task_of(path, log, 0)), expected(log, 0))


def test_the_last_message_of_the_range_is_removed_if_it_is_emptied(tmp_path: Path) -> None:
    """A batch of magic 2 would be retained without records; a message cannot be empty."""
    source = encode_single(Rec(0, NOW, b"a", b"1")) + encode_single(Rec(1, NOW, b"b", None))
    log = RandomLog([Segment(0, source, mtime_ms=0), Segment(2, b"")], [], 2, {})
    path = tmp_path / "t-0"
    install(LOCAL, task := task_of(path, log, 0), clean_partition(LOCAL, task))
    assert [b.base_offset for b in decode_any_log((path / f"{0:020d}.log").read_bytes())] == [0]


def test_with_an_unknown_format_only_old_messages_are_refused(tmp_path: Path) -> None:
    new = encode_batch([Rec(0, NOW, b"a", b"1"), Rec(1, NOW, b"a", b"2")])
    old = encode_single(Rec(2, NOW, b"a", b"3"), magic=0)
    log = RandomLog([Segment(0, new), Segment(2, b"")], [], 2, {})
    assert clean_partition(LOCAL, task_of(tmp_path / "new", log, 0, message_format="unknown")).records_after == 1
    log = RandomLog([Segment(0, new + old), Segment(3, b"")], [], 3, {})
    with pytest.raises(Refused, match="--message-format keep") as caught:
        clean_partition(LOCAL, task_of(tmp_path / "old", log, 0, message_format="unknown"))
    assert (caught.value.offset, caught.value.byte_position) == (2, len(new))
    assert not list((tmp_path / "old").glob("*.clean"))


records_of_a_message = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c", b""]), st.none() | st.binary(max_size=40), st.integers(-1, 2**40)),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(deadline=None, max_examples=draws(60))
@given(
    st.lists(
        st.tuples(
            records_of_a_message, st.sampled_from([0, 1]), st.sampled_from([0, GZIP, SNAPPY, LZ4]), st.booleans()
        ),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_a_round_over_any_messages_equals_the_model(tmp_path_factory: pytest.TempPathFactory, messages: list) -> None:
    parts, offset = [], 0
    for items, magic, codec, append in messages:
        records = [Rec(offset + i, time if magic else -1, k, v) for i, (k, v, time) in enumerate(items)]
        if codec:
            parts.append(encode_wrapper(records, codec, magic=magic, append_time=7 if append and magic else None))
        else:
            parts += [encode_single(record, magic=magic, append_time=append) for record in records]
        offset += len(records)
    log = RandomLog([Segment(0, b"".join(parts), mtime_ms=NOW), Segment(offset, b"")], [], offset, {})
    path = tmp_path_factory.mktemp("any") / "t-0"
    assert_equal(path, clean_partition(LOCAL, task_of(path, log, 0)), expected(log, 0))


@pytest.mark.parametrize("magic, append_time", [(0, None), (1, None), (1, NOW)])
def test_unused_bits_of_attributes_are_not_written(tmp_path: Path, magic: int, append_time: int | None) -> None:
    records = [Rec(offset, NOW if magic else -1, key, b"v") for offset, key in enumerate((b"a", b"b", b"a"))]
    used = GZIP | (8 if append_time else 0)
    spoiled = encode_wrapper(
        records, GZIP, magic=magic, append_time=append_time, attributes=used | (0x30 if magic else 0x38)
    )
    log = RandomLog([Segment(0, spoiled, 0, 0, NOW), Segment(3, b"", 0, 0, NOW)], [3], 3, {})
    result = clean_partition(LOCAL, task_of(tmp_path, log, 0))
    [output] = [segment for group in result.groups for segment in group.segments]
    [name] = [file.name for file in output.files if file.suffix == ".log"]
    written = (tmp_path / name).read_bytes()
    assert (written[16], written[17]) == (magic, used)
    assert [record.offset for batch in decode_any_log(written) for record in batch.records] == [1, 2]
