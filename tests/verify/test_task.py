from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.errors import KeytailError
from keytail.format.producers import encode_snapshot
from keytail.limits import MAX_RECORD_VARIABLE
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.records import block_check
from keytail.log.window import Window
from keytail.run.tasks import run_attempt
from keytail.verify import batches as verify_batches
from keytail.verify.finding_kinds import KINDS
from keytail.verify.scope import NO_CLAIMS, Claims, claims_of
from keytail.verify.task import VerifyReport, verify_partition
from tests import golden
from tests.chance import draws
from tests.compact.reference_round import index_bytes
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec, encode_batch, encode_marker, with_bytes
from tests.reference.varints import crc32c

NOW = 1_700_000_000_000
INTERVAL = 60


def _batch(offset: int, count: int = 3, **fields) -> bytes:
    records = [Rec(offset + i, NOW + offset + i, b"k%d" % i, b"v" * (i + 1)) for i in range(count)]
    return encode_batch(records, **fields)


def _segments(codec: int = 0) -> dict[int, list[bytes]]:
    return {
        100: [
            _batch(100, codec=codec),
            _batch(103, codec=codec, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True),
            encode_marker(106, NOW + 106, commit=True, producer_id=5, producer_epoch=0),
            encode_batch([], base_offset=107, last_offset=110, max_timestamp=NOW + 110),
            _batch(120, codec=codec),
        ],
        130: [_batch(130 + 3 * i, codec=codec) for i in range(4)],
        150: [_batch(150, codec=codec), _batch(153, codec=codec)],
    }


def _prepare(directory: Path) -> None:
    for suffix in (".log", ".prepared"):
        (directory / _name(130, f"{suffix}.rpab.a0.clean")).touch()


def _name(base: int, suffix: str) -> str:
    return f"{base:020d}{suffix}"


def _write(directory: Path, segments: dict[int, list[bytes]]) -> None:
    directory.mkdir(exist_ok=True)
    for base, batches in segments.items():
        index, time_index = index_bytes(batches, base, INTERVAL)
        (directory / _name(base, ".log")).write_bytes(b"".join(batches))
        (directory / _name(base, ".index")).write_bytes(index)
        (directory / _name(base, ".timeindex")).write_bytes(time_index)
    (directory / _name(max(segments), ".snapshot")).write_bytes(encode_snapshot([]))
    (directory / "leader-epoch-checkpoint").write_bytes(b"0\n1\n0 0\n")
    (directory / "partition.metadata").write_bytes(b"version: 0\n")


def _verify(directory: Path, claims: Claims = NO_CLAIMS, live: bool = False) -> VerifyReport:
    return verify_partition(LOCAL, str(directory), claims, live=live)


def _kinds(report: VerifyReport) -> list[str]:
    return [finding.kind for finding in report.findings]


@pytest.mark.parametrize("codec", range(5))
def test_a_valid_partition_has_no_findings(tmp_path, codec):
    _write(tmp_path, _segments(codec))
    report = _verify(tmp_path)
    assert report.findings == ()
    assert report.counts.segments == 3
    assert report.counts.batches == 11
    assert report.counts.records == 10 + 12 + 6
    assert report.counts.bytes == sum((tmp_path / _name(b, ".log")).stat().st_size for b in (100, 130, 150))
    assert report.counts.index_entries == sum(
        (tmp_path / _name(b, suffix)).stat().st_size // size
        for b in (100, 130, 150)
        for suffix, size in ((".index", 8), (".timeindex", 12))
    )
    assert _verify(tmp_path, live=True).findings == ()


@pytest.mark.long
@pytest.mark.parametrize("codec", range(1, 5))
def test_batches_read_in_pieces_are_valid_even_if_a_record_is_too_large(tmp_path, monkeypatch, codec):
    read_in_pieces(monkeypatch, 1, piece_bytes=4)
    monkeypatch.setattr(block_check, "WHOLE_BLOCK_BYTES", 8)
    _write(tmp_path, _segments(codec))
    assert _kinds(_verify(tmp_path)) == []
    monkeypatch.setenv(MAX_RECORD_VARIABLE, "5")
    findings = _verify(tmp_path).findings
    assert {finding.kind for finding in findings} == {"not-opened"}
    assert {finding.severity for finding in findings} == {"warning"}
    assert all("--max-record-bytes" in finding.remedy for finding in findings)


def test_lack_of_memory_is_not_damage(tmp_path, monkeypatch):
    def no_memory(*_args, **_named):
        raise MemoryError

    _write(tmp_path, _segments(4))
    monkeypatch.setattr(block_check, "decompress", no_memory)
    outcome = run_attempt(lambda path, _attempt: _verify(path), tmp_path, "here")
    assert outcome.value is None
    assert outcome.trace == ""
    assert "out of memory on host" in str(outcome.problem)
    assert type(outcome.problem) is KeytailError  # this makes the partition `failed`


def test_windows_smaller_than_a_batch_give_the_same_result(tmp_path, monkeypatch):
    segments = _segments()
    segments[130][1] = segments[130][1][:-1] + b"\xff"
    _write(tmp_path, segments)
    report = _verify(tmp_path)
    assert _kinds(report) == ["checksum"]
    for size in (17, 40, 150):
        monkeypatch.setattr(verify_batches, "Window", lambda fs, size=size: Window(fs, size))
        assert _verify(tmp_path) == report


def _put(at: int, new: bytes):
    return lambda data: data[:at] + new + data[at + len(new) :]


def _fixed(at: int, new: bytes):
    """Return a function that changes bytes of a batch, and gives it a valid checksum again."""
    return lambda data: with_bytes(data, at, new)


BATCH_DAMAGE = {
    "length -1": (_put(8, b"\xff\xff\xff\xff"), "size"),
    "length 0": (_put(8, bytes(4)), "size"),
    "length 2^31-1": (_put(8, b"\x7f\xff\xff\xff"), "cut"),
    "length 14": (_put(8, struct.pack(">i", 14)), "size"),
    "flipped value": (_put(70, b"\xff"), "checksum"),
    "zero CRC": (_put(17, b"\0\0\0\0"), "checksum"),
    "magic 3": (_put(16, b"\x03"), "magic"),
    "magic -1": (_put(16, b"\xff"), "magic"),
    "codec 6": (_fixed(22, b"\x06"), "codec"),
    "gzip flag on uncompressed records": (_fixed(22, b"\x01"), "decompress"),
    "record count 4": (_fixed(57, struct.pack(">i", 4)), "record"),
    "record count 2": (_fixed(57, struct.pack(">i", 2)), "record-count"),
    "record count -1": (_fixed(57, struct.pack(">i", -1)), "record-count"),
    "record count 2^31-1": (_fixed(57, struct.pack(">i", 2**31 - 1)), "record-count"),
    "record length": (_fixed(61, b"\x7e"), "record"),
    "last offset before base": (_fixed(23, b"\xff\xff\xff\xfe"), "offset-order"),
    "base offset below the segment": (_put(0, struct.pack(">q", 90)), "offset-order"),
    "base offset above the largest in a segment": (_put(0, struct.pack(">q", 1 << 40)), "offset-range"),
    "first record beyond its batch": (_fixed(64, b"\x10"), "record-offset"),
}


@pytest.mark.parametrize("name", BATCH_DAMAGE)
@pytest.mark.parametrize("live", [False, True])
def test_each_damage_to_a_batch_is_found_at_its_position(tmp_path, name, live):
    change, kind = BATCH_DAMAGE[name]
    segments = _segments()
    position = len(segments[130][0])
    _write(tmp_path, segments)
    segments[130][1] = change(segments[130][1])
    (tmp_path / _name(130, ".log")).write_bytes(b"".join(segments[130]))
    report = _verify(tmp_path, live=live)
    finding = next(f for f in report.findings if f.kind == kind)
    assert finding.path == str(tmp_path / _name(130, ".log"))
    assert finding.byte_position == position
    assert finding.severity == "error"
    assert finding.broker and finding.remedy


def test_a_batch_truncated_at_any_length_is_found(tmp_path):
    segments = _segments()
    _write(tmp_path, segments)
    whole = b"".join(segments[130])
    start = len(whole) - len(segments[130][-1])
    for size in range(start + 1, len(whole)):
        (tmp_path / _name(130, ".log")).write_bytes(whole[:size])
        cut = [f for f in _verify(tmp_path).findings if f.kind == "cut"]
        assert [f.byte_position for f in cut] == [start]


def test_the_end_of_the_active_segment_may_be_incomplete(tmp_path):
    segments = _segments()
    _write(tmp_path, segments)
    log = tmp_path / _name(150, ".log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    assert "cut-active" in _kinds(_verify(tmp_path))
    assert _kinds(_verify(tmp_path, live=True)) == []
    log.write_bytes(whole + bytes(500))
    assert _kinds(_verify(tmp_path)) == ["zeros"]
    assert _kinds(_verify(tmp_path, live=True)) == []
    log.write_bytes(whole)
    (tmp_path / _name(150, ".index")).write_bytes(bytes(8000))  # a running broker preallocates its indexes
    (tmp_path / _name(150, ".timeindex")).write_bytes(bytes(12000))
    unclean = Claims(clean_shutdown=False)
    assert _kinds(_verify(tmp_path, unclean)) == []
    assert _kinds(_verify(tmp_path)) == ["index-zeros", "time-index-zeros", "time-incomplete"]


def test_overlapping_segments_are_found(tmp_path):
    segments = _segments()
    segments[130].append(_batch(149, count=3))
    _write(tmp_path, segments)
    assert _kinds(_verify(tmp_path)) == ["overlap", "offset-order"]


def _change(name: str, change):
    return lambda d: (d / name).write_bytes(change((d / name).read_bytes()))


INDEX = _name(130, ".index")
TIME = _name(130, ".timeindex")
FILE_DAMAGE = {
    "index missing": (lambda d: (d / INDEX).unlink(), ["index-missing"]),
    "time index missing": (lambda d: (d / TIME).unlink(), ["time-index-missing"]),
    "index of zeros": (_change(INDEX, lambda b: bytes(len(b))), ["index-zeros"]),
    "time index of zeros": (_change(TIME, lambda b: bytes(24)), ["time-index-zeros", "time-incomplete"]),
    "time index of one zero entry": (_change(TIME, lambda b: bytes(12)), ["time-index-zeros", "time-incomplete"]),
    "index untrimmed": (_change(INDEX, lambda b: b + bytes(80)), ["index-untrimmed"]),
    "time index untrimmed": (_change(TIME, lambda b: b + bytes(80 * 12)), ["time-index-untrimmed"]),
    "index with a partial entry": (_change(INDEX, lambda b: b + b"\1"), ["index-size"]),
    "time index with a partial entry": (_change(TIME, lambda b: b + b"\1"), ["index-size"]),
    "position off by one": (_change(INDEX, lambda b: b[:7] + bytes([b[7] ^ 1]) + b[8:]), ["index-position"]),
    "position beyond the end": (
        _change(INDEX, lambda b: b + struct.pack(">ii", 999, 99999)),
        ["index-position"],
    ),
    "offset off by one": (_change(INDEX, lambda b: b[:3] + bytes([b[3] + 1]) + b[4:]), ["index-offset"]),
    "entries swapped": (_change(INDEX, lambda b: b[8:16] + b[:8] + b[16:]), ["index-order"]),
    "negative entry": (_change(INDEX, lambda b: b"\xff" * 8 + b[8:]), ["index-order"]),
    "last time entry missing": (_change(TIME, lambda b: b[:-12]), ["time-incomplete"]),
    "time index empty": (_change(TIME, lambda b: b""), ["time-incomplete"]),
    "wrong timestamp in a time entry": (_change(TIME, lambda b: b[:7] + bytes([b[7] - 1]) + b[8:]), ["time-entry"]),
    "wrong offset in a time entry": (_change(TIME, lambda b: b[:11] + bytes([b[11] + 1]) + b[12:]), ["time-offset"]),
    "times not ascending": (_change(TIME, lambda b: b[:12] + b), ["time-order", "time-incomplete"]),
    "time entry above the log end": (
        _change(TIME, lambda b: b + struct.pack(">qi", NOW + 500, 9999)),
        ["time-offset"],
    ),
    "txn entry without a marker": (
        lambda d: (d / _name(130, ".txnindex")).write_bytes(struct.pack(">hqqqq", 0, 1, 130, 99, 140)),
        ["txn-entry"],
    ),
    "truncated txn index": (lambda d: (d / _name(130, ".txnindex")).write_bytes(bytes(3)), ["index-size"]),
    "cleaned": (lambda d: (d / _name(130, ".log.cleaned")).touch(), ["leftover-cleaned"]),
    "swap": (lambda d: (d / _name(130, ".log.swap")).touch(), ["leftover-swap"]),
    "deleted": (lambda d: (d / _name(130, ".log.deleted")).touch(), ["leftover-deleted"]),
    "scratch": (lambda d: (d / _name(130, ".log.rab.a1.clean")).touch(), ["leftover-scratch"]),
    "scratch of a prepared compaction": (_prepare, []),
    "name without a number": (lambda d: (d / "foo.log").touch(), ["fatal-name"]),
    "unpadded name": (lambda d: (d / "7.index").touch(), ["fatal-name"]),
    "orphan": (lambda d: (d / _name(140, ".index")).touch(), ["orphan"]),
    "a foreign file": (lambda d: (d / "README").touch(), []),
    "an empty snapshot": (lambda d: (d / _name(130, ".snapshot")).touch(), ["snapshot"]),
    "a log that cannot be read": (
        lambda d: ((d / _name(150, ".log")).unlink(), (d / _name(150, ".log")).symlink_to("/proc/self/mem")),
        ["not-regular", "unreadable"],
    ),
}


@pytest.mark.parametrize("name", FILE_DAMAGE)
def test_each_damage_to_other_files_is_found(tmp_path, name):
    damage, kinds = FILE_DAMAGE[name]
    _write(tmp_path, _segments())
    damage(tmp_path)
    report = _verify(tmp_path)
    assert sorted(set(_kinds(report))) == sorted(kinds)
    for finding in report.findings:
        assert finding.path.startswith(str(tmp_path))
        assert finding.remedy


def test_a_directory_without_a_segment_is_one_finding(tmp_path):
    assert _kinds(_verify(tmp_path)) == ["no-segment"]


def test_empty_segments_and_a_transaction_index_are_valid(tmp_path):
    segments = {0: [], **_segments(), 160: []}
    segments[100][2] = encode_marker(106, NOW + 106, commit=False, producer_id=5, producer_epoch=0)
    _write(tmp_path, segments)
    entry = struct.pack(">hqqqq", 0, 5, 103, 106, 107)
    (tmp_path / _name(100, ".txnindex")).write_bytes(entry)
    assert _verify(tmp_path).findings == ()


def test_many_findings_of_one_file_are_counted(tmp_path):
    batches = [_batch(3 * i)[:-1] + b"\xff" for i in range(250)]
    _write(tmp_path, {0: batches})
    report = _verify(tmp_path)
    assert _kinds(report) == ["checksum"] * 100 + ["more"]
    assert report.findings[-1].what == "this file has 150 more findings"
    assert report.counts.batches == 250


def _legacy(offset: int, magic: int, codec: int = 0) -> bytes:
    body = bytes([magic, codec]) + (struct.pack(">q", NOW + offset) if magic else b"")
    body += struct.pack(">i", 1) + b"k" + struct.pack(">i", 3) + b"abc"
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body


def test_legacy_messages_are_checked(tmp_path):
    batches = [_legacy(0, 0), _legacy(1, 1), _legacy(5, 1), _batch(6)]
    (tmp_path / _name(0, ".log")).write_bytes(b"".join(batches))
    (tmp_path / _name(0, ".index")).write_bytes(b"")
    (tmp_path / _name(0, ".timeindex")).write_bytes(b"")
    _write(tmp_path, {10: []})
    assert _kinds(_verify(tmp_path)) == ["time-incomplete"]
    (tmp_path / _name(0, ".timeindex")).write_bytes(
        struct.pack(">qi", NOW + 1, 1) + struct.pack(">qi", NOW + 8, 8)
    )
    report = _verify(tmp_path)
    assert (_kinds(report), report.counts.batches, report.counts.records) == ([], 4, 6)
    broken = bytearray(b"".join(batches))
    broken[len(batches[0]) + 30] ^= 1
    (tmp_path / _name(0, ".log")).write_bytes(bytes(broken))
    report = _verify(tmp_path)
    assert [(f.kind, f.byte_position, f.offset) for f in report.findings] == [
        ("checksum", len(batches[0]), 1)
    ]


def test_files_that_disappear_beside_a_live_broker_are_not_reported(tmp_path):
    class Vanishing(FileSystem):
        def scan(self, path):
            entries = super().scan(path)
            for suffix in (".log", ".index", ".timeindex"):
                (tmp_path / _name(100, suffix)).unlink(missing_ok=True)
            return entries

    _write(tmp_path, _segments())
    assert verify_partition(Vanishing(), str(tmp_path), live=True).findings == ()
    _write(tmp_path, _segments())
    assert set(_kinds(verify_partition(Vanishing(), str(tmp_path)))) == {"unreadable"}


def test_a_live_segment_that_grows_during_the_run_is_not_reported(tmp_path):
    segments = _segments()
    _write(tmp_path, segments)
    listed = LOCAL.scan(str(tmp_path))

    class Older(FileSystem):
        def scan(self, path):
            return listed

    segments[150] += [_batch(156), _batch(159)]
    _write(tmp_path, segments)
    assert verify_partition(Older(), str(tmp_path), live=True).findings == ()


def test_every_kind_has_a_remedy():
    for name, kind in KINDS.items():
        assert kind.what, name
        assert (kind.broker and kind.remedy) or name in {"more", "shrunk"}


@settings(deadline=None, max_examples=draws(200))
@given(st.sampled_from([100, 130]), st.integers(0, 2**30), st.integers(0, 7), st.integers(0, 4))
def test_a_flipped_bit_of_a_log_is_found(tmp_path_factory, base, where, bit, codec):
    directory = tmp_path_factory.mktemp("p")
    segments = _segments(codec)
    _write(directory, segments)
    data = bytearray(b"".join(segments[base]))
    where %= len(data)
    start = 0
    for batch in segments[base]:
        if start + len(batch) > where:
            break
        start += len(batch)
    if where - start < 8 or 12 <= where - start < 16:
        return  # no checksum covers the base offset and the leader epoch
    data[where] ^= 1 << bit
    (directory / _name(base, ".log")).write_bytes(bytes(data))
    findings = _verify(directory).findings
    assert any(f.byte_position == start and f.path.endswith(_name(base, ".log")) for f in findings)


@settings(deadline=None, max_examples=draws(300))
@given(st.data())
def test_no_bytes_raise_an_exception(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("p")
    segments = _segments(data.draw(st.integers(0, 4)))
    _write(directory, segments)
    for _ in range(data.draw(st.integers(1, 4))):
        file = data.draw(st.sampled_from(sorted(p.name for p in directory.iterdir())))
        old = (directory / file).read_bytes()
        at = data.draw(st.integers(0, len(old)))
        new = data.draw(st.binary(max_size=24))
        removed = data.draw(st.integers(0, 24))
        changed = old[:at] + new + old[at + removed :]
        if file.endswith(".log") and data.draw(st.booleans()) and len(changed) > 61:
            (length,) = struct.unpack_from(">i", changed, 8)
            if 49 <= length <= len(changed) - 12:  # with a valid checksum, the rest is checked too
                crc = struct.pack(">I", crc32c(changed[21 : 12 + length]))
                changed = changed[:17] + crc + changed[21:]
        (directory / file).write_bytes(changed)
    verify_partition(LOCAL, str(directory), live=data.draw(st.booleans()))


def test_the_log_of_a_real_broker_is_valid(tmp_path):
    facts = survey_log_dirs(LOCAL, [str(golden.unpack(tmp_path))])[0]
    assert facts.problems == ()
    reports = {
        f"{entry.topic}-{entry.partition}": _verify(entry.path, claims_of(facts, entry.topic, entry.partition))
        for entry in facts.partitions
    }
    assert {name: report.findings for name, report in reports.items() if report.findings} == {}
    assert sum(report.counts.records for report in reports.values()) > 20_000
    assert sum(report.counts.index_entries for report in reports.values()) > 500
