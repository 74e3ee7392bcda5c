"""One round over random partitions: keytail's bytes compared with those of the reference model (promise 3;
CONFORMANCE.md 12 to 25).
"""

import functools
import os
import random

import numpy as np
import pytest

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition, install
from keytail.compact.map_phase import reading
from keytail.compact.producers import ActiveProducers
from keytail.compact.task import NO_REMOVAL_LIMIT
from keytail.compact.write_phase import rewrite
from keytail.config.producer_expiration import NEVER_MS
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format.batch import BATCH_TABLE
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.kernels.batches import OK, index_batches
from keytail.log import writer
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.key_scan import KeyScanner
from keytail.log.records.scan import RecordScanner
from tests.chance import SEED, draws
from tests.compact.logs import RandomLog, random_log, task_for, write_log
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.cleaner import Segment, clean
from tests.reference.indexing import index_files
from tests.reference.varints import longer_varint

NOW = 1_750_000_000_000


@pytest.fixture(params=["large chunks", "tiny chunks", "in pieces"])
def chunks(request, monkeypatch):
    """Use tiny chunks, arenas, portions and pieces, so that boundaries occur between any two batches and within
    batches.
    """
    if request.param == "in pieces":
        read_in_pieces(monkeypatch, records=random.Random(SEED).choice([1, 2, 3]))
    if request.param != "large chunks":
        monkeypatch.setattr(
            cleaner, "SegmentReader", functools.partial(SegmentReader, chunk_bytes=300, arena_bytes=200)
        )
        monkeypatch.setattr(rewrite, "RecordScanner", lambda: RecordScanner(3))
        monkeypatch.setattr(reading, "KeyScanner", lambda seed: KeyScanner(seed, 3))


def snapshot_entry(pid, last_offset, epoch, timestamp_ms=NOW):
    return ProducerEntry(
        producer_id=pid, epoch=epoch, last_sequence=1, last_offset=last_offset, offset_delta=0,
        timestamp_ms=timestamp_ms, coordinator_epoch=-1, current_txn_first_offset=-1,
    )  # fmt: skip


def write_snapshot(path, log, entries):
    with open(f"{path}/{log.log_end_offset:020d}.snapshot", "wb") as file:
        file.write(encode_snapshot(entries))
    return (log.log_end_offset,)


def files_of(result, suffix):
    outputs = [segment for group in result.groups for segment in group.segments]
    return {output.base_offset: next(f for f in output.files if f.suffix == suffix) for output in outputs}


def read(path, name):
    with open(f"{path}/{name}", "rb") as file:
        return file.read()


def same_but_for_compression(ours: bytes, theirs: bytes) -> bool:
    """Return whether two logs are equal except for compression."""

    def plain(batch):
        packed = batch.codec and batch.records
        return {
            k: v for k, v in vars(batch).items() if not (packed and k in ("size", "crc")) and k != "position"
        }

    return [plain(b) for b in decode_log(ours)] == [plain(b) for b in decode_log(theirs)]


@pytest.mark.long
@pytest.mark.parametrize("case", range(draws(120)))
def test_a_round_has_the_result_of_the_reference_model(case, chunks, tmp_path):
    rng = random.Random(SEED * 1000 + case)
    print("seed", SEED, "case", case)
    codecs = rng.choice([(0,), (0,), (0, 1, 2, 3, 4), (3,)])
    log = random_log(rng, NOW, codecs=codecs, keyless=rng.choice([0, 0, 0.1]))
    if len(log.segments) < 2:
        return
    path = str(tmp_path / "t-0")
    facts = write_log(path, log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = min(rng.choice([base, base, *log.batch_ends, rng.randint(base, end)]), end - 1)
    first_uncleanable = rng.choice([s.base_offset for s in log.segments if s.base_offset > first_dirty])
    max_entries = rng.choice([None, None, 1, 2, 7])
    config = {
        "segment_bytes": rng.choice([1, 500, 3000, 10**6]),
        "index_interval_bytes": rng.choice([0, 1, 200, 4096]),
        "delete_retention_ms": rng.choice([0, 1000, 2**63 - 1]),
    }
    active = {pid: state for pid, state in log.producers.items() if rng.random() < 0.7}
    snapshots = write_snapshot(path, log, [snapshot_entry(p, *state) for p, state in active.items()])
    removal_limit = rng.choice([NO_REMOVAL_LIMIT, rng.randint(base, end)])
    by_file_time = rng.random() < 0.3
    task = task_for(
        path, log, facts, NOW, first_dirty=first_dirty, first_uncleanable=first_uncleanable, config=config,
        snapshots=snapshots, map_max_entries=max_entries, drop_keyless=True, hash_seed=rng.randrange(2**64),
        removal_limit_offset=removal_limit, by_file_time=by_file_time,
    )  # fmt: skip
    model = clean(
        log.segments, first_dirty=first_dirty, first_uncleanable=first_uncleanable, now_ms=NOW,
        max_entries=max_entries or 10**6, producers=active, segment_bytes=config["segment_bytes"],
        index_interval_bytes=config["index_interval_bytes"],
        delete_retention_ms=config["delete_retention_ms"], removal_limit=removal_limit, by_file_time=by_file_time,
    )  # fmt: skip
    result = clean_partition(LOCAL, task)

    assert result.end_offset == model.end_offset
    assert [(g.base_offset, g.source_bases) for g in result.groups] == [
        (s.base_offset, s.source_bases) for s in model.segments
    ]
    for group, expected in zip(result.groups, model.segments, strict=True):
        contents = {file.suffix: read(path, file.name) for file in group.segments[0].files}
        assert len(group.segments) == 1
        assert same_but_for_compression(contents[".log"], expected.log)
        if codecs == (0,):
            assert contents[".log"] == expected.log
            assert contents[".index"] == expected.index
            assert contents[".timeindex"] == expected.time_index
        for file in group.segments[0].files:
            assert os.stat(f"{path}/{file.name}").st_mtime_ns == expected.mtime_ms * 10**6
            assert file.size_bytes == len(contents[file.suffix])
    install(LOCAL, task, result)
    left = sorted(n for n in os.listdir(path) if n.endswith(".log"))
    replaced = {b for s in model.segments for b in s.source_bases}
    kept = {s.base_offset for s in log.segments} - replaced | {s.base_offset for s in model.segments}
    assert left == [f"{b:020d}.log" for b in sorted(kept)]
    assert not [n for n in os.listdir(path) if n.endswith((".clean", ".cleaned", ".swap", ".deleted"))]
    before = {r.offset: r for s in log.segments for b in decode_log(s.log) for r in b.records}
    after = [r for n in left for b in decode_log(read(path, n)) for r in b.records]
    assert all(before[r.offset] == r for r in after)


def tiny(tmp_path, batches, *, active=b""):
    """Write a partition of one closed segment with `batches`, and an active one."""
    log = b"".join(batches)
    end = decode_log(log)[-1].last_offset + 1
    segments = [Segment(0, log, 0, 0, NOW - 5000), Segment(end, active, 0, 0, NOW)]
    path = str(tmp_path / "t-0")
    return RandomLog(segments, [], end, {}), path, write_log(path, segments)


def clean_tiny(tmp_path, batches, **fields):
    log, path, facts = tiny(tmp_path, batches, active=fields.pop("active", b""))
    task = task_for(path, log, facts, NOW, first_dirty=fields.pop("first_dirty", 0), **fields)
    return path, clean_partition(LOCAL, task)


def one(offset, key=b"k", value=b"v", **fields):
    return encode_batch([Rec(offset, NOW, key, value)], **fields)


@pytest.mark.parametrize("grouping", ["kafka", "measured"])
def test_a_segment_of_more_offsets_than_an_index_holds_is_split(tmp_path, grouping):
    offsets = [0, 5, 2**31 - 1, 2**31, 2**31 + 7, 2**32 + 100]
    batches = [one(offset, key=b"%d" % offset) for offset in offsets]
    path, result = clean_tiny(tmp_path, batches, grouping=grouping, config={"index_interval_bytes": 0})
    (group,) = result.groups
    assert [segment.base_offset for segment in group.segments] == [0, 2**31, 2**32 + 100]
    for base, file in files_of(result, ".log").items():
        log = read(path, file.name)
        assert [b.base_offset for b in decode_log(log)] == [o for o in offsets if base <= o < base + 2**31]
        index, time_index = index_files(log, base, 0)
        assert read(path, files_of(result, ".index")[base].name) == index
        assert read(path, files_of(result, ".timeindex")[base].name) == time_index


def test_keyless_records_are_refused_with_count_and_first_offset(tmp_path):
    batches = [one(0), one(1, key=None), one(2), one(3, key=None), one(4)]
    with pytest.raises(Refused, match="2 records without a key") as caught:
        clean_tiny(tmp_path / "a", batches)
    assert caught.value.offset == 1
    with pytest.raises(Refused, match="1 records without a key") as caught:  # here, the record is in the clean section
        clean_tiny(tmp_path / "b", batches[:3] + batches[4:], first_dirty=2)
    assert caught.value.offset == 1
    assert not [n for n in os.listdir(tmp_path / "b" / "t-0") if n.endswith(".clean")]
    _, result = clean_tiny(tmp_path / "c", batches, drop_keyless=True)
    assert result.records_after == 1


def test_the_first_keyless_record_is_that_of_the_first_segment_with_one(tmp_path):
    logs = {0: one(0), 1: one(1, key=None) + one(2, key=None), 3: one(3, key=None), 4: one(4)}
    segments = [Segment(base, log, 0, 0, NOW - 5000 + base) for base, log in logs.items()]
    log, path = RandomLog(segments, [], 5, {}), str(tmp_path / "t-0")
    with pytest.raises(Refused, match="3 records without a key") as caught:
        clean_partition(LOCAL, task_for(path, log, write_log(path, segments), NOW, first_dirty=0))
    assert caught.value.offset == 1


def test_a_keyless_record_after_the_mapped_range_is_accepted(tmp_path):
    batches = [one(0, key=b"a"), one(1, key=b"b"), one(2, key=None)]
    _, result = clean_tiny(tmp_path, batches, map_max_entries=1)
    assert result.end_offset == 1 and result.records_after == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "length -1", "length 0", "length max"])
def test_damage_is_reported_with_file_and_position_and_no_scratch_files_remain(tmp_path, damage):
    good = one(0)
    bad = bytearray(one(1))
    if damage == "flip":
        bad[65] ^= 1
    elif damage == "cut":
        del bad[-1:]
    else:
        value = {"length -1": -1, "length 0": 0, "length max": 2**31 - 1}[damage]
        bad[8:12] = value.to_bytes(4, "big", signed=True)
    log, path, _ = tiny(tmp_path, [good, one(1)])
    segments = [Segment(0, good + bytes(bad), 0, 0, NOW - 5000), log.segments[1]]
    facts = write_log(path, segments)
    with pytest.raises(CorruptLog) as caught:
        clean_partition(LOCAL, task_for(path, log, facts, NOW, first_dirty=0))
    assert caught.value.path == f"{path}/{0:020d}.log" and caught.value.byte_position == len(good)
    assert caught.value.offset == 1
    assert not [n for n in os.listdir(path) if n.endswith(".clean")]


@pytest.mark.parametrize(
    ("timestamp", "fields", "text"),
    [
        (NOW, {"producer_id": 7, "producer_epoch": -1, "base_sequence": 0}, "without an epoch or a sequence"),
        (NOW, {"producer_id": 7, "producer_epoch": 0, "base_sequence": -1}, "without an epoch or a sequence"),
        (-2, {}, "a timestamp below -1"),
    ],
)
def test_a_batch_that_cannot_be_rebuilt_is_reported(tmp_path, chunks, timestamp, fields, text):
    first = encode_batch([Rec(0, NOW, b"a", b"1"), Rec(1, NOW, b"b", b"2")])
    invalid = encode_batch([Rec(2, NOW, b"a", b"3"), Rec(3, timestamp, b"c", b"4")], **fields)
    with pytest.raises(CorruptLog, match=text) as caught:
        clean_tiny(tmp_path, [first, invalid, one(4, key=b"a")])
    assert (caught.value.byte_position, caught.value.offset) == (len(first), 2)
    assert not list((tmp_path / "t-0").glob("*.clean"))


def test_a_source_that_changed_since_the_plan_is_refused(tmp_path):
    log, path, facts = tiny(tmp_path, [one(0), one(1)])
    task = task_for(path, log, facts, NOW, first_dirty=0)
    result = clean_partition(LOCAL, task)
    os.utime(f"{path}/{0:020d}.log")
    with pytest.raises(Refused, match="changed since it was planned"):
        install(LOCAL, task, result)


def test_a_hash_other_than_that_of_the_plan_is_refused(tmp_path):
    with pytest.raises(Refused, match="planned with hash other-128"):
        clean_tiny(tmp_path, [one(0)], hash_name="other-128")


@pytest.mark.parametrize("first_ms", [-1, 0, NOW])
def test_the_first_retained_record_determines_the_base_timestamp_of_a_batch_in_pieces(tmp_path, monkeypatch, first_ms):
    read_in_pieces(monkeypatch, records=1)
    keys = (b"a", b"b", b"c", b"a", b"d")
    records = [Rec(i, first_ms if i == 1 else NOW + i, key, b"v" * 50) for i, key in enumerate(keys)]
    path, result = clean_tiny(tmp_path, [encode_batch(records)])
    [batch] = decode_log(read(path, files_of(result, ".log")[0].name))
    assert batch.base_timestamp == first_ms
    assert batch.records == tuple(records[1:])


def test_a_batch_that_has_its_horizon_is_copied(tmp_path):
    """The batch has overlong varints, which a rewrite would shorten."""
    records = [Rec(0, NOW, b"a", None), Rec(1, NOW, b"b", b"v")]
    log = encode_batch(records, delete_horizon_ms=NOW + 1, spell=longer_varint)
    dirty = encode_batch([Rec(2, NOW, b"c", b"v")])
    segments, path = [Segment(0, log), Segment(2, dirty), Segment(3, b"")], str(tmp_path / "t-0")
    task = task_for(path, RandomLog(segments, [], 3, {}), write_log(path, segments), NOW, first_dirty=2)
    result = clean_partition(LOCAL, task)
    assert read(path, files_of(result, ".log")[0].name) == log + dirty


def test_removed_tombstones_are_counted(tmp_path):
    tombstones = [Rec(0, NOW, b"a", None), Rec(1, NOW, b"b", None), Rec(2, NOW, b"c", b"v")]
    first = encode_batch(tombstones, delete_horizon_ms=NOW - 1)
    waiting = encode_batch([Rec(3, NOW, b"d", None), Rec(4, NOW, b"e", b"v")], delete_horizon_ms=NOW + 1)
    segments = [Segment(0, first + waiting), Segment(5, b"")]
    facts = write_log(str(tmp_path / "t-0"), segments)
    task = task_for(str(tmp_path / "t-0"), RandomLog(segments, [], 5, {}), facts, NOW, first_dirty=0)
    result = clean_partition(LOCAL, task)
    assert (result.tombstones_removed, result.records_after) == (2, 3)


def test_an_expired_producer_protects_no_batch(tmp_path):
    own = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 3}
    for k, (age_ms, kept) in enumerate([(10, 1), (10**9, 0)]):
        log, path, facts = tiny(tmp_path / str(k), [one(0, **own), one(1), one(2, key=b"x")])
        snapshots = write_snapshot(path, log, [snapshot_entry(5, 0, 0, NOW - age_ms)])
        result = clean_partition(LOCAL, task_for(path, log, facts, NOW, first_dirty=0, snapshots=snapshots))
        batches = decode_log(read(path, files_of(result, ".log")[0].name))
        assert [(b.base_offset, b.record_count) for b in batches] == [(0, 0)] * kept + [(1, 1), (2, 1)]


@pytest.mark.parametrize("case", range(draws(40)))
def test_if_no_producer_expires_a_round_retains_all_that_any_expiration_retains(case, tmp_path):
    """The law for an unknown producer.id.expiration.ms. What is retained in addition is at most one emptied batch of
    each producer."""
    rng = random.Random(SEED * 1000 + case)
    log = random_log(rng, NOW)
    path = str(tmp_path / "t-0")
    facts = write_log(path, log.segments)
    if len(facts) < 2:
        return
    ages_ms = {pid: rng.choice([0, 10, 1000]) for pid in log.producers}
    entries = [snapshot_entry(pid, *state, NOW - ages_ms[pid]) for pid, state in log.producers.items()]
    snapshots = write_snapshot(path, log, entries)

    def batches(expiration_ms):
        task = task_for(
            path, log, facts, NOW, first_dirty=log.segments[0].base_offset, snapshots=snapshots, drop_keyless=True,
            config={"producer_id_expiration_ms": expiration_ms}, attempt=str(expiration_ms),
        )  # fmt: skip
        made = files_of(clean_partition(LOCAL, task), ".log")
        found = [batch for file in made.values() for batch in decode_log(read(path, file.name))]
        return {batch.base_offset: {**vars(batch), "position": 0} for batch in found}

    expiration_ms = rng.choice([1, 11, 10**6])
    known, unknown = batches(expiration_ms), batches(NEVER_MS)
    assert {offset: batch for offset, batch in unknown.items() if offset in known} == known
    more = [batch for offset, batch in unknown.items() if offset not in known]
    producers = [batch["producer_id"] for batch in more]
    assert all(batch["record_count"] == 0 for batch in more)
    assert len(set(producers)) == len(producers)
    assert all(ages_ms[pid] >= expiration_ms for pid in producers)


def test_the_proof_finds_a_rewriter_that_ignores_a_producer(tmp_path, monkeypatch):
    monkeypatch.setattr(ActiveProducers, "ends_a_producer", lambda self, table: np.zeros(len(table), bool))
    own = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 3}
    log, path, facts = tiny(tmp_path, [one(0, **own), one(1), one(2, key=b"x")])
    snapshots = write_snapshot(path, log, [snapshot_entry(5, 0, 0)])
    with pytest.raises(KeytailError, match="the last batch of an active producer is not in the output") as caught:
        clean_partition(LOCAL, task_for(path, log, facts, NOW, first_dirty=0, snapshots=snapshots))
    assert caught.value.offset == 0
    assert not [n for n in os.listdir(path) if n.endswith(".clean")]


def test_without_a_snapshot_producers_are_replayed_after_an_unclean_stop_and_expired_after_a_clean_one(
    tmp_path,
):
    own = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 3}
    for k, clean_shutdown in enumerate([True, False]):
        path, result = clean_tiny(
            tmp_path / str(k), [one(0, **own), one(1), one(2, key=b"x")], clean_shutdown=clean_shutdown
        )
        batches = decode_log(read(path, files_of(result, ".log")[0].name))
        assert [b.base_offset for b in batches] == ([1, 2] if clean_shutdown else [0, 1, 2])


def measured(kept: list[int], limit: int) -> list[list[int]]:
    """Return the numbers of the source segments of each output. `kept` are the retained bytes of each source, at most
    `limit`.
    """
    outputs, size = [[0]], kept[0]
    for number, n in enumerate(kept[1:], 1):
        if size and size + n > limit:
            outputs.append([])
            size = 0
        outputs[-1].append(number)
        size += n
    return outputs


@pytest.mark.parametrize("case", range(draws(60)))
def test_measured_outputs_are_those_of_the_reference_rule(case, chunks, tmp_path):
    rng = random.Random(SEED * 1000 + case)
    print("seed", SEED, "case", case)
    log = random_log(rng, NOW)
    path = str(tmp_path / "t-0")
    facts = write_log(path, log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    alone = clean(log.segments, first_dirty=base, first_uncleanable=end, now_ms=NOW, segment_bytes=1)
    kept = [len(s.log) for s in alone.segments]
    limit = max([1, *kept]) + rng.randint(0, sum(kept))
    config = {"segment_bytes": limit, "delete_retention_ms": 86_400_000}
    task = task_for(path, log, facts, NOW, first_dirty=base, config=config, grouping="measured", drop_keyless=True)
    result = clean_partition(LOCAL, task)
    outputs = [segment for group in result.groups for segment in group.segments]
    # The reference model merges sources without bytes even above the limit.
    bases = [[b for n in numbers for b in alone.segments[n].source_bases] for numbers in measured(kept, limit)]
    assert [list(group.source_bases) for group in result.groups] == bases
    assert [segment.base_offset for segment in outputs] == [b[0] for b in bases]
    written = b"".join(read(path, files_of(result, ".log")[segment.base_offset].name) for segment in outputs)
    assert written == b"".join(s.log for s in alone.segments)
    for segment in outputs:
        contents = {file.suffix: read(path, file.name) for file in segment.files}
        assert len(contents[".log"]) <= limit
        index, time_index = index_files(contents[".log"], segment.base_offset, 64)
        assert (contents[".index"], contents[".timeindex"]) == (index, time_index)
    install(LOCAL, task, result)
    left = sorted(n for n in os.listdir(path) if n.endswith(".log"))
    assert left == [f"{s.base_offset:020d}.log" for s in outputs] + [f"{end:020d}.log"]


def test_a_source_larger_than_the_limit_continues_in_the_next_output(tmp_path):
    batches = [one(n, key=b"%d" % n, value=b"v" * 100) for n in range(10)]
    size = len(batches[0])
    path, result = clean_tiny(tmp_path, batches, grouping="measured", config={"segment_bytes": 3 * size})
    (group,) = result.groups
    assert [segment.base_offset for segment in group.segments] == [0, 3, 6, 9]
    assert group.source_bases == (0,) and result.limits_met == 3
    logs = [read(path, files_of(result, ".log")[base].name) for base in (0, 3, 6, 9)]
    assert logs == [b"".join(batches[n : n + 3]) for n in (0, 3, 6, 9)]


def test_with_kafkas_grouping_outputs_may_exceed_segment_bytes_but_not_2_gib(tmp_path, monkeypatch):
    batches = [one(n, key=b"%02d" % n, value=None) for n in range(12)]  # tombstones, which get a delete horizon
    size = len(batches[0])
    config = {"segment_bytes": 12 * size}
    _, result = clean_tiny(tmp_path / "grown", batches, config=config)
    assert len(result.groups[0].segments) == 1
    grown = files_of(result, ".log")[0].size_bytes
    assert grown > 12 * size and result.limits_met == 0
    for module in (cleaner, writer):
        monkeypatch.setattr(module, "MAX_SEGMENT_BYTES", grown // 2)
    _, result = clean_tiny(tmp_path / "cut", batches, config=config)
    assert [segment.base_offset for segment in result.groups[0].segments] == [0, 6]
    assert [file.size_bytes for file in files_of(result, ".log").values()] == [grown // 2] * 2
    assert result.limits_met == 1


def test_an_index_at_its_limit_closes_the_output(tmp_path):
    batches = [one(n, key=b"%d" % n, value=b"v" * 100) for n in range(10)]
    config = {"segment_index_bytes": 36, "index_interval_bytes": 0}
    path, result = clean_tiny(tmp_path, batches, grouping="kafka", config=config)
    assert result.limits_met > 0
    for base, file in files_of(result, ".index").items():
        assert file.size_bytes <= 36
        log = read(path, files_of(result, ".log")[base].name)
        times = read(path, files_of(result, ".timeindex")[base].name)
        assert index_files(log, base, 0) == (read(path, file.name), times)


def test_with_delete_in_the_policy_an_output_spans_at_most_segment_ms(tmp_path):
    segments, offset = [], 0
    for age_ms in (5000, 4000, 3000, 2000):
        log = encode_batch([Rec(offset, NOW - age_ms, b"%d" % offset, b"v")])
        segments.append(Segment(offset, log, 0, 0, NOW - age_ms))
        offset += 1
    segments.append(Segment(offset, b"", 0, 0, NOW))
    log = RandomLog(segments, [], offset, {})
    path = str(tmp_path / "t-0")
    facts = write_log(path, segments)
    for policy, expected in (({"compact"}, [(0, 1, 2, 3)]), ({"compact", "delete"}, [(0, 1), (2, 3)])):
        config = {"segment_ms": 1500, "cleanup_policy": frozenset(policy)}
        task = task_for(path, log, facts, NOW, first_dirty=0, config=config, grouping="measured")
        result = clean_partition(LOCAL, task)
        assert [group.source_bases for group in result.groups] == expected
        for name in os.listdir(path):
            if name.endswith(".clean"):
                os.unlink(f"{path}/{name}")


@pytest.mark.parametrize("first_dirty", [0, 6], ids=["dirty", "clean"])
def test_a_batch_that_ends_above_the_base_of_the_next_segment_is_reported(tmp_path, first_dirty):
    bases = {0: (0, 1), 2: (2, 3, 4), 4: (6, 7), 10: (10,)}
    segments = [
        Segment(base, encode_batch([Rec(offset, NOW, b"%d" % offset, b"v") for offset in offsets]), 0, 0, NOW)
        for base, offsets in bases.items()
    ]
    path = str(tmp_path / "t-0")
    task = task_for(path, RandomLog(segments, [], 11, {}), write_log(path, segments), NOW, first_dirty=first_dirty)
    with pytest.raises(CorruptLog, match="the batch ends at offset 4, but the next segment begins at 4") as caught:
        clean_partition(LOCAL, task)
    assert (caught.value.path, caught.value.byte_position) == (f"{path}/{2:020d}.log", 0)
    assert not list(tmp_path.rglob("*.clean"))


def test_rows_of_written_batches_equal_those_parsed_from_their_bytes(monkeypatch, tmp_path):
    """Writers and indexes use these rows of copied, rebuilt and emptied batches, and do not parse the output."""
    append, found_rows = writer.OutputWriter.append, 0

    def checked(self, data, table):
        nonlocal found_rows
        found, out = np.zeros(len(table), BATCH_TABLE), np.zeros(4, np.int64)
        index_batches(np.ascontiguousarray(data), len(data), 0, -1, found, out)
        assert out[:3].tolist() == [len(table), len(data), OK]
        for name in BATCH_TABLE.names:
            if name != "position":  # the position is assigned by the writer
                assert found[name].tolist() == table[name].tolist(), name
        found_rows += len(table)
        append(self, data, table)

    monkeypatch.setattr(writer.OutputWriter, "append", checked)
    rng, number = random.Random(SEED), 0
    while number < 20 or found_rows < 50:  # most batches of a log are dropped
        log = random_log(rng, NOW, codecs=(0, 1), segments=rng.randint(2, 6))
        path = str(tmp_path / f"t-{number}")
        facts = write_log(path, log.segments)
        first_dirty = log.segments[0].base_offset
        clean_partition(LOCAL, task_for(path, log, facts, NOW, first_dirty=first_dirty, drop_keyless=True))
        number += 1
