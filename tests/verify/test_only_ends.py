"""`verify --only-ends` compared with `verify`: its findings are a part of those of `verify`, and it reads little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.verify.scope import NO_CLAIMS, Claims, claims_of
from keytail.verify.task import verify_partition
from tests import golden
from tests.chance import draws
from tests.command_line import Run, rows_of
from tests.reference.batches import Rec, encode_batch
from tests.verify import test_missing as of_missing
from tests.verify import test_task as of_files
from tests.verify import test_truths as of_truths

Found = list[tuple[str, str, int | None]]
# Damage that only a scan of all batches finds: in entries before the last one of a file, in transactions, and in the
# producers of snapshots.
NEEDS_ALL = {
    "position off by one", "offset off by one", "wrong timestamp in a time entry", "wrong offset in a time entry",
    "missing entry", "entry without a marker", "wrong producer in an entry", "entry begins late",
    "stable offset after its marker",
    "stable offset that hides a later transaction", "missing snapshots", "epochs: missing file", "epochs: begins late",
}  # fmt: skip


def found(path: Path, claims: Claims = NO_CLAIMS, **options: Any) -> Found:
    report = verify_partition(LOCAL, str(path), claims, **options)
    return [(finding.kind, finding.path, finding.byte_position) for finding in report]


class Counting(FileSystem):
    """Counts the bytes of `.log` files that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self._logs: set[int] = set()

    def open_read(self, path: str) -> int:
        fd = super().open_read(path)
        if path.endswith(names.LOG):
            self._logs.add(fd)
        return fd

    def read_into(self, fd: int, buffer: np.ndarray, position: int) -> int:
        count = super().read_into(fd, buffer, position)
        self.read += count if fd in self._logs else 0
        return count

    def close(self, fd: int) -> None:
        self._logs.discard(fd)
        super().close(fd)


def large(directory: Path, batches: int = 400) -> Path:
    """Write two closed segments and an empty active one, with an index entry for each 4 KiB."""
    values = [
        [encode_batch([Rec(base + i, of_files.NOW + base + i, b"k%d" % i, b"v" * 900)]) for i in range(batches)]
        for base in (0, batches)
    ]
    for base, segment in ((0, values[0]), (batches, values[1]), (2 * batches, [])):
        of_files._write(directory, {base: segment})
    return directory


def test_logs_of_real_brokers_have_no_findings(tmp_path: Path) -> None:
    facts = survey_log_dirs(LOCAL, [str(golden.unpack(tmp_path))])[0]
    assert facts.partitions
    for entry in facts.partitions:
        claims = claims_of(facts, entry.topic, entry.partition)
        assert found(Path(entry.path), claims, only_ends=True) == [], entry.path


def test_only_the_end_of_each_segment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_files, "INTERVAL", 4096)
    large(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.log"))
    fs = Counting()
    report = verify_partition(fs, str(tmp_path), only_ends=True)
    assert (report.findings, report.counts.bytes, report.counts.segments) == ((), size, 3)
    assert 0 < fs.read < 2 * 6000
    # A broker that recovers a segment reads all of it.
    fs = Counting()
    crashed = Claims(clean_shutdown=False, recovery_point=400)
    assert verify_partition(fs, str(tmp_path), crashed, only_ends=True).findings == ()
    assert size / 2 < fs.read < size / 2 + 6000
    # Damage in the part that is not read is not found, but damage at the end is found with its position.
    log = tmp_path / f"{0:020d}.log"
    good = log.read_bytes()
    log.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    assert found(tmp_path, only_ends=True) == []
    assert found(tmp_path) == [("checksum", str(log), 0)]
    log.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    last = len(good) - len(good) // 400
    assert found(tmp_path, only_ends=True) == found(tmp_path) != []
    assert found(tmp_path)[0][0] == "checksum" and last - 50 < (found(tmp_path)[0][2] or 0) < last + 50


@pytest.mark.parametrize("name", of_files.FILE_DAMAGE)
def test_damage_to_files_is_found(tmp_path: Path, name: str) -> None:
    of_files._write(tmp_path, of_files._segments())
    of_files.FILE_DAMAGE[name][0](tmp_path)
    assert found(tmp_path, only_ends=True) == ([] if name in NEEDS_ALL else found(tmp_path))


@pytest.mark.parametrize("name", of_truths.DAMAGE)
def test_contradictions_are_found(tmp_path: Path, name: str) -> None:
    of_truths._write(tmp_path, of_truths._segments())
    of_truths.DAMAGE[name][0](tmp_path)
    needs_all = name in NEEDS_ALL or name.startswith("snapshot: ")
    assert found(tmp_path, only_ends=True) == ([] if needs_all else found(tmp_path))


@pytest.mark.parametrize("field", ["log_start", "recovery_point", "high_watermark", "cleaner"])
def test_a_checkpoint_above_the_log_end_is_found(tmp_path: Path, field: str) -> None:
    of_truths._write(tmp_path, of_truths._segments())
    claims = Claims(**{field: of_truths.END + 1})
    assert found(tmp_path, claims, only_ends=True) == found(tmp_path, claims) != []


def test_a_missing_segment_is_found(tmp_path: Path) -> None:
    of_files._write(tmp_path, of_files._segments())
    (tmp_path / f"{130:020d}.log").unlink()
    kinds = {kind for kind, _, _ in found(tmp_path, only_ends=True)}
    assert kinds == {"segment-missing", "orphan"}


def test_offsets_without_a_trace_of_their_segment_are_not_reported(tmp_path: Path) -> None:
    """To report them, the records at every offset, and their keys, would have to be read."""
    log = of_missing.write(tmp_path / "orders-0")
    of_missing.remove(log, 300)
    assert [kind for kind, _, _ in found(log, of_missing.KNOWN)] == ["offsets-missing"]
    assert found(log, of_missing.KNOWN, only_ends=True) == []


@settings(deadline=None, max_examples=draws(300))
@given(st.data())
def test_only_ends_finds_nothing_that_verify_does_not_find(tmp_path_factory: Any, data: Any) -> None:
    """A few bytes of one file are changed."""
    directory = tmp_path_factory.mktemp("p")
    if data.draw(st.booleans()):
        of_files._write(directory, of_files._segments(data.draw(st.integers(0, 4))))
    else:
        of_truths._write(directory, of_truths._segments())
    file = directory / data.draw(st.sampled_from(sorted(path.name for path in directory.iterdir())))
    old = file.read_bytes()
    at = data.draw(st.integers(0, len(old)))
    file.write_bytes(old[:at] + data.draw(st.binary(max_size=24)) + old[at + data.draw(st.integers(0, 24)) :])
    places = {(kind, path) for kind, path, _ in found(directory)}
    assert {(kind, path) for kind, path, _ in found(directory, only_ends=True)} <= places


def test_the_command_reports_how_much_was_read(run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_files, "INTERVAL", 4096)
    log = large(log_dir / "large-0") / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:100] + b"damage" + log.read_bytes()[106:])
    assert run("verify", "--log-dirs", log_dir).exit_code == 1
    done = run("verify", "--log-dirs", log_dir, "--only-ends")
    assert done.exit_code == 0, done.output
    assert "no problems found at the ends of segments (--only-ends)" in done.stdout
    rows = rows_of(run("verify", "--log-dirs", log_dir, "--only-ends", "--output", "json"))
    assert {(row["only_ends"], row["records"], row["batches"]) for row in rows.values()} == {(True, None, None)}
    assert all(row["bytes"] and row["segments"] for row in rows.values())
