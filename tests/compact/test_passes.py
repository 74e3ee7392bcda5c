"""Rounds of several passes write the bytes of a single pass, for any limit of scratch space, and each pass is proven
before it is installed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.map_phase import offset_map
from keytail.compact.proof import keys as proof_keys
from keytail.compact.task import NO_REMOVAL_LIMIT, CleaningResult, CleaningTask
from keytail.compact.write_phase import passes
from keytail.compact.write_phase.passes import least_scratch_bytes, scratch_bytes
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.kernels.rewriting import records as kernels
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import SegmentFacts
from tests.chance import SEED, draws
from tests.compact.logs import RandomLog, random_log, task_for, write_log
from tests.compact.test_cleaner import snapshot_entry, write_snapshot
from tests.in_pieces import read_in_pieces
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.batches import Rec, crc32c, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Segment
from tests.reference.legacy import decode_any_log, encode_single

NOW = 1_750_000_000_000


def files_of(path: str | Path) -> dict[str, tuple[bytes, int]]:
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in Path(path).iterdir()
        if file.suffix != ".snapshot"
    }


def run_passes(task: CleaningTask, fs: FileSystem = LOCAL) -> list[CleaningResult]:
    """Run and install all passes, remove files between passes as the driver does, and return the results."""
    results = []
    while True:
        result = clean_partition(fs, replace(task, attempt=str(len(results))))
        install(fs, task, result)
        results.append(result)
        if result.rest is None:
            return results
        task = next_pass(task, result)


def random_task(rng: random.Random, path: str, grouping: str) -> CleaningTask:
    log = random_log(rng, NOW, codecs=rng.choice([(0,), (0, 1, 2, 3, 4)]), segments=rng.randint(3, 12))
    facts = write_log(path, log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = min(rng.choice([base, base, *log.batch_ends, rng.randint(base, end)]), end - 1)
    config = {
        "segment_bytes": rng.choice([1, 500, 3000, 10**6]),
        "index_interval_bytes": rng.choice([0, 1, 200, 4096]),
        "delete_retention_ms": rng.choice([0, 1000, 2**63 - 1]),
        "cleanup_policy": frozenset(rng.choice([("compact",), ("compact", "delete")])),
        "segment_ms": rng.choice([1000, 10**9]),
    }
    active = {pid: state for pid, state in log.producers.items() if rng.random() < 0.7}
    snapshots = write_snapshot(path, log, [snapshot_entry(p, *state) for p, state in active.items()])
    return task_for(
        path, log, facts, NOW, first_dirty=first_dirty, config=config, snapshots=snapshots, drop_keyless=True,
        map_max_entries=rng.choice([None, None, None, 3, 7]), hash_seed=rng.randrange(2**64), grouping=grouping,
        removal_limit_offset=rng.choice([NO_REMOVAL_LIMIT, rng.randint(base, end)]),
    )  # fmt: skip


@pytest.mark.parametrize("case", range(draws(40)))
def test_passes_of_any_size_write_the_bytes_of_one_pass(case: int, fast_dir: Path) -> None:  # noqa: F811
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    grouping = rng.choice(["kafka", "measured", "measured"])
    task = random_task(rng, str(fast_dir / "t-0"), grouping)
    bound = rng.choice([1, 1, 1000, 3000, 10**4, scratch_bytes(task)])
    shutil.copytree(fast_dir / "t-0", fast_dir / "other")
    [whole] = run_passes(replace(task, partition_path=str(fast_dir / "other")))
    results = run_passes(replace(task, max_scratch_bytes=bound))
    if bound == 1 and grouping == "kafka":
        assert len(results) == max(1, len(whole.groups)), "each group must be a pass"
    for file in list((fast_dir / "t-0").glob("*.clean")):
        assert ".survivors." in file.name or ".proof." in file.name
        file.unlink()
    assert files_of(fast_dir / "t-0") == files_of(fast_dir / "other")
    sources = [group.source_bases for result in results for group in result.groups]
    assert sources == [group.source_bases for group in whole.groups]
    assert replace(results[-1], groups=(), phases_s={}) == replace(whole, groups=(), phases_s={})
    assert [source for result in results for source in result.sources] == list(whole.sources)


def rec(offset: int, key: bytes | None, value: bytes | None = b"v") -> Rec:
    return Rec(offset, NOW - 1000, key, value, ())


def task_of(path: Path, segments: list[list[bytes]], first_dirty: int, **fields: Any) -> CleaningTask:
    """Write a log of these segments, of which the last is active. Each other segment is a group and a pass."""
    sources, offset = [], 0
    for batches in segments:
        log = b"".join(batches)
        sources.append(Segment(offset, log, 0, 0, NOW - 5000))
        offset = max([offset, *(batch.last_offset + 1 for batch in decode_any_log(log))])
    facts = write_log(str(path), sources)
    log = RandomLog(sources, [], offset, {})
    config = {"segment_bytes": 1, **fields.pop("config", {})}
    return task_for(
        str(path), log, facts, NOW, first_dirty=first_dirty, config=config, max_scratch_bytes=1, **fields
    )  # fmt: skip


ACTIVE = encode_batch([rec(90, b"z")])


def test_problems_in_the_segments_of_later_passes_are_found_before_anything_is_replaced(tmp_path: Path) -> None:
    """The clean section has a record without a key, or a damaged batch with a valid checksum."""
    batches = [[encode_batch([rec(0, b"a")])], [encode_batch([rec(1, None)])], [encode_batch([rec(2, b"a")])], [ACTIVE]]
    keyless = task_of(tmp_path / "t-0", batches, 2)
    with pytest.raises(Refused, match=r"without a key.*offset 1"):
        clean_partition(LOCAL, keyless)
    assert not list((tmp_path / "t-0").glob("*.clean"))
    damaged = bytearray(encode_batch([rec(1, b"b")]))
    damaged[64] ^= 2  # change the offset delta of the record, with a valid checksum
    damaged[17:21] = crc32c(bytes(damaged[21:])).to_bytes(4, "big")
    twice = encode_batch([rec(1, b"b"), rec(1, b"c")])
    before_the_first = encode_batch([rec(0, b"b")], base_offset=1, last_offset=1)
    for number, spoiled in enumerate((bytes(damaged), twice, before_the_first), 1):
        batches[1] = [spoiled]
        task = task_of(tmp_path / f"t-{number}", batches, 2)
        with pytest.raises(CorruptLog, match=f"{1:020d}.log"):
            clean_partition(LOCAL, task)
        assert not list((tmp_path / f"t-{number}").glob("*.clean"))


@pytest.mark.parametrize("encode", [lambda record: encode_batch([record]), encode_single], ids=["batch", "message"])
def test_only_dirty_records_of_later_passes_justify_removals_and_they_must_be_retained(
    encode: Callable[[Rec], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [[encode(rec(0, b"a"))], [encode(rec(1, b"a"))], [encode(rec(2, b"b"))], [ACTIVE]]
    task = task_of(tmp_path / "t-0", batches, 1)
    first = clean_partition(LOCAL, task)
    install(LOCAL, task, first)
    lose(monkeypatch, 0, 1)
    with pytest.raises(KeytailError, match=r"latest record of its key is not in the output.*offset 1"):
        clean_partition(LOCAL, replace(next_pass(task, first), attempt="b"))
    with pytest.raises(KeytailError, match=r"latest record of its key is not in the output.*offset 0"):
        clean_partition(LOCAL, task_of(tmp_path / "t-1", batches, 2))


def test_aborted_records_of_later_passes_justify_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last offset of a batch decides which marker ends the batch's transaction."""
    producer = {"producer_id": 1, "producer_epoch": 0}
    later = [
        encode_batch([rec(10, b"a"), rec(11, b"b")], base_sequence=0, transactional=True, **producer),
        encode_marker(12, NOW, commit=False, **producer),
        encode_batch([rec(13, b"c")], base_sequence=2, transactional=True, **producer),
        encode_marker(14, NOW, commit=True, **producer),
    ]
    segments = [[encode_batch([rec(0, b"a")])], later, [ACTIVE]]
    run_passes(task_of(tmp_path / "t-0", segments, 0))
    lose(monkeypatch, 0)
    with pytest.raises(KeytailError, match=r"latest record of its key is not in the output.*offset 0"):
        clean_partition(LOCAL, task_of(tmp_path / "t-1", segments, 0))


def test_markers_of_later_passes_justify_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has the key of a COMMIT marker's record."""
    marker = encode_marker(10, NOW, commit=True, producer_id=1, producer_epoch=0)
    [control] = decode_log(marker)[0].records
    segments = [[encode_batch([rec(0, control.key)])], [marker], [ACTIVE]]
    run_passes(task_of(tmp_path / "t-0", segments, 0))
    lose(monkeypatch, 0)
    with pytest.raises(KeytailError, match=r"latest record of its key is not in the output.*offset 0"):
        clean_partition(LOCAL, task_of(tmp_path / "t-1", segments, 0))


def test_batches_of_later_passes_that_are_read_in_pieces_are_not_compared_with_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of the first pass ends with a rebuilt batch of two records, as many as the next batch has."""
    first = encode_batch([rec(0, b"a"), rec(1, b"b"), rec(2, b"c")])
    segments = [[first], [encode_batch([rec(10, b"a"), rec(11, b"d")])], [ACTIVE]]
    read_in_pieces(monkeypatch)
    results = run_passes(task_of(tmp_path / "t-0", segments, 0))
    assert len(results) == 2
    output = decode_log((tmp_path / "t-0" / f"{0:020d}.log").read_bytes())
    assert [record.offset for batch in output for record in batch.records] == [1, 2]


def test_a_pass_refuses_state_that_has_changed_since_the_previous_pass(tmp_path: Path) -> None:
    segments = [[encode_batch([rec(n, b"a")])] for n in range(3)]
    task = task_of(tmp_path / "t-0", [*segments, [ACTIVE]], 0)
    first = clean_partition(LOCAL, task)
    install(LOCAL, task, first)
    assert first.rest is not None
    for file in (first.rest.survivors, first.rest.proof):
        path = tmp_path / "t-0" / file.name
        data = path.read_bytes()
        for wrong in (data[:-1], data[:8] + bytes([data[8] ^ 1]) + data[9:], data[:-1] + bytes([data[-1] ^ 1]), b""):
            path.write_bytes(wrong)
            with pytest.raises(KeytailError, match="has changed since it was written"):
                clean_partition(LOCAL, replace(next_pass(task, first), attempt="b"))
        path.write_bytes(data)
        left = {found.name for found in (tmp_path / "t-0").glob("*.clean")}
        assert left == {first.rest.survivors.name, first.rest.proof.name}


def lose(monkeypatch: pytest.MonkeyPatch, *offsets: int) -> None:
    """Make the rewriter drop the batches at these offsets, or copy the batch at n if -n is given."""
    decide_rows = Rewriter._decide_rows

    def wrong(self: Rewriter, chunk: Any, *arguments: int) -> Any:
        rows = decide_rows(self, chunk, *arguments)
        for offset in offsets:
            rows.action[chunk.table["base_offset"] == abs(offset)] = kernels.DROP if offset >= 0 else kernels.COPY
        return rows

    monkeypatch.setattr(Rewriter, "_decide_rows", wrong)


EXPIRED = {"delete_horizon_ms": NOW - 1}


@pytest.mark.parametrize(
    ("wrong", "in_round", "text"),
    [
        ((2,), 2, "latest record of its key is not in the output"),
        ((0,), 0, "latest record of its key is not in the output"),
        ((-1, 4), 4, "a tombstone was removed before an older record of its key"),
        ((3,), 3, "latest record of its key is not in the output"),
    ],
)
def test_the_proof_continues_across_passes(
    wrong: tuple[int, ...], in_round: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [
        encode_batch([rec(0, b"a")]),
        encode_batch([rec(1, b"t")]),
        encode_batch([rec(2, b"b")]),
        encode_batch([rec(3, b"c")]),
        encode_batch([rec(4, b"t", None)], **EXPIRED),
        encode_batch([rec(5, b"e")]),
    ]
    task = task_of(tmp_path / "t-0", [*([batch] for batch in batches), [ACTIVE]], 0)
    run_passes(task)
    task = task_of(tmp_path / "t-1", [*([batch] for batch in batches), [ACTIVE]], 0)
    lose(monkeypatch, *wrong)
    number = 0
    while number < in_round:
        result = clean_partition(LOCAL, replace(task, attempt=str(number)))
        install(LOCAL, task, result)
        task, number = next_pass(task, result), number + 1
    with pytest.raises(KeytailError, match=text) as failed:
        clean_partition(LOCAL, replace(task, attempt="last"))
    assert f"offset {abs(wrong[-1])}" in str(failed.value)


@pytest.mark.parametrize("grouping", ["kafka", "measured"])
def test_no_space_is_needed_for_segments_that_are_already_replaced(grouping: Any, tmp_path: Path) -> None:
    """The first group is the largest; a later pass needs space only for the remaining groups."""
    values = [b"v" * 5000, b"v" * 700, b"v" * 300]
    segments = [[encode_batch([rec(n, b"k%d" % n, value)])] for n, value in enumerate(values)]
    task = task_of(tmp_path / "t-0", [*segments, [ACTIVE]], 0, grouping=grouping)
    sizes = [segment.log_bytes for segment in task.segments]
    needs = [least_scratch_bytes(task)]
    while (result := clean_partition(LOCAL, replace(task, attempt=str(len(needs))))).rest is not None:
        install(LOCAL, task, result)
        task = next_pass(task, result)
        needs.append(least_scratch_bytes(task))
        assert scratch_bytes(task) == sum(sizes[len(needs) - 1 : 3]) + (1 << 20)
    if grouping == "kafka":
        assert needs == [size + (1 << 20) for size in sizes[:3]]
    assert len(needs) > 1
    assert needs == sorted(set(needs), reverse=True)


def test_space_is_reserved_twice_for_a_source_that_may_exceed_an_output(tmp_path: Path) -> None:
    task = task_of(tmp_path / "t-0", [[encode_batch([rec(0, b"a")])], [ACTIVE]], 0, config={"segment_bytes": 1000})
    for index_bytes, time_index_bytes, once in ((None, None, 70), (8, 12, 90)):
        segment = SegmentFacts(0, 70, 0, index_bytes, time_index_bytes, None, 0, 0)
        assert [passes._needed_bytes(task, segment, size) for size in (930, 931)] == [once, once + 70]


@pytest.mark.parametrize("per_batch", [1, 50])
def test_space_is_reserved_for_saved_state(per_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved state is largest if all keys are distinct and the pass ends before the dirty section."""
    monkeypatch.setattr(passes, "_UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(offset_map, "_FIRST_SLOTS", 16)
    monkeypatch.setattr(proof_keys, "_FIRST_SLOTS", 2)
    monkeypatch.setattr(passes, "_MARGIN_BYTES", 2000)  # the margin for data other than arrays
    segments = [
        [
            encode_batch([rec(n, b"%d" % n, b"v" * 100) for n in range(first, first + per_batch)])
            for first in range(start, start + 400, per_batch)
        ]
        for start in range(0, 1200, 400)
    ]
    task = task_of(tmp_path / "t-0", [*segments, [encode_batch([rec(2000, b"z")])]], 800, grouping="kafka")
    rest = clean_partition(LOCAL, task).rest
    assert rest is not None
    assert rest.survivors.size_bytes > 10_000
    least = least_scratch_bytes(task)
    assert least < scratch_bytes(task)
    written = sum(file.stat().st_size for file in (tmp_path / "t-0").glob("*.clean"))
    assert written <= least
    assert least_scratch_bytes(replace(task, map_memory_bytes=1000)) < least, "a small map must need less space"


def test_batches_larger_than_the_initial_output_buffer_are_written(tmp_path: Path) -> None:
    large = b"v" * (3 << 19)
    first = encode_batch([rec(0, b"a"), rec(1, b"b", large)])
    task = task_of(tmp_path / "t-0", [[first + encode_batch([rec(2, b"a", large)])], [ACTIVE]], 0)
    run_passes(task)
    left = decode_log((tmp_path / "t-0" / f"{0:020d}.log").read_bytes())
    assert [(record.offset, record.value) for batch in left for record in batch.records] == [(1, large), (2, large)]


def test_later_passes_end_where_the_map_was_full(tmp_path: Path) -> None:
    """The map becomes full inside a batch from which an older record is removed."""
    end = encode_batch([rec(1, b"b"), rec(2, b"b"), rec(3, b"c"), rec(4, b"d")])
    task = task_of(tmp_path / "t-0", [[encode_batch([rec(0, b"a")])], [end], [ACTIVE]], 0, map_max_entries=3)
    results = run_passes(task)
    assert [result.end_offset for result in results] == [4, 4]
    left = decode_log((tmp_path / "t-0" / f"{1:020d}.log").read_bytes())
    assert [record.offset for batch in left for record in batch.records] == [2, 3, 4]
