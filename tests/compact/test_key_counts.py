"""Counts of records per key, in the map and in shards, compared with a Counter over the records on disk."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition
from keytail.compact.fan_out import keys as fan_out_keys
from keytail.compact.fan_out.stages import Sizes, fan_out
from keytail.compact.map_phase import hottest_keys
from keytail.compact.map_phase import offset_map as offset_map_module
from keytail.compact.map_phase.key_counts import (
    HOTTEST,
    MAX_KEY_BYTES,
    Counted,
    KeyCounts,
    digest_of,
    hot_key,
    key_text,
    merged,
    size_text,
)
from keytail.compact.map_phase.offset_map import SLOT_BYTES, OffsetMap
from keytail.compact.proof.keys import MIN_MEMORY_BYTES, most_keys
from keytail.compact.task import CleaningTask, NeedsFanOut
from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from tests.chance import SEED, draws
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_stages import some_log, write_indexes
from tests.compact.fan_out.test_transactions import inside
from tests.compact.test_passes import files_of, random_task, run_passes
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference import key_counts as model

Item = tuple[int, int, int, int]  # low and high word, ordinal, number of records

words = st.one_of(st.integers(0, 3), st.sampled_from([0, 1 << 63, 2**64 - 1]), st.integers(0, 2**64 - 1))
many = st.one_of(st.integers(1, 5), st.sampled_from([2**31, model.MAX_COUNTED - 1, model.MAX_COUNTED]))
items_strategy = st.lists(st.tuples(words, words, st.integers(-1, 2**40), many), max_size=80)


def put(offset_map: OffsetMap, items: list[Item], *, one_each: bool) -> int:
    low = np.array([item[0] for item in items], np.uint64)
    high = np.array([item[1] for item in items], np.uint64)
    ordinals = np.array([item[2] for item in items], np.int64)
    if one_each:
        return offset_map.put_all(low, high, ordinals, len(items))
    return offset_map.put_all(low, high, ordinals, len(items), np.array([item[3] for item in items], np.uint32))


@settings(deadline=None, max_examples=draws(300))
@given(
    rounds=st.lists(items_strategy, min_size=1, max_size=5),
    one_each=st.booleans(),
    max_entries=st.integers(1, 200),
    slots=st.integers(2, 300),
    most=st.integers(0, 6),
)
def test_a_map_counts_keys_like_a_counter(
    rounds: list[list[Item]], one_each: bool, max_entries: int, slots: int, most: int
) -> None:
    """The map may grow or be full, and its memory may have old contents."""
    offset_map = OffsetMap(slots * (SLOT_BYTES + 4) * 3 // 2, max_entries, counting=True)
    offset_map_without = OffsetMap(slots * SLOT_BYTES * 3 // 2, offset_map.max_entries)
    counts: Counter[tuple[int, int]] = Counter()
    last: dict[tuple[int, int], int] = {}
    for items in rounds:
        done = put(offset_map, items, one_each=one_each)
        assert done == put(offset_map_without, items, one_each=True)
        for low, high, ordinal, times in items[:done]:
            if ordinal >= 0:
                number = counts[low, high] + (1 if one_each else times)
                counts[low, high] = min(number, model.MAX_COUNTED)
                last[low, high] = ordinal
        offset_map.check()
    assert offset_map.used == offset_map_without.used == len(counts)
    found = offset_map.counted(most)
    assert (found.keys, found.records) == model.by_size(counts.values())
    assert sum(found.records) == sum(counts.values())
    expected = sorted(((counts[key], last[key]) for key in counts if counts[key] > 1), reverse=True)
    assert list(found.hottest) == expected[:most]
    offset_map.forget_counts()
    assert not offset_map.is_counting
    assert put(offset_map, rounds[0], one_each=True) <= len(rounds[0])
    assert offset_map.counted(3) == Counted((0,) * model.SIZES, (0,) * model.SIZES, ())


def test_counts_are_retained_when_the_map_grows() -> None:
    memory = 6 << 20
    offset_map = OffsetMap(memory, counting=True)
    first, n = len(offset_map.slots), offset_map.max_entries
    rng = np.random.default_rng(7)
    low, high = rng.integers(0, 2**64, n + 1, np.uint64), rng.integers(0, 2**64, n + 1, np.uint64)
    assert offset_map.put_all(low[:99], high[:99], np.arange(99), 99) == 99
    assert offset_map.put_all(low, high, np.arange(n + 1), n + 1) == n
    assert len(offset_map.slots) > 4 * first
    offset_map.check()
    found = offset_map.counted(3)
    assert (found.keys[:3], found.records[:3]) == ((n - 99, 99, 0), (n - 99, 198, 0))
    assert found.hottest == ((2, 98), (2, 97), (2, 96))
    took = offset_map.slots.nbytes + offset_map.counts.nbytes
    assert took * 3 // 2 <= memory + 3 * (SLOT_BYTES + 4)
    assert n < OffsetMap(memory).max_entries
    offset_map.clear()
    assert offset_map.counted(3).hottest == ()
    offset_map.check()


@pytest.mark.parametrize("memory", [4 << 20, (1 << 26) + 7, 3 << 30])
def test_counting_does_not_require_fan_out_earlier(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same memory, the proof's table is full before a counting map is."""
    monkeypatch.setattr(offset_map_module, "_FIRST_SLOTS", 4)  # do not allocate the memory of the map
    assert memory >= MIN_MEMORY_BYTES
    assert OffsetMap(memory, counting=True).max_entries > most_keys(memory)


def test_a_count_does_not_exceed_its_maximum() -> None:
    offset_map = OffsetMap(1 << 16, counting=True)
    for times in (model.MAX_COUNTED - 1, 7, 1):
        put(offset_map, [(1, 1, 5, times)], one_each=False)
    put(offset_map, [(1, 1, 9, 0)], one_each=True)
    assert offset_map.counted(1).hottest == ((model.MAX_COUNTED, 9),)
    assert offset_map.counted(1).records[-1] == model.MAX_COUNTED


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=200), st.integers(1, 8))
def test_counts_of_parts_without_common_keys_are_added(written: list[tuple[int, int]], most: int) -> None:
    """Each key is in one part. The key with the most records in a part need not be the hottest of all parts."""
    records = [(b"%d" % key, place) for place, (key, _) in enumerate(written)]
    parts = []
    for part in range(4):
        own = [record for record in records if int(record[0]) % 4 == part]
        top = [(number, place) for number, place, _ in model.hottest(own, most)]
        parts.append(Counted(*model.by_size(Counter(key for key, _ in own).values()), tuple(top)))
    whole = merged(parts, most)
    assert (whole.keys, whole.records) == model.by_size(Counter(key for key, _ in records).values())
    assert list(whole.hottest) == [(number, place) for number, place, _ in model.hottest(records, most)]


# Key counts of a partition


def logs_of(path: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted(Path(path).glob("*.log"))]


def expected_of(logs: Iterable[bytes], task: CleaningTask, end: int) -> KeyCounts:
    records = model.records_of(logs, task.first_dirty_offset, end)
    sizes = model.by_size(Counter(key for key, _ in records).values())
    top = model.hottest(records, task.hottest_keys)
    hot = [hot_key(number, offset, key, show=task.show_keys) for number, offset, key in top]
    return KeyCounts(*sizes, tuple(hot))


@pytest.mark.parametrize("case", range(draws(40)))
def test_the_hottest_keys_of_a_log_are_counted(
    case: int, fast_dir: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Logs use all codecs, are read in one or several chunks, and may have more keys than fit into the map. Counting
    does not change the output.

    In a round of several passes, the first pass counts the keys for all passes.
    """
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    if case % 2:
        monkeypatch.setattr(cleaner, "SegmentReader", partial(SegmentReader, chunk_bytes=300, arena_bytes=200))
    plain = random_task(rng, str(fast_dir / "t-0"), rng.choice(["kafka", "measured"]))
    task = replace(plain, hottest_keys=rng.choice([1, 3, HOTTEST]), show_keys=rng.random() < 0.5)
    if rng.random() < 0.5:
        task = replace(task, max_scratch_bytes=rng.choice([1, 3000]))
    logs = logs_of(task.partition_path)
    other = replace(plain, partition_path=str(fast_dir / "other"))
    shutil.copytree(task.partition_path, other.partition_path)
    run_passes(other)
    results = run_passes(task)
    assert results[0].key_counts == expected_of(logs, task, results[0].end_offset)
    assert [result.key_counts for result in results[1:]] == [None] * (len(results) - 1)
    assert results[0].key_counts is not None
    assert sum(results[0].key_counts.keys) == results[-1].keys
    for file in (fast_dir / "t-0").glob("*.clean"):
        file.unlink()
    for file in (fast_dir / "other").glob("*.clean"):
        file.unlink()
    assert files_of(task.partition_path) == files_of(other.partition_path)


def test_nothing_is_counted_unless_requested(tmp_path: Path) -> None:
    task = some_log(tmp_path / "t-0", keys=50)
    assert clean_partition(LOCAL, task).key_counts is None
    sweep_scratch(tmp_path / "t-0")
    assert fan_out(LOCAL, task, InProcess(tmp_path / "cells"), Sizes(1500, 3)).key_counts is None


def sweep_scratch(path: Path) -> None:
    for file in path.glob("*.clean"):
        file.unlink()


@pytest.mark.parametrize("case", range(draws(25)))
def test_a_fan_out_has_the_counts_of_one_task(
    case: int, fast_dir: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Counts do not depend on slices, shards, or the size of the tables of a slice."""
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    monkeypatch.setattr(fan_out_keys, "_DEDUP_BYTES", rng.choice([1, 300, 12 << 20]))
    monkeypatch.setattr(fan_out_keys, "_MIN_KEYS_AT_ONCE", rng.choice([1, 7, 1 << 10]))
    task = random_task(rng, str(fast_dir / "t-0"), "measured")
    task = replace(task, map_max_entries=None, hottest_keys=rng.choice([1, 4, HOTTEST]), show_keys=rng.random() < 0.5)
    if rng.random() < 0.8:
        write_indexes(task)
    sizes = Sizes(slice_bytes=rng.choice([1, 100, 1000, 10**6]), shards=rng.choice([1, 2, 5, 40]))
    bound = rng.choice([None, 1])
    engine = InProcess(fast_dir / "cells", rng=rng)
    result = fan_out(LOCAL, replace(task, max_scratch_bytes=bound), engine, sizes)
    logs = logs_of(task.partition_path)
    assert result.key_counts == expected_of(logs, task, task.first_uncleanable_offset)
    stages = [tasks for name, tasks in engine.stages if name == "hottest keys"]
    assert len(stages) == 1
    assert stages[0] <= task.hottest_keys


@pytest.mark.parametrize("first_dirty", [0, 2, 3, 4, 5, 6, 8, 10, 11, 13, 15])
def test_records_of_aborted_transactions_are_not_counted(first_dirty: int, tmp_path: Path) -> None:
    task = replace(inside(tmp_path / "t-0", first_dirty), hottest_keys=5, show_keys=True)
    alone = clean_partition(LOCAL, task).key_counts
    sweep_scratch(tmp_path / "t-0")
    sizes = Sizes(slice_bytes=1, shards=3)
    assert fan_out(LOCAL, task, InProcess(tmp_path / "cells"), sizes).key_counts == alone
    assert alone is not None
    if first_dirty == 0:  # counted: k at 5 and 8, u twice, q at 4 and 7; aborted: k at 0, x at 10
        assert [tuple(item)[:2] for item in alone.hottest] == [(2, 8), (2, 7), (2, 3)]
        assert [item.key for item in alone.hottest] == [b"k", b"q", b"u"]
        assert sum(alone.records) == 9


def test_more_keys_than_one_task_can_map_are_counted_by_fan_out(tmp_path: Path) -> None:
    task = replace(some_log(tmp_path / "t-0", keys=10**9), fan_out="auto", hottest_keys=3, map_memory_bytes=1 << 16)
    with pytest.raises(NeedsFanOut):
        clean_partition(LOCAL, task)
    result = fan_out(LOCAL, task, InProcess(tmp_path / "cells"), Sizes(1500, 20))
    assert result.key_counts == expected_of(logs_of(task.partition_path), task, result.end_offset)


def test_only_the_chunks_of_the_hottest_keys_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment is read before the segment with the key's last record."""
    task = replace(some_log(tmp_path / "t-0", keys=300), hottest_keys=1)
    read: list[int] = []

    class Reader(SegmentReader):
        def chunks_without_prefetch(self, path, log_bytes, *, start=0, torn_tail=False):  # type: ignore[no-untyped-def]
            for chunk in super().chunks_without_prefetch(path, log_bytes, start=start, torn_tail=torn_tail):
                read.append(len(chunk.raw))
                yield chunk

    monkeypatch.setattr(cleaner, "SegmentReader", partial(Reader, chunk_bytes=5000))
    monkeypatch.setattr(hottest_keys, "_read", watched := Watched(read, hottest_keys._read))
    assert clean_partition(LOCAL, task).key_counts is not None
    assert watched.read_bytes <= 5000


class Watched:
    """Wraps a function that reads chunks, and counts their bytes."""

    def __init__(self, read, function) -> None:  # type: ignore[no-untyped-def]
        self.read, self.function, self.read_bytes = read, function, 0

    def __call__(self, *arguments):  # type: ignore[no-untyped-def]
        before = sum(self.read)
        answer = self.function(*arguments)
        self.read_bytes += sum(self.read) - before
        return answer


def test_a_segment_with_fewer_records_than_counted_is_reported(tmp_path: Path) -> None:
    task = some_log(tmp_path / "t-0")
    part = hottest_keys.HotPart(task, (0, 0), ((2, 10**6),))
    with pytest.raises(CorruptLog, match="fewer records than when its keys were counted"):
        hottest_keys.read_hottest(LOCAL, part, "0")


# Keys and counts as text


@pytest.mark.parametrize(("size", "text"), [(0, "1"), (1, "2"), (2, "3 to 4"), (3, "5 to 8"), (11, "1,025 to 2,048")])
def test_key_count_sizes_are_printed_as_ranges(size: int, text: str) -> None:
    assert size_text(size) == text
    low, high = (int(part.replace(",", "")) for part in (text.split(" to ") * 2)[:2])
    for count in (low, high):
        assert model.by_size([count])[0][size] == 1


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"customer-42", '"customer-42"'),
        (b"", '""'),
        ("kätzchen 🐈".encode(), '"kätzchen 🐈"'),
        (b"\x00\x00\x00\x07", "hex 00000007"),
        (b"\x1b[31mred", "hex 1b5b33316d726564"),
        ("a\u202eb\nc".encode(), '"a\\u202eb\\x0ac"'),
        ("\x85".encode(), "hex c285"),
        (b"caf\xe9", "hex 636166e9"),
        (b"k" * MAX_KEY_BYTES, '"' + "k" * MAX_KEY_BYTES + '"'),
        (b"k" * 5000, '"' + "k" * MAX_KEY_BYTES + "… (5,000 bytes)"),
        ("é".encode() * 100 + b"k", '"' + "é" * 60 + "… (201 bytes)"),
        (b"k" + "é".encode() * 100, '"k' + "é" * 59 + "… (201 bytes)"),
        (b"k" + "🐈".encode() * 100, '"k' + "🐈" * 29 + "… (401 bytes)"),
        (b"\xff" * 200, "hex " + "ff" * MAX_KEY_BYTES + "… (200 bytes)"),
        (b"k" * 119 + b"\xff" * 81, "hex " + "6b" * 119 + "ff… (200 bytes)"),
    ],
)
def test_keys_are_printed_as_text_or_hexadecimal(key: bytes, text: str) -> None:
    assert key_text(hot_key(2, 7, key, show=True)) == text


def test_a_hidden_key_is_printed_nowhere() -> None:
    hot = hot_key(2, 7, b"customer-42", show=False)
    assert b"customer-42" not in b"".join(repr(part).encode() for part in hot)
    assert key_text(hot) == ""


@pytest.mark.parametrize("key", [b"customer-42", b"", b"\x00\xff\n", b"x" * 5000])
def test_the_hash_of_a_key_is_that_of_a_shell_command(key: bytes) -> None:
    done = subprocess.run("sha256sum | cut -c-16", shell=True, input=key, stdout=subprocess.PIPE, check=True)
    assert digest_of(key) == done.stdout.decode().strip() == hashlib.sha256(key).hexdigest()[:16]


