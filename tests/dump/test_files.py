"""A dump of any bytes ends and prints well-formed lines, and damage does not prevent the output of other data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.dump.files import DumpOptions, dump
from keytail.dump.report import MAX_GAPS, Report
from keytail.format.coordinator import OFFSETS
from keytail.log.fs import LOCAL
from tests.chance import draws
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.indexing import index_files
from tests.reference.legacy import encode_single, encode_wrapper

T0 = 1_700_000_000_000
HEADERS = ((b"h", b"x"), (b"\xff", None))
NEW = [
    encode_batch([Rec(3 * i + k, T0 + i, b"key", b"value" * 5, HEADERS) for k in range(3)], codec=i % 5)
    for i in range(6)
] + [encode_marker(18, T0, commit=True, producer_id=5, producer_epoch=0)]
OLD = [
    encode_single(Rec(0, T0, b"k", None), magic=0),
    encode_wrapper([Rec(1, T0, b"k", b"v"), Rec(2, T0, None, b"w")], 2),
]
SOUND = b"".join(NEW)


def dumped(folder: Path, *, as_json: bool, **options) -> tuple[str, Report]:
    out = bytearray()
    report = Report(out.extend, lambda text: None, as_json=as_json)
    dump(LOCAL, [str(path) for path in sorted(folder.iterdir())], DumpOptions(**options), report)
    return out.decode(), report


def write(folder: Path, log: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    index, time_index = index_files(SOUND, 0, 100)
    for suffix, data in ((".log", log), (".index", index), (".timeindex", time_index)):
        (folder / f"{0:020d}{suffix}").write_bytes(data)
    return folder


spoil = st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=3)


@settings(deadline=None, max_examples=draws(150))
@given(spoil, st.integers(0, len(SOUND)), st.booleans(), st.binary(max_size=80))
def test_dumps_of_corrupted_logs_end(tmp_path_factory, changes, length, old, tail):
    data = bytearray(SOUND)
    for at, byte in changes:
        data[at] = byte
    log = (b"".join(OLD) if old else b"") + bytes(data[:length]) + tail
    folder = write(tmp_path_factory.mktemp("dump"), log)
    for options in ({"print_data_log": True}, {"decoder": OFFSETS.text}, {}):
        text, _ = dumped(folder, as_json=True, **options)
        kinds = [json.loads(line)["type"] for line in text.splitlines()]
        assert kinds.count("file") == 3
        dumped(folder, as_json=False, **options)


def test_dump_prints_the_other_batches_of_a_log_with_a_damaged_batch(tmp_path):
    for spoiled in range(6):
        batch = bytearray(NEW[spoiled])
        batch[62:] = bytes(b ^ 0x55 for b in batch[62:])
        folder = write(tmp_path / str(spoiled), b"".join([*NEW[:spoiled], bytes(batch), *NEW[spoiled + 1 :]]))
        text, report = dumped(folder, as_json=True, deep_iteration=True)
        rows = [json.loads(line) for line in text.splitlines()]
        others = {offset for offset in range(19) if offset // 3 != spoiled}
        assert others <= {row["offset"] for row in rows if row["type"] == "record"}
        assert [row["isvalid"] for row in rows if row["type"] == "batch"].count(False) == 1
        assert report.wrong


@pytest.mark.parametrize("as_json", [False, True])
def test_batches_in_pieces_give_the_same_lines(tmp_path, monkeypatch, as_json):
    folder = write(tmp_path, b"".join(OLD) + SOUND)
    whole, _ = dumped(folder, as_json=as_json, print_data_log=True)
    read_in_pieces(monkeypatch, 2)
    assert dumped(folder, as_json=as_json, print_data_log=True)[0] == whole


def test_dump_prints_the_other_records_of_a_batch_with_a_too_large_record(tmp_path, monkeypatch):
    read_in_pieces(monkeypatch, 2)
    monkeypatch.setenv("KEYTAIL_MAX_RECORD_BYTES", "90")
    log = NEW[1] + encode_batch([Rec(6, T0, b"k", b"v"), Rec(7, T0, b"k", bytes(500))], codec=2) + NEW[3]
    text, report = dumped(write(tmp_path, log), as_json=False, print_data_log=True)
    offsets = [line.split("offset: ")[1].split(" ")[0] for line in text.splitlines() if line.startswith("| offset")]
    assert offsets == ["3", "4", "5", "6", "9", "10", "11"]
    assert report.wrong


def test_gaps_of_a_compacted_log_are_not_findings_and_only_some_are_listed(tmp_path):
    records = [Rec(2 * i, T0, b"k", b"v") for i in range(MAX_GAPS + 50)]
    (tmp_path / f"{0:020d}.log").write_bytes(encode_batch(records))
    lines: list[str] = []
    report = Report(lambda data: None, lines.append)
    dump(LOCAL, [str(tmp_path)], DumpOptions(deep_iteration=True), report)
    assert not report.wrong
    assert lines[0].startswith("Non-consecutive offsets in ")
    assert lines[1] == "  0 is followed by 2"
    assert lines[-1] == "  and 49 more"
    assert len(lines) == MAX_GAPS + 2
    text, _ = dumped(tmp_path, as_json=True, deep_iteration=True)
    found = json.loads(text.splitlines()[-1])
    assert (found["type"], found["count"], len(found["gaps"])) == ("gaps", MAX_GAPS + 49, MAX_GAPS)
    assert found["gaps"][0] == {"before": 0, "after": 2}
