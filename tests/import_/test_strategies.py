"""The strategies of an import: without Spark, on Spark without rows in the JVM, and through Spark's rows. All give the
same bytes and the same import id. The choice between the strategies is also tested.

KEYTAIL_SEED repeats one random source.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.errors import KeytailError, Refused
from keytail.format.cells import opened
from keytail.format.names import parse_file_name
from keytail.import_ import cells as import_cells
from keytail.import_ import driver as import_
from keytail.import_ import on_spark
from keytail.import_ import slices as import_slices
from keytail.import_.cells import Scratch, load, pack_slice, store_slice
from keytail.import_.command import ImportRow
from keytail.import_.slices import SourceFile, _look_into, cut, rows_needed, rows_needed_by_types
from keytail.import_.source import Columns, Source
from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.import_.test_driver import HEADERS, found, in_this_session, log_dir, run_import, segment_files  # noqa: F401
from tests.reference.murmur2 import partition as partition_of

pytestmark = pytest.mark.spark
PARTITIONS = 3
NOW_MS = 1_800_000_000_000
ROLES = {"key": "key", "value": "value", "timestamp": "timestamp", "headers": "headers", "partition": "partition"}
Row = tuple[bytes | None, bytes | None, list[dict[str, Any]] | None, int | None, int | None]


def seeds(count: int) -> list[int]:
    return [SEED + number for number in range(count)]


def random_rows(rng: random.Random, count: int) -> list[Row]:
    def text(most: int) -> bytes:
        return "".join(rng.choices("abcäß", k=rng.randrange(most))).encode()

    def headers() -> list[dict[str, Any]] | None:
        if rng.random() < 0.3:
            return None
        return [{"key": f"h{n}", "value": rng.choice((None, b"", b"x"))} for n in range(rng.randrange(3))]

    return [
        (
            None if rng.random() < 0.2 else text(6),
            None if rng.random() < 0.1 else text(rng.choice((5, 50))),
            headers(),
            None if rng.random() < 0.1 else 1_700_000_000_000 + rng.randrange(10**6),
            None if rng.random() < 0.7 else rng.randrange(PARTITIONS),
        )
        for _ in range(count)
    ]


def write_file(path: Path, rows: list[Row], rng: random.Random, times: pa.DataType, kind: pa.DataType) -> None:
    """Write a file of the source. Arrow's types differ between files, but not Parquet's. Some row groups are empty."""
    scale = 1000 if times == pa.timestamp("us", "UTC") else 1

    def strings(at: int) -> pa.Array:
        array = pa.array([row[at] for row in rows], pa.binary()).cast(kind)
        large = pa.large_string() if kind == pa.string() else pa.large_binary()
        return rng.choice((array, array.cast(large), array.dictionary_encode()))

    stamps = [None if row[3] is None else row[3] * scale + rng.randrange(scale) for row in rows]
    table = pa.table(
        {
            "key": strings(0),
            "value": strings(1),
            "headers": pa.array([row[2] for row in rows], HEADERS),
            "timestamp": pa.array(stamps, times),
            "partition": pa.array([row[4] for row in rows], pa.int16()),
        }
    )
    with pq.ParquetWriter(path, table.schema, compression=rng.choice(("none", "zstd"))) as writer:
        at = 0
        while at < len(table):
            size = rng.choice((0, 1, 40, 300))
            writer.write_table(table.slice(at, size))
            at += size


@pytest.mark.parametrize("odd_names", [True, False])
@pytest.mark.parametrize("seed", seeds(1))
def test_all_strategies_give_the_same_bytes(
    seed: int,
    odd_names: bool,
    run_import: Callable[..., list[ImportRow]],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "source"
    folder.mkdir()
    times = rng.choice((pa.int64(), pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC")))
    kind = rng.choice((pa.binary(), pa.string()))
    expected: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    sizes = [rng.randrange(1, 500), 0, rng.randrange(1, 2000)]
    # the files in the order of their URIs
    for number, name in enumerate(sorted(["b", "a %c", "ä"] if odd_names else ["b", "a c", "a+@~d"])):
        rows = random_rows(rng, sizes[number])
        write_file(folder / f"{name}.parquet", rows, rng, times, kind)
        for row, (key, value, headers, at, own) in enumerate(rows):
            turn = (number + row) % PARTITIONS
            target = own if own is not None else turn if key is None else partition_of(key, PARTITIONS)
            pairs = tuple((item["key"].encode(), item["value"]) for item in headers or ())
            expected[target].append((key, value, pairs, NOW_MS if at is None else at))
    monkeypatch.setattr(import_, "time", SimpleNamespace(time_ns=lambda: NOW_MS * 10**6))
    source = Source(str(folder), "parquet")
    reported: list[Any] = []
    real, dry = on_spark.slices_of, []
    strategies = ("past", "through") if odd_names else ("past", "through", "here")
    for strategy in strategies:
        def chosen(*given: Any, strategy: str = strategy) -> Any:
            reported.append(real(*given))
            return reported[-1] if strategy == "past" else "this test asks for it"

        monkeypatch.setattr(on_spark, "slices_of", chosen)
        here = {"master": None} if strategy == "here" else {}
        if strategy == "here":
            monkeypatch.setattr(import_, "session_of_run", lambda *_, **__: pytest.fail("Spark was started"))
        dry.append(run_import(source, execute=False, **here))
        rows_reported = run_import(source, codec="lz4", batch_bytes=900, segment_bytes=9000, **here)
        assert {row.status for row in rows_reported} <= {"imported", "unchanged"}, rows_reported
        (tmp_path / "logs").rename(tmp_path / strategy)
        log_dir(tmp_path / "logs")
    assert all(isinstance(item, import_slices.Slices) for item in reported), reported
    given = {number: [(rec.key, rec.value, rec.headers, rec.timestamp) for rec in recs]
             for number, recs in found(tmp_path, "past").items()}  # fmt: skip
    assert given == {number: expected[number] for number in range(PARTITIONS)}, f"seed {seed}"
    for strategy, rows_of_it in zip(strategies, dry, strict=True):
        assert segment_files(tmp_path / "past") == segment_files(tmp_path / strategy), f"seed {seed}"
        assert dry[0] == rows_of_it, f"seed {seed}"  # the rows contain the import id
    assert [row.records for row in dry[0]] == [len(expected[number]) for number in range(PARTITIONS)]


def split_with_python(path: Path, **sizes: int) -> list[tuple[int, int, list[tuple[Any, ...]]]]:
    """Return (partition, task, records) of each cell that the tasks pack, in the order of the source."""
    columns = {name: name for name in pq.read_schema(path).names}
    slices = cut([_look_into(str(path), columns)], 1)
    cells = []
    for item in slices:
        for task, place, partition, packed in pack_slice(item, columns, PARTITIONS, (2,) if "passed" in sizes else ()):
            records = opened(packed)
            rows = zip(records.keys.to_list(), records.timestamps_ms.tolist(), strict=True)
            cells.append((place, partition, task, list(rows)))
    assert len({cell[0] for cell in cells}) == len(cells)
    return [cell[1:] for cell in sorted(cells, key=lambda cell: cell[0])]


@pytest.mark.parametrize("seed", [1, *seeds(7)])
def test_cells_contain_all_records_of_the_source_in_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(import_cells, "PART_BYTES", rng.choice((1, 500, 1 << 20)))
    monkeypatch.setattr(import_slices, "MIN_SLICE_BYTES", rng.choice((1, 2000)))
    keys = [None if rng.random() < 0.3 else b"%d" % rng.randrange(50) for _ in range(rng.randrange(1, 400))]
    own = [rng.choice((None, None, 0, 1, 2)) for _ in keys]
    key_column = pa.array(keys, pa.binary())  # all keys or partitions may be null, so that no type can be inferred
    own_column = pa.array(own, pa.int64())
    table = pa.table({"key": key_column, "value": key_column, "timestamp": range(len(keys)), "partition": own_column})
    pq.write_table(table, tmp_path / "s.parquet", row_group_size=rng.randrange(1, 100))
    got: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for partition, task, rows in split_with_python(tmp_path / "s.parquet"):
        assert task == partition
        got[partition] += rows
    expected: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for number, (key, given) in enumerate(zip(keys, own, strict=True)):
        turn = number % PARTITIONS if key is None else partition_of(key, PARTITIONS)
        expected[turn if given is None else given].append((key, number))
    assert got == expected, f"seed {seed}"
    passed = split_with_python(tmp_path / "s.parquet", passed=2)
    assert {partition for partition, _, _ in passed} == set(expected) - {2}


def test_a_task_without_records_gets_empty_cells(tmp_path: Path) -> None:
    own = [0, 4, -1, 2**40, 1, 7, 4]
    table = pa.table({"key": [b"k"] * 7, "value": [b"v"] * 7, "partition": pa.array(own, pa.int64())})
    pq.write_table(table, tmp_path / "s.parquet")
    cells = split_with_python(tmp_path / "s.parquet")
    assert [(partition, task, len(rows)) for partition, task, rows in cells] == [
        (4, 1, 0), (-1, 2, 0), (0, 0, 1), (1, 1, 1)
    ]  # fmt: skip


def test_a_large_row_group_is_never_entirely_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_cells, "PART_BYTES", 1 << 20)
    values = [b"%d" % number + bytes(990) for number in range(60_000)]
    table = pa.table({"key": pa.nulls(len(values), pa.binary()), "value": values})
    pq.write_table(table, tmp_path / "s.parquet", use_dictionary=False, compression="zstd", row_group_size=len(values))
    del table, values
    columns = {"key": "key", "value": "value"}
    [item] = cut([_look_into(str(tmp_path / "s.parquet"), columns)], 2)
    before, most, records = pa.total_allocated_bytes(), 0, 0
    for _, _, _, packed in pack_slice(item, columns, PARTITIONS, ()):
        most = max(most, pa.total_allocated_bytes() - before)
        records += len(opened(packed))
    assert records == 60_000
    assert most < 12 << 20, f"{most} bytes of 60 MB were in memory"


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    table = pa.table({"key": [b"k"], "value": [b"v"]})
    pq.write_table(table, path)
    columns = {"key": "key", "value": "value"}
    [item] = cut([_look_into(str(path), columns)], 1)
    os.utime(path, (1, 1))
    with pytest.raises(Refused, match="the file has another size or modification time than when"):
        list(pack_slice(item, columns, PARTITIONS, ()))


def test_scratch_files_of_cells_are_read_in_any_order_and_removed_after_an_error(tmp_path: Path) -> None:
    columns = {"key": "key", "value": "value"}
    for name, count in (("a", 300), ("b", 20)):
        keys = [b"%s%d" % (name.encode(), number) for number in range(count)]
        pq.write_table(pa.table({"key": keys, "value": keys}), tmp_path / f"{name}.parquet")
    files = [_look_into(str(tmp_path / f"{name}.parquet"), columns) for name in "ab"]
    slices = [item for file in files for item in cut([file], 1)]
    folder = tmp_path / "t-0"
    folder.mkdir()
    scratch = Scratch([str(folder)], "run")
    stored = [
        cell
        for number, item in enumerate(slices)
        for cell in store_slice(LOCAL, item, columns, PARTITIONS, (), scratch.path(item, f"a{number}"))
    ]
    assert len({cell.path for cell in stored}) == 2
    assert {parse_file_name(file.name).kind for file in folder.iterdir()} == {"scratch"}
    random.shuffle(stored)
    got = sorted(key for _, records in load(LOCAL, stored) for key in records.keys.to_list())
    assert got == sorted(key for name in "ab" for key in pq.read_table(tmp_path / f"{name}.parquet")["key"].to_pylist())
    os.truncate(stored[0].path, stored[0].position + stored[0].size_bytes - 1)
    with pytest.raises(KeytailError, match="is too short"):
        list(load(LOCAL, stored[:1]))
    for file in folder.iterdir():
        file.unlink()
    os.utime(tmp_path / "b.parquet", (1, 1))
    with pytest.raises(Refused):
        store_slice(LOCAL, slices[1], columns, PARTITIONS, (), scratch.path(slices[1], "a"))
    assert not list(folder.iterdir())


PARQUET = Source("s", "parquet")
NAMES = {"key": "key", "value": "value", "partition": "region"}


@pytest.mark.parametrize(
    ("source", "uris", "why"),
    [
        (PARQUET, ["file:///a/b.parquet", "file:/c%20d/year=2026/b.parquet"], None),
        (Source("s", "delta"), [], "is delta"),
        (Source("s", "json"), [], "is json"),
        (Source("s", "parquet", Columns(), ("at",)), [], "--sort-by is given"),
        (PARQUET, ["file:///a/b.parquet", "hdfs://host/a/b.parquet"], "not at a local path"),
        (PARQUET, ["file:///a/Region=3/b.parquet"], "column Region is a partition column"),
        (PARQUET, ["file:///a/%6bey=3/b.parquet"], "column key is a partition column"),
    ],
)
def test_formats_read_through_rows_are_recognised_before_a_file_is_opened(
    source: Source, uris: list[str], why: str | None
) -> None:
    reported = rows_needed(source, uris, NAMES)
    assert reported is None if why is None else why in str(reported)


def test_a_column_with_a_dot_is_read_through_rows() -> None:
    assert "a.b has a dot" in str(rows_needed(PARQUET, [], {"key": "a.b"}))


DICTIONARY = pa.dictionary(pa.int8(), pa.string())
PLAIN = {"key": pa.binary(), "value": pa.string(), "timestamp": pa.int64(), "headers": HEADERS, "partition": pa.int32()}
KINDS = {"key": "binary", "value": "string", "timestamp": "bigint", "headers": "array", "partition": "int"}


@pytest.mark.parametrize(
    ("role", "kind", "why"),
    [
        ("value", pa.string(), None),
        ("value", pa.large_string(), None),
        ("value", DICTIONARY, None),
        ("timestamp", pa.timestamp("ms", "UTC"), None),
        ("timestamp", pa.timestamp("us", "Europe/Berlin"), None),
        ("timestamp", pa.uint32(), None),
        ("value", pa.string_view(), "value has the type string_view"),
        ("key", pa.binary(3), "key has the type fixed_size_binary"),
        ("timestamp", pa.timestamp("us"), "timestamp has the type timestamp[us] (timestamp INT64 local"),
        ("timestamp", pa.timestamp("ns", "UTC"), "timestamp has the type timestamp[ns"),
        ("timestamp", pa.duration("ms"), "timestamp has the type duration"),
        ("partition", pa.uint64(), "partition has the type uint64"),
        ("headers", pa.large_list(HEADERS.value_type), "headers has the type large_list"),
        ("headers", pa.list_(pa.struct({"key": DICTIONARY, "value": pa.binary()})), "headers has the type list"),
    ],
)
def test_some_types_are_read_through_rows(role: str, kind: pa.DataType, why: str | None, tmp_path: Path) -> None:
    schema = pa.schema(PLAIN | {role: kind})
    pq.write_table(schema.empty_table(), tmp_path / "s.parquet")
    kinds = KINDS | ({role: "timestamp"} if "timestamp[" in str(kind) else {})
    reported = rows_needed_by_types([_look_into(str(tmp_path / "s.parquet"), ROLES)], kinds)
    assert reported is None if why is None else why in str(reported)


def test_timestamps_of_96_bits_and_different_files_are_read_through_rows(tmp_path: Path) -> None:
    table = pa.schema(PLAIN | {"timestamp": pa.timestamp("ns", "UTC")}).empty_table()
    pq.write_table(table, tmp_path / "old.parquet", use_deprecated_int96_timestamps=True)
    old = _look_into(str(tmp_path / "old.parquet"), ROLES)
    assert "INT96" in str(rows_needed_by_types([old], KINDS | {"timestamp": "timestamp"}))
    files: list[SourceFile] = []
    few = {"key": pa.binary(), "value": pa.string()}
    for number, schema in enumerate((PLAIN, PLAIN | {"timestamp": pa.int32()}, few)):
        pq.write_table(pa.schema(schema).empty_table(), tmp_path / f"{number}.parquet")
        files.append(_look_into(str(tmp_path / f"{number}.parquet"), ROLES))
    assert rows_needed_by_types(files[:1], KINDS) is None
    for other in files[1:]:
        why = rows_needed_by_types([files[0], other], KINDS)
        assert "the column for timestamp is not the same in all files of the source" in str(why)


@pytest.mark.parametrize("how", ["a partition folder", "96 bits", "no footer"])
def test_sources_that_tasks_cannot_read_are_read_through_rows(
    how: str, run_import: Callable[..., list[ImportRow]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    folder = tmp_path / "source" / ("partition=1" if how == "a partition folder" else "")
    folder.mkdir(parents=True)
    times = pa.array([1_700_000_000_000_000_000 + n * 10**6 for n in range(50)], pa.timestamp("ns", "UTC"))
    table = pa.table({"key": [b"%d" % n for n in range(50)], "value": [b"v"] * 50, "timestamp": times})
    pq.write_table(table, folder / "a.parquet", coerce_timestamps=None if how == "96 bits" else "ms",
                   use_deprecated_int96_timestamps=how == "96 bits")  # fmt: skip
    if how == "no footer":
        monkeypatch.setattr(import_slices, "_look_into", lambda *_, **__: 1 // 0)
    strategies: list[Any] = []
    real = on_spark.source_of
    monkeypatch.setattr(on_spark, "source_of", lambda *given: strategies.append(real(*given)) or strategies[-1])
    assert {row.status for row in run_import(Source(str(tmp_path / "source"), "parquet"))} <= {"imported", "unchanged"}
    why = {"a partition folder": "directory names", "96 bits": "INT96", "no footer": "ZeroDivisionError"}
    assert why[how] in strategies[0].description
    got = found(tmp_path)
    assert sorted(rec.timestamp for recs in got.values() for rec in recs) == [1_700_000_000_000 + n for n in range(50)]
    assert how != "a partition folder" or len(got[1]) == 50
