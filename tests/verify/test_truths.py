"""Contradictions between files: the findings that do not concern only the bytes of one batch or index entry."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import LOCAL, FileSystem
from keytail.verify.driver import verify_log_dir
from keytail.verify.finding_kinds import KINDS
from keytail.verify.names import _may_use
from keytail.verify.scope import Claims
from keytail.verify.task import verify_partition
from tests.compact.reference_round import index_bytes
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.codecs import GZIP
from tests.reference.legacy import encode_wrapper

NOW = 1_700_000_000_000
INTERVAL = 60
PID, OTHER = 7, 8
END = 40


def _data(offset: int, producer: int = PID, epoch: int = 0, count: int = 3, **fields: Any) -> bytes:
    fields = {"base_sequence": offset, "transactional": True, "leader_epoch": 1 if offset >= 20 else 0, **fields}
    records = [Rec(offset + i, NOW + offset + i, b"k%d" % i, b"v") for i in range(count)]
    return encode_batch(records, producer_id=producer, producer_epoch=epoch, **fields)


def _marker(offset: int, *, commit: bool, producer: int = PID) -> bytes:
    epoch = 1 if offset >= 20 else 0
    return encode_marker(
        offset, NOW + offset, commit=commit, producer_id=producer, producer_epoch=0, leader_epoch=epoch
    )


def _segments() -> dict[int, list[bytes]]:
    """Return a log with two interleaved aborted transactions, a committed one, and one that remains open."""
    return {
        0: [_data(0), _data(3, OTHER), _marker(6, commit=False), _data(7, OTHER)],
        10: [_marker(10, commit=False, producer=OTHER), _data(11), _marker(14, commit=True)],
        20: [_data(20), _data(23, OTHER), _marker(26, commit=True, producer=OTHER)],
        END: [],
    }


TXN = struct.Struct(">hqqqq")
ENTRIES = {0: [(0, PID, 0, 6, 3)], 10: [(0, OTHER, 3, 10, 11)]}


def _entry(producer: int, last: int, opened: int = -1, **fields: Any) -> ProducerEntry:
    entry = ProducerEntry(producer, 0, last, last, 2, NOW, 0, opened)
    return replace(entry, **fields)


SNAPSHOTS = {
    10: [_entry(PID, 2), _entry(OTHER, 9, 3)],
    20: [_entry(PID, 13), _entry(OTHER, 9)],
    END: [_entry(PID, 22, 20), _entry(OTHER, 25)],
}
EPOCHS = "0\n2\n0 0\n1 20\n"


def _name(base: int, suffix: str) -> str:
    return f"{base:020d}{suffix}"


def _write(directory: Path, segments: dict[int, list[bytes]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for base, batches in segments.items():
        index, time_index = index_bytes(batches, base, INTERVAL)
        (directory / _name(base, ".log")).write_bytes(b"".join(batches))
        (directory / _name(base, ".index")).write_bytes(index)
        (directory / _name(base, ".timeindex")).write_bytes(time_index)
    for base, entries in ENTRIES.items():
        _aborted(directory, base, entries)
    for offset, snapshot in SNAPSHOTS.items():
        (directory / _name(offset, ".snapshot")).write_bytes(encode_snapshot(snapshot))
    (directory / "leader-epoch-checkpoint").write_text(EPOCHS)
    return directory


def _aborted(directory: Path, base: int, entries: list[tuple[int, ...]]) -> None:
    (directory / _name(base, ".txnindex")).write_bytes(b"".join(TXN.pack(*entry) for entry in entries))


def _snapshot(offset: int, *entries: ProducerEntry) -> Callable[[Path], object]:
    return lambda d: (d / _name(offset, ".snapshot")).write_bytes(encode_snapshot(entries))


def _found(directory: Path, claims: Claims = Claims(), **options: Any) -> list[tuple[str, str, int | None]]:
    report = verify_partition(LOCAL, str(directory), claims, **options)
    for finding in report:
        assert finding.severity == KINDS[finding.kind].severity or not claims.clean_shutdown
        assert finding.broker and finding.remedy
        assert "{" not in finding.what + finding.broker
    return [(f.kind, os.path.relpath(f.path, directory), f.byte_position) for f in report]


def test_the_unchanged_log_has_no_findings(tmp_path: Path) -> None:
    _write(tmp_path, _segments())
    everything = Claims(True, log_start=0, recovery_point=END, high_watermark=END, cleaner=END)
    assert _found(tmp_path, everything) == []
    assert _found(tmp_path, live=True) == []
    assert _found(tmp_path, replace(everything, clean_shutdown=False)) == []


TXN0, TXN1 = _name(0, ".txnindex"), _name(10, ".txnindex")
SNAPSHOT = _name(END, ".snapshot")
DAMAGE: dict[str, tuple[Callable[[Path], object], list[tuple[str, str, int | None]]]] = {
    "missing entry": (lambda d: (d / TXN0).unlink(), [("txn-no-entry", TXN0, None)]),
    "entry without a marker": (
        lambda d: _aborted(d, 10, [*ENTRIES[10], (0, PID, 11, 14, 15)]),
        [("txn-no-marker", TXN1, 34)],
    ),
    "wrong producer in an entry": (
        lambda d: _aborted(d, 10, [(0, PID, 3, 10, 11)]),
        [("txn-no-marker", TXN1, 0), ("txn-no-entry", TXN1, None)],
    ),
    "entry begins late": (lambda d: _aborted(d, 10, [(0, OTHER, 4, 10, 11)]), [("txn-first-offset", TXN1, 0)]),
    "entry begins early": (lambda d: _aborted(d, 10, [(0, OTHER, 2, 10, 11)]), []),
    "stable offset after its marker": (
        lambda d: _aborted(d, 10, [(0, OTHER, 3, 10, 12)]),
        [("txn-stable-offset", TXN1, 0)],
    ),
    "stable offset that hides a later transaction": (
        lambda d: _aborted(d, 0, [(0, PID, 0, 6, 4)]),
        [("txn-stable-offset", TXN0, 0)],
    ),
    "stable offset too low": (lambda d: _aborted(d, 0, [(0, PID, 0, 6, 1)]), []),
    "snapshot with a flipped bit": (
        lambda d: (d / SNAPSHOT).write_bytes((d / SNAPSHOT).read_bytes()[:-1] + b"\1"),
        [("snapshot", SNAPSHOT, 0)],
    ),
    "missing snapshots": (
        lambda d: [file.unlink() for file in d.glob("*.snapshot")],
        [("snapshots-missing", ".", None)],
    ),
    "snapshot above the log end": (
        _snapshot(50, _entry(PID, 22, 20), _entry(OTHER, 25)),
        [("snapshot-beyond", _name(50, ".snapshot"), None)],
    ),
    "snapshot: wrong sequence": (
        _snapshot(END, _entry(OTHER, 25), _entry(PID, 22, 20, last_sequence=23)),
        [("snapshot-entry", SNAPSHOT, 56)],
    ),
    "snapshot: wrong offset delta": (
        _snapshot(END, _entry(PID, 22, 20, offset_delta=1), _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, 10)],
    ),
    "snapshot: latest batch missing": (
        _snapshot(END, _entry(PID, 13, 20), _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, 10)],
    ),
    "snapshot: old epoch": (
        _snapshot(END, _entry(PID, 22, 20, epoch=-1), _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, 10)],
    ),
    "snapshot: open transaction missing": (
        _snapshot(END, _entry(PID, 22), _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, 10)],
    ),
    "snapshot: producer with an open transaction missing": (
        _snapshot(END, _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, None)],
    ),
    "snapshot: open transaction begins late": (
        _snapshot(END, _entry(PID, 22, 21), _entry(OTHER, 25)),
        [("snapshot-entry", SNAPSHOT, 10)],
    ),
    "snapshot: ended transaction still open": (
        _snapshot(END, _entry(PID, 22, 20), _entry(OTHER, 25, 23)),
        [("snapshot-entry", SNAPSHOT, 56)],
    ),
    "snapshot: not below its offset": (
        _snapshot(END, _entry(PID, 22, 20), _entry(OTHER, 25), _entry(9, END)),
        [("snapshot-entry", SNAPSHOT, 102)],
    ),
    "snapshot: batches that the log no longer has": (
        _snapshot(END, _entry(PID, 22, 20), _entry(OTHER, 30, last_sequence=9), _entry(9, 31)),
        [],
    ),
    "snapshot: idle producer missing": (_snapshot(20, _entry(OTHER, 9)), []),
    "epochs: missing file": (
        lambda d: (d / "leader-epoch-checkpoint").unlink(),
        [("epochs-missing", "leader-epoch-checkpoint", None)],
    ),
    "epochs: begins late": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 21\n"),
        [("epochs-wrong", "leader-epoch-checkpoint", None)],
    ),
    "epochs: begins early": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 12\n"),
        [("epochs-wrong", "leader-epoch-checkpoint", None)],
    ),
    "epochs: wrong epoch": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n2 20\n"),
        [("epochs-wrong", "leader-epoch-checkpoint", None)],
    ),
    "epochs: begins in the gap before": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 15\n"),
        [],
    ),
    "epochs: epoch without a batch": (
        lambda d: (d / "leader-epoch-checkpoint").write_text(f"0\n3\n0 0\n1 20\n2 {END}\n"),
        [],
    ),
    "epochs: above the log end": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n1 20\n2 41\n"),
        [("epochs-beyond", "leader-epoch-checkpoint", None)],
    ),
    "epochs: not ascending": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n1 20\n1 21\n"),
        [("epochs-order", "leader-epoch-checkpoint", None)],
    ),
    "epochs: unreadable": (
        lambda d: (d / "leader-epoch-checkpoint").write_text("0\n1\n0 0 0\n"),
        [("epochs-unreadable", "leader-epoch-checkpoint", None)],
    ),
    "a swap file without contents": (
        lambda d: [(d / _name(10, ".log" + stage)).touch() for stage in (".swap", ".cleaned")],
        [("leftover-cleaned", _name(10, ".log.cleaned"), None), ("leftover-swap-void", _name(10, ".log.swap"), None)],
    ),
    "a swap file of which a broker removes the log": (
        lambda d: [(d / _name(0, ".log")).rename(d / _name(0, ".log.swap")), (d / _name(0, ".log.cleaned")).touch()],
        [("leftover-swap-gone", _name(0, ".log.swap"), None)],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_contradiction_is_found(tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    _write(tmp_path, _segments())
    damage(tmp_path)
    found = _found(tmp_path)
    if name == "a swap file of which a broker removes the log":  # this contradiction causes many more findings
        assert expected[0] in found
    else:
        assert found == expected


BATCHES: dict[str, tuple[list[bytes], list[tuple[str, int]]]] = {
    "max timestamp too low": ([_data(0, max_timestamp=NOW)], [("max-timestamp", 0)]),
    "max timestamp of a compressed batch": ([_data(0, codec=GZIP, max_timestamp=NOW + 9)], [("max-timestamp", 0)]),
    "append time": ([_data(0, timestamp_type=1, max_timestamp=NOW + 9)], []),
    "timestamp below -1": (
        [encode_batch([Rec(0, -5, b"k", b"v")], max_timestamp=-1)],
        [("record-timestamp", 0)],
    ),
    "no producer": ([_data(0, producer=-1)], [("producer", 0)]),
    "no producer epoch": ([_data(0, epoch=-1)], [("producer", 0)]),
    "no sequence": ([_data(0, base_sequence=-1)], [("producer", 0)]),
    "marker with an unknown type": (
        [
            encode_batch(
                [Rec(0, NOW, b"\0\0\0\7", b"v" * 6)],
                producer_id=PID, producer_epoch=0, transactional=True, control=True,
            )
        ],
        [("control", 0)],
    ),
    "marker without a key": (
        [encode_batch([Rec(0, NOW, None, b"")], producer_id=PID, producer_epoch=0, transactional=True, control=True)],
        [("control", 0)],
    ),
    "outside an open transaction": (
        [_data(0), _data(3, transactional=False), _data(6, transactional=False)],
        [("transaction", len(_data(0)))],
    ),
    "an old message around others with descending offsets": (
        [encode_wrapper([Rec(1, NOW, b"k", b"v"), Rec(0, NOW, b"k", b"v")], GZIP, magic=0)],
        [("legacy", 0)],
    ),
    "an old message around a damaged one": (
        [encode_wrapper([Rec(0, NOW, b"k", b"v"), Rec(1, NOW, b"k", b"v")], GZIP, magic=1)[:-12] + b"\0" * 12],
        [("checksum", 0)],
    ),
    "a valid compressed old message": (
        [encode_wrapper([Rec(0, NOW, b"k", b"v"), Rec(1, NOW, b"k", b"v")], GZIP, magic=1)],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_contradictions_within_a_batch_are_found(tmp_path: Path, name: str) -> None:
    batches, expected = BATCHES[name]
    log = tmp_path / _name(0, ".log")
    log.write_bytes(b"".join(batches))
    for suffix in (".index", ".timeindex"):
        (tmp_path / _name(0, suffix)).write_bytes(b"")
        (tmp_path / _name(100, suffix)).write_bytes(b"")
    (tmp_path / _name(100, ".log")).write_bytes(b"")
    (tmp_path / _name(100, ".snapshot")).write_bytes(encode_snapshot([_entry(PID, 0, 0)]))
    (tmp_path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    found = [(kind, at) for kind, path, at in _found(tmp_path) if path == log.name]
    assert found == expected


def test_a_wrong_leader_epoch_is_a_finding_about_the_log(tmp_path: Path) -> None:
    segments = _segments()
    segments[10][1] = _data(11, leader_epoch=99)
    _write(tmp_path, segments)
    assert _found(tmp_path) == [("leader-epoch", _name(10, ".log"), len(segments[10][0]))]


def test_damage_is_not_reported_as_a_contradiction_elsewhere(tmp_path: Path) -> None:
    segments = _segments()
    whole = segments[0][2]
    _write(tmp_path, segments)
    segments[0][2] = whole[:-1] + bytes([whole[-1] ^ 1])
    (tmp_path / _name(0, ".log")).write_bytes(b"".join(segments[0]))
    assert _found(tmp_path) == [("checksum", _name(0, ".log"), len(segments[0][0]) + len(segments[0][1]))]


@pytest.mark.parametrize(
    "field, kind, file",
    [
        ("log_start", "log-start", "log-start-offset-checkpoint"),
        ("recovery_point", "recovery-point", "recovery-point-offset-checkpoint"),
        ("high_watermark", "high-watermark", "replication-offset-checkpoint"),
        ("cleaner", "cleaner-checkpoint", "cleaner-offset-checkpoint"),
    ],
)
def test_checkpoints_must_be_within_the_log(tmp_path: Path, field: str, kind: str, file: str) -> None:
    directory = _write(tmp_path / "t-0", _segments())
    assert _found(directory, replace(Claims(), **{field: END})) == []
    [found] = verify_partition(LOCAL, str(directory), replace(Claims(), **{field: END + 1}))
    assert (found.kind, found.path, found.offset) == (kind, str(tmp_path / file), END + 1)
    assert file in found.what


def test_damage_that_a_broker_recovers_is_described_as_such(tmp_path: Path) -> None:
    segments = _segments()
    _write(tmp_path, segments)
    (tmp_path / _name(20, ".index")).unlink()
    (tmp_path / _name(10, ".timeindex")).unlink()
    claims = Claims(clean_shutdown=False, recovery_point=20)
    report = verify_partition(LOCAL, str(tmp_path), claims)
    assert [(f.kind, f.severity) for f in report] == [("time-index-missing", "error"), ("index-missing", "warning")]
    assert "rebuilds its indexes" in report.findings[1].broker


def test_files_must_have_the_owner_and_mode_of_the_broker(tmp_path: Path) -> None:
    directory = replace(LOCAL.stat(str(tmp_path)), uid=1000, gid=50)
    (tmp_path / "f").touch()
    [entry] = LOCAL.scan(str(tmp_path))
    rows = [
        (1000, 50, 0o600, True),
        (1000, 50, 0o400, False),
        (1000, 50, 0o066, False),
        (0, 50, 0o660, True),
        (0, 50, 0o640, False),
        (0, 0, 0o666, True),
        (0, 0, 0o664, False),
    ]
    for uid, gid, mode, may in rows:
        assert _may_use(directory, replace(entry, uid=uid, gid=gid, mode=mode)) == may
        assert _may_use(replace(directory, uid=0), replace(entry, uid=uid, gid=gid, mode=mode))


class _Owned(FileSystem):
    """A file system in which the directory belongs to a broker, and some files to root."""

    def stat(self, path: str) -> Any:
        return replace(super().stat(path), uid=1000, gid=1000)

    def scan(self, path: str) -> Any:
        modes = {".index": (0, 0o600), ".timeindex": (0, 0o666), ".log": (1000, 0o644)}
        return [
            replace(entry, uid=modes.get(Path(entry.name).suffix, (1000, 0))[0], gid=1000,
                    mode=modes.get(Path(entry.name).suffix, (0, 0o644))[1])
            for entry in super().scan(path)
        ]  # fmt: skip


def test_files_of_another_owner_are_one_finding_for_each_type(tmp_path: Path) -> None:
    _write(tmp_path, _segments())
    report = verify_partition(_Owned(), str(tmp_path))
    kinds = [(f.kind, f.severity, f.path) for f in report]
    assert kinds == [
        ("access", "error", str(tmp_path / _name(0, ".index"))),
        ("owner", "warning", str(tmp_path / _name(0, ".timeindex"))),
    ]


def test_while_a_broker_runs_only_findings_of_two_scans_are_reported(tmp_path: Path) -> None:
    class Swapping(FileSystem):
        """A file system on which a cleaner replaces an index in each scan, each time another one."""

        def __init__(self) -> None:
            super().__init__()
            self.looks = [_name(10, ".index"), _name(0, ".index")]  # segment 0 is read before segment 10

        def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
            data = super().read_bytes(path, whole=whole)
            if self.looks and path.endswith(self.looks[0]):
                self.looks.pop(0)
                return data[:7] + bytes([data[7] ^ 1]) + data[8:]
            return data

    _write(tmp_path, _segments())
    swapping = Swapping()
    for number in ("010", "000"):
        assert [f.path[-9:] for f in verify_partition(swapping, str(tmp_path))] == [f"{number}.index"]
    assert verify_partition(Swapping(), str(tmp_path), live=True).findings == ()
    (tmp_path / _name(0, ".index")).write_bytes(b"\1" * 8)
    assert [f.kind for f in verify_partition(LOCAL, str(tmp_path), live=True)] == ["index-position"]


def test_foreign_directories_and_unreadable_checkpoints_are_found(tmp_path: Path) -> None:
    _write(tmp_path / "t-0", _segments())
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "remote-log-index-cache").mkdir()
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n2\nt 0 1\n")
    found = [(f.kind, f.path) for f in verify_log_dir(LOCAL, str(tmp_path))]
    assert found == [
        ("foreign-directory", str(tmp_path / "lost+found")),
        ("checkpoint-unreadable", str(tmp_path / "recovery-point-offset-checkpoint")),
    ]


def test_a_large_segment_with_an_empty_index_and_an_oversized_one_are_found(tmp_path: Path) -> None:
    value = b"v" * 400_000
    batches = [encode_batch([Rec(offset, -1, b"k", value)]) for offset in range(3)]
    _write(tmp_path, {})
    for file in tmp_path.iterdir():
        file.unlink()
    for base, data in ((0, b"".join(batches)), (3, b"")):
        (tmp_path / _name(base, ".log")).write_bytes(data)
        for suffix in (".index", ".timeindex", ".snapshot"):
            (tmp_path / _name(base, suffix)).write_bytes(b"" if suffix != ".snapshot" else encode_snapshot([]))
    (tmp_path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    assert _found(tmp_path) == [("index-empty", _name(0, ".index"), 0)]
    with (tmp_path / _name(0, ".log")).open("r+b") as log:
        log.truncate(2**31)
    assert ("too-large", _name(0, ".log"), None) in _found(tmp_path)


def test_every_kind_has_a_test() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert [kind for kind in KINDS if f'"{kind}"' not in tests] == []
