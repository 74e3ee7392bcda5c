"""The formats read every file of a real broker's log dir: names, batches, records, codecs, indexes, snapshots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keytail.format import index, names
from keytail.format.codecs.table import CODECS
from keytail.format.compression import compress, decompress
from keytail.format.control import ControlType, parse_control_record
from keytail.format.producers import encode_snapshot, parse_snapshot
from keytail.format.record import decode_records
from tests import golden
from tests.format.records import encode_record
from tests.reference.batches import decode_log


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[names.FileName, bytes]]:
    log_dir: Path = golden.unpack(tmp_path_factory.mktemp("golden"))
    found = []
    for directory in sorted(path for path in log_dir.iterdir() if path.is_dir()):
        partition = names.parse_partition_dir(directory.name)
        assert partition is not None
        if partition.topic != names.CLUSTER_METADATA_TOPIC:
            found += [(names.parse_file_name(p.name), p.read_bytes()) for p in sorted(directory.iterdir())]
    return found


def _contents(files: list[tuple[names.FileName, bytes]], suffix: str) -> list[bytes]:
    contents = [data for name, data in files if name.suffix == suffix]
    assert contents
    return contents


def test_every_name_is_known(files: list[tuple[names.FileName, bytes]]) -> None:
    assert {name.kind for name, _ in files} == {"live", "partition"}
    assert {name.suffix for name, _ in files} >= {"", *names.CONTENT_SUFFIXES} - {names.TXN_INDEX}


def test_every_record_is_read_and_written_back(files: list[tuple[names.FileName, bytes]]) -> None:
    codecs, markers = set(), set()
    for log in _contents(files, names.LOG):
        for batch in decode_log(log):
            packed = log[batch.position + 61 : batch.position + batch.size]
            block = bytes(decompress(batch.codec, packed, limit_bytes=1 << 24))
            records = decode_records(block, batch.record_count)
            assert [(r.key, r.value, r.headers) for r in records] == [
                (r.key, r.value, r.headers) for r in batch.records
            ]
            assert b"".join(map(encode_record, records)) == block
            assert bytes(decompress(batch.codec, compress(batch.codec, block))) == block
            codecs.add(CODECS[batch.codec])
            if batch.control:
                markers.add(parse_control_record(records[0].key, records[0].value).control_type)
    assert codecs == set(CODECS)
    assert markers >= {ControlType.ABORT, ControlType.COMMIT}


def test_every_index_entry_is_read_and_written_back(files: list[tuple[names.FileName, bytes]]) -> None:
    for data in _contents(files, names.INDEX):
        entries = index.parse_offset_index(data)
        assert entries.astype(index.OFFSET_ENTRY).tobytes() == data
        assert np.all(np.diff(entries["position"]) > 0)
    for data in _contents(files, names.TIME_INDEX):
        times = index.parse_time_index(data)
        assert times.astype(index.TIME_ENTRY).tobytes() == data
        assert np.all(np.diff(times["timestamp_ms"]) > 0)
    for data in _contents(files, names.TXN_INDEX):
        aborted = index.parse_txn_index(data)
        assert index.encode_txn_index(aborted) == data
        assert np.all(aborted["last_stable_offset"] > aborted["first_offset"])


def test_every_snapshot_is_read_and_written_back(files: list[tuple[names.FileName, bytes]]) -> None:
    producers = 0
    for data in _contents(files, names.SNAPSHOT):
        entries = parse_snapshot(data)
        assert encode_snapshot(entries) == data
        producers += len(entries)
    assert producers
