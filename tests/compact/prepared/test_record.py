"""The record of a preparation is read as it was written, and damaged records are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact.prepared.record import Basis, Output, Record, Source, decode_record, encode_record, record_name
from keytail.compact.task import CleaningResult
from keytail.config.compaction import CompactionConfig
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment

RUN = "p1a2b"


def a_record(base: int = 5) -> Record:
    files = tuple(
        CleanFile(suffix, names.scratch_file(base, RUN, "h1", suffix), 100 + n, "ab" * 16)
        for n, suffix in enumerate((names.LOG, names.INDEX, names.TIME_INDEX))
    )
    group = GroupOutput((base, base + 10), (OutputSegment(base, files),))
    result = CleaningResult(
        end_offset=base + 20, groups=(group,), segments_before=3, segments_after=2, bytes_before=1000, bytes_after=400,
        records_before=20, records_after=8, tombstones_removed=1, markers_removed=0, keys=7,
    )  # fmt: skip
    basis = Basis(
        cleaner_checkpoint=None, log_start_offset=base, log_end_offset=base + 25, leader_epochs=((0, 0), (3, base)),
        config=CompactionConfig(cleanup_policy=frozenset({"compact", "delete"}), delete_retention_ms=77),
        message_format="unknown", by_file_time=False, drop_keyless=True, removal_limit_offset=names.MAX_OFFSET,
    )  # fmt: skip
    sources = tuple(Source(b, 500, 1_700_000_000_000_000_000 + b, 12 + b, "cd" * 16) for b in group.source_bases)
    outputs = tuple(Output(file.name, file.size_bytes, 9, 8) for file in files)
    return Record(RUN, "orders", 3, 1_700_000_000_000, base, basis, sources, outputs, result)


def _where(record: Record) -> str:
    return f"/logs/orders-3/{record.file_name}"


@given(st.integers(0, names.MAX_OFFSET - 100))
def test_a_record_is_read_back_as_written(base: int) -> None:
    record = a_record(base)
    assert decode_record(encode_record(record), _where(record)) == record
    assert record_name(base, RUN) in record.files


def _leaves(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every value in a JSON object."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in inner for leaf in _leaves(item, (*path, key)))]


LEAVES = [path for path in _leaves(json.loads(encode_record(a_record()))) if path]


@given(st.sampled_from(LEAVES), st.sampled_from([None, "x", "../../x", -1, 2**64, 1.5, [], {}, [1], True]))
def test_a_changed_value_is_refused_or_read_without_other_changes(path: tuple, value: object) -> None:
    """A record that is accepted has only whole numbers, and only names of files of its run."""
    fields = json.loads(encode_record(a_record()))
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        record = decode_record(json.dumps(fields).encode(), _where(a_record()))
    except CorruptLog as problem:
        assert problem.slug == "invalid-prepared-record"
        return
    assert all(names.parse_file_name(name).run_id == RUN for name in record.files)
    for group in record.result.groups:
        for out in group.segments:
            assert all(names.parse_file_name(file.name).run_id == RUN for file in out.files)
            assert 0 <= out.base_offset <= names.MAX_OFFSET


@pytest.mark.parametrize("path", [path for path in LEAVES if len(path) == 1])
def test_a_missing_field_is_refused(path: tuple) -> None:
    fields = json.loads(encode_record(a_record()))
    del fields[path[0]]
    with pytest.raises(CorruptLog):
        decode_record(json.dumps(fields).encode(), _where(a_record()))


def _add_snapshot(result: dict[str, Any]) -> None:
    result["groups"][0]["snapshots"] = [{"offset": 25, "name": "../users-0/00000000000000000000.log"}]


def _replace_more(result: dict[str, Any]) -> None:
    result["groups"][0]["source_bases"].append(25)


def _replace_nothing(result: dict[str, Any]) -> None:
    result["groups"] = []


def _take_index_for_log(result: dict[str, Any]) -> None:
    files = result["groups"][0]["segments"][0]["files"]
    files[0]["name"], files[1]["name"] = files[1]["name"], files[0]["name"]


def _move_output(result: dict[str, Any]) -> None:
    result["groups"][0]["segments"][0]["base_offset"] = 6


def _damage_suffix(result: dict[str, Any]) -> None:
    result["groups"][0]["segments"][0]["files"][0]["suffix"] = []


CHANGES = [_add_snapshot, _replace_more, _replace_nothing, _take_index_for_log, _move_output, _damage_suffix]


@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_do_not_replace_the_sources_by_the_outputs_are_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    fields = json.loads(encode_record(a_record()))
    change(fields["result"])
    with pytest.raises(CorruptLog) as refused:
        decode_record(json.dumps(fields).encode(), _where(a_record()))
    assert refused.value.slug == "invalid-prepared-record"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe"], ids=lambda data: repr(data[:4])
)
def test_a_record_that_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptLog):
        decode_record(data, _where(a_record()))
