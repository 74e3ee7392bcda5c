"""Rebuilt indexes equal those of the reference model, in one pass or in slices, and valid files are unchanged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.log.fs import LOCAL
from keytail.rebuild_index import indexes
from keytail.rebuild_index.indexes import SegmentResult, SegmentTask, Slice, finish, index_segment, scan, slices_of
from tests.chance import SEED, draws
from tests.rebuild_index.logs import INTERVALS, random_segment, restarted_indexes, task_of, write_segment
from tests.reference.batches import decode_log
from tests.reference.indexing import index_files

BASE = 1000


def made(task: SegmentTask, result: SegmentResult) -> tuple[bytes, bytes]:
    """Return the contents of the offset index and the time index after the run."""
    files = []
    for verdict in result.files:
        name = verdict.clean.name if verdict.clean else f"{task.base_offset:020d}{verdict.suffix}"
        files.append(Path(task.partition_path, name).read_bytes())
        if verdict.clean:
            assert len(files[-1]) == verdict.clean.size_bytes
            Path(task.partition_path, name).unlink()
    return files[0], files[1]


def states(result: SegmentResult) -> list[str]:
    return [verdict.state for verdict in result.files]


@pytest.mark.parametrize("interval", INTERVALS)
def test_missing_files_are_rebuilt_as_by_the_model(tmp_path: Path, interval: int) -> None:
    rng = random.Random(f"{SEED} {interval}")
    log = random_segment(rng, BASE)
    write_segment(tmp_path, BASE, log)
    task = task_of(tmp_path, BASE, interval, execute=True)
    result = index_segment(LOCAL, task)
    assert states(result) == ["missing", "missing"]
    assert made(task, result) == index_files(log, BASE, interval)
    assert (result.batches, result.end_position) == (60, len(log))
    assert result.next_offset == decode_log(log)[-1].last_offset + 1


@pytest.mark.parametrize("case", range(draws(60)))
def test_joined_slices_equal_one_pass(tmp_path: Path, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that divides the segment may be exact, of a restarted broker, of another interval, or damaged."""
    rng = random.Random(f"{SEED} {case}")
    monkeypatch.setattr(indexes, "CHUNK_BYTES", rng.choice([100, 700, 1 << 20]))
    log = random_segment(rng, BASE, batches=rng.randint(1, 120), equal=rng.random() < 0.3)
    interval = rng.choice(INTERVALS)
    cut_by = rng.choice(["exact", "restarted", "other interval", "anything"])
    if cut_by == "exact":
        index, _ = index_files(log, BASE, interval)
    elif cut_by == "restarted":
        index, _ = restarted_indexes(rng, log, BASE, interval)
    else:
        index, _ = index_files(log, BASE, rng.choice([0, 77, 500]))
    if cut_by == "anything":
        index = rng.randbytes(8) if rng.random() < 0.3 else spoiled(rng, index)
    write_segment(tmp_path, BASE, log, index=index)
    task = task_of(tmp_path, BASE, interval, execute=True, rebuild_all=True)
    slices = slices_of(LOCAL, task, rng.choice([200, 1000, 5000]))
    assert [item.start for item in slices] == [0, *(item.end for item in slices[:-1])]
    assert slices[-1].end == len(log)
    result = finish(LOCAL, task, [scan(LOCAL, task, item) for item in slices])
    assert made(task, result) == index_files(log, BASE, interval)
    assert (result.batches, result.end_position) == (len(decode_log(log)), len(log))


def spoiled(rng: random.Random, index: bytes) -> bytes:
    data = bytearray(index)
    for _ in range(rng.randint(1, 3)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_slices_by_an_exact_index_join_without_another_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = random_segment(random.Random(1), BASE, batches=200)
    write_segment(tmp_path, BASE, log, **dict(zip(("index", "time_index"), index_files(log, BASE, 60), strict=True)))
    task = task_of(tmp_path, BASE, 60)
    slices = slices_of(LOCAL, task, 2000)
    assert len(slices) > 5
    scans = [scan(LOCAL, task, item) for item in slices]
    monkeypatch.setattr(indexes, "_chunks", None)  # fails if anything is read again
    assert states(finish(LOCAL, task, scans)) == ["sound", "sound"]


def test_slices_that_do_not_join_are_read_again_by_one_task(tmp_path: Path) -> None:
    log = random_segment(random.Random(2), BASE)
    write_segment(tmp_path, BASE, log)
    task = task_of(tmp_path, BASE, 60, execute=True)
    batch = decode_log(log)[30]
    wrong = [
        (Slice(0, batch.position + 1), Slice(batch.position + 1, len(log), batch.last_offset)),
        (Slice(0, batch.position), Slice(batch.position, len(log), batch.last_offset + 1)),
        (Slice(0, batch.position), Slice(decode_log(log)[32].position, len(log), decode_log(log)[32].last_offset)),
    ]
    for slices in wrong:
        result = finish(LOCAL, task, [scan(LOCAL, task, item) for item in slices])
        assert made(task, result) == index_files(log, BASE, 60)


@pytest.mark.parametrize("case", range(draws(12)))
def test_files_of_a_restarted_broker_or_another_interval_are_valid(tmp_path: Path, case: int) -> None:
    rng = random.Random(f"{SEED} {case}")
    log, interval = random_segment(rng, BASE), rng.choice([0, 60, 200])
    ours = restarted_indexes(rng, log, BASE, interval) if case % 2 else index_files(log, BASE, 1000)
    write_segment(tmp_path, BASE, log, index=ours[0], time_index=ours[1])
    assert states(index_segment(LOCAL, task_of(tmp_path, BASE, interval))) == ["sound", "sound"]
    task = task_of(tmp_path, BASE, interval, rebuild_all=True, execute=True)
    assert made(task, index_segment(LOCAL, task)) == index_files(log, BASE, interval)


def test_each_kind_of_wrong_file_is_found(tmp_path: Path) -> None:
    log = random_segment(random.Random(3), BASE)
    index, times = index_files(log, BASE, 60)
    cases = {
        "is not a multiple of 8": (index + b"\0", times),
        "is not in ascending order": (index + b"\0" * 80, times),
        "is wrong: no batch begins at byte position": (index[:4] + (77).to_bytes(4, "big") + index[8:], times),
        "relative offset": (index, times[:19] + bytes([times[19] - 1]) + times[20:]),
        "its last timestamp is -1": (index, b""),
        "its last timestamp is": (index, times[:-12]),
        "entry 1 is not in ascending order": (index, b"\0" * 24),
        "is after the last batch": (index + b"\x7f" * 8, times),
        "is not a multiple of 12": (index, times[:-1]),
    }
    for why, (item, other) in cases.items():
        write_segment(tmp_path, BASE, log, index=item, time_index=other)
        result = index_segment(LOCAL, task_of(tmp_path, BASE, 60))
        assert "wrong" in states(result), why
        assert any(why in verdict.why for verdict in result.files), (why, [v.why for v in result.files])
        assert states(result).count("wrong") == 1, why
    assert not list(tmp_path.glob("*.clean"))


def test_an_index_without_entries_is_wrong_if_the_log_is_large(tmp_path: Path) -> None:
    log = random_segment(random.Random(3), BASE, batches=40)
    _, times = index_files(log, BASE, 4096)
    write_segment(tmp_path, BASE, log, index=b"", time_index=times)
    assert states(index_segment(LOCAL, task_of(tmp_path, BASE, 4096))) == ["sound", "sound"]
    log = random_segment(random.Random(3), BASE, batches=12_000, equal=True)
    _, times = index_files(log, BASE, 4096)
    write_segment(tmp_path, BASE, log, index=b"", time_index=times)
    assert states(index_segment(LOCAL, task_of(tmp_path, BASE, 4096))) == ["wrong", "sound"]


def test_files_in_use_may_have_space_after_their_entries(tmp_path: Path) -> None:
    log = random_segment(random.Random(4), BASE)
    index, times = index_files(log, BASE, 60)
    write_segment(tmp_path, BASE, log, index=index + b"\0" * 800, time_index=times[:-12] + b"\0" * 1200)
    assert states(index_segment(LOCAL, task_of(tmp_path, BASE, 60, is_in_use=True))) == ["sound", "sound"]
    assert states(index_segment(LOCAL, task_of(tmp_path, BASE, 60))) == ["wrong", "wrong"]


def test_a_torn_segment_is_indexed_up_to_the_damage_only_on_request(tmp_path: Path) -> None:
    log = random_segment(random.Random(5), BASE)
    last = decode_log(log)[-1]
    torn = log[: last.position + last.size - 1]
    write_segment(tmp_path, BASE, torn)
    result = index_segment(LOCAL, task_of(tmp_path, BASE, 60, execute=True))
    assert (result.files, result.end_position) == ((), last.position)
    assert result.damage is not None and result.damage.byte_position == last.position
    task = task_of(tmp_path, BASE, 60, execute=True, torn_tail=True)
    result = index_segment(LOCAL, task)
    assert made(task, result) == index_files(log[: last.position], BASE, 60)
    assert result.next_offset == decode_log(log)[-2].last_offset + 1


def test_batches_of_other_segments_are_corrupt(tmp_path: Path) -> None:
    log = random_segment(random.Random(6), BASE)
    write_segment(tmp_path, BASE, log)
    with pytest.raises(CorruptLog, match="outside of its segment"):
        index_segment(LOCAL, task_of(tmp_path, BASE, 60, end_offset=BASE + 10))
    write_segment(tmp_path, BASE + 9, log)
    with pytest.raises(CorruptLog, match="outside of its segment"):
        index_segment(LOCAL, task_of(tmp_path, BASE + 9, 60))


@pytest.mark.parametrize("slice_bytes", [1 << 30, 1000])
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, slice_bytes: int) -> None:
    log = random_segment(random.Random(7), BASE)
    index, times = index_files(log, BASE, 60)
    write_segment(tmp_path, BASE, log, index=index, time_index=times)

    def run(segment_index_bytes: int) -> SegmentResult:
        task = task_of(tmp_path, BASE, 60, segment_index_bytes=segment_index_bytes)
        return finish(LOCAL, task, [scan(LOCAL, task, item) for item in slices_of(LOCAL, task, slice_bytes)])

    enough = max(len(index), (len(times) // 12 + 1) * 12)
    assert states(run(enough)) == ["sound", "sound"]
    with pytest.raises(Refused, match=r"segment\.index\.bytes"):
        run(len(index) // 2)


def test_a_changed_segment_is_refused(tmp_path: Path) -> None:
    log = random_segment(random.Random(8), BASE)
    write_segment(tmp_path, BASE, log)
    task = task_of(tmp_path, BASE, 60)
    os.utime(tmp_path / f"{BASE:020d}.log", ns=(1, 1))
    with pytest.raises(Refused, match="changed since it was planned"):
        index_segment(LOCAL, task)
