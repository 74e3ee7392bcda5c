"""A segment that is missing in the middle of a log is detected, and a gap that a cleaner left is not reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.producers import encode_snapshot
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.verify.finding_kinds import KINDS
from keytail.verify.scope import Claims, claims_of
from keytail.verify.task import verify_partition
from tests import golden
from tests.chance import draws
from tests.log_dirs import BASE_MS as NOW
from tests.log_dirs import random_records, write_partition
from tests.reference.batches import Rec

END = 600
KNOWN = Claims(True, recovery_point=END, high_watermark=END)
ABOUT_GAPS = {"segment-missing", "segment-perhaps-missing", "offsets-missing"}
SUFFIXES = (".log", ".index", ".timeindex", ".snapshot")


def write(path: Path, records: Sequence[Rec] = ()) -> Path:
    """Write six segments of 100 offsets, as brokers since 2.8 leave them without a compaction, and return the path."""
    write_partition(path, records or random_records(1, END), segments=6)
    for base in (*range(100, END, 100), END):
        (path / f"{base:020d}.snapshot").write_bytes(encode_snapshot([]))
    (path / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    return path


def remove(path: Path, base: int, *suffixes: str) -> None:
    for suffix in suffixes or SUFFIXES:
        (path / f"{base:020d}{suffix}").unlink(missing_ok=True)


def found(path: Path, claims: Claims = KNOWN, **options: Any) -> list[tuple[str, str, int | None, int | None]]:
    report = verify_partition(LOCAL, str(path), claims, **options)
    return [(f.kind, Path(f.path).name, f.offset, f.byte_position) for f in report if f.kind != "orphan"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "orders-0")


def test_a_complete_log_has_no_findings(log: Path) -> None:
    assert verify_partition(LOCAL, str(log), KNOWN).findings == ()


@pytest.mark.parametrize("base", [100, 300, 400])
def test_a_missing_log_file_is_found_by_its_indexes(log: Path, base: int) -> None:
    remove(log, base, ".log")
    for claims in (KNOWN, replace(KNOWN, cleaner=END), Claims()):  # for any cleaner checkpoint
        assert found(log, claims) == [("segment-missing", f"{base:020d}.index", base, None)]
    [missing] = [f for f in verify_partition(LOCAL, str(log), KNOWN) if f.kind == "segment-missing"]
    assert f"offsets {base} to {base + 99} have no batch" in missing.what
    assert missing.severity == "error" and not missing.start_loses
    assert "replica" in missing.remedy


@pytest.mark.parametrize("base", [100, 300, 400])
def test_a_segment_without_files_is_found_by_its_snapshot(log: Path, base: int) -> None:
    remove(log, base, ".log", ".index", ".timeindex")
    for claims in (KNOWN, Claims()):
        assert found(log, claims) == [("segment-missing", f"{base:020d}.snapshot", base, None)]


def test_a_snapshot_of_a_followers_shutdown_is_only_a_warning(log: Path) -> None:
    """A follower was stopped at offset 300. Its leader had removed offsets 300 to 399 by compaction, so the batch that
    it fetched next began the segment 400. A lost segment of a compacted partition may leave the same files."""
    remove(log, 300, ".log", ".index", ".timeindex")
    compacted = replace(KNOWN, cleaner=200)
    [warning] = verify_partition(LOCAL, str(log), compacted)
    assert (warning.kind, warning.severity) == ("segment-perhaps-missing", "warning")
    assert "audit" in warning.remedy
    (log / f"{300:020d}.snapshot").rename(log / f"{350:020d}.snapshot")
    assert [kind for kind, *_ in found(log, compacted)] == ["segment-missing"], "no follower stopped at 350"
    (log / f"{300:020d}.timeindex").touch()
    assert {kind for kind, *_ in found(log, compacted)} == {"segment-missing"}, "a shutdown creates no index file"


def test_a_segment_without_a_trace_is_found_if_every_other_offset_has_its_record(log: Path) -> None:
    remove(log, 300)
    assert found(log) == [("offsets-missing", f"{400:020d}.log", 300, 0)]
    [missing] = verify_partition(LOCAL, str(log), KNOWN)
    assert "offsets 300 to 399 have no batch" in missing.what
    assert missing.severity == "warning" and not missing.start_loses
    remove(log, 400)
    assert found(log) == [("offsets-missing", f"{500:020d}.log", 300, 0)], "there must be one gap for both segments"


@pytest.mark.parametrize("clean_shutdown", [True, False])
def test_a_copy_without_checkpoints_is_checked_by_its_log(log: Path, clean_shutdown: bool) -> None:
    """A copy may also lack .kafka_cleanshutdown, because it is not a log dir that a broker left."""
    assert found(log, Claims(clean_shutdown)) == []
    remove(log, 300)
    assert found(log, Claims(clean_shutdown)) == [("offsets-missing", f"{400:020d}.log", 300, 0)]
    without_a_record(log)
    assert "offsets-missing" not in {kind for kind, *_ in found(log, Claims(clean_shutdown))}, "cleaned logs have gaps"


# States of a log that may be healthy although offsets in its middle have no batch.
HEALTHY: dict[str, tuple[Callable[[Path], object], Claims]] = {
    "below the cleaner checkpoint": (lambda d: remove(d, 300), replace(KNOWN, cleaner=500)),
    "below the log start": (lambda d: remove(d, 300), replace(KNOWN, log_start=400)),
    "the first segments were removed": (lambda d: [remove(d, base) for base in (0, 100, 200)], KNOWN),
    "recovered at the next start": (lambda d: remove(d, 300), Claims(False, recovery_point=200, high_watermark=END)),
    "two gaps, as after cleaning": (lambda d: [remove(d, base) for base in (100, 300)], KNOWN),
    "another offset has no record": (lambda d: [remove(d, 300), without_a_record(d)], KNOWN),
    "a snapshot of an old broker": (
        lambda d: [remove(d, 300, ".log", ".index", ".timeindex"), (d / "partition.metadata").unlink()],
        replace(KNOWN, cleaner=END),
    ),
    "a snapshot of a segment that was merged": (
        lambda d: (d / f"{150:020d}.snapshot").write_bytes(encode_snapshot([])), KNOWN,
    ),
    "a replacement is not finished": (
        lambda d: [remove(d, 300, ".log"), (d / f"{300:020d}.log.deleted").touch()], replace(KNOWN, cleaner=END),
    ),
    "a broker is starting or was killed": (
        lambda d: remove(d, 300, ".log"), Claims(False, recovery_point=END, high_watermark=END, cleaner=END),
    ),
}  # fmt: skip


def without_a_record(path: Path) -> None:
    """Remove the first batch of the log, as if all of its records were superseded."""
    for suffix in (".log", ".index", ".timeindex"):
        (path / f"{0:020d}{suffix}").unlink()
    whole = path.with_name("whole")
    write_partition(whole, random_records(1, END)[10:100], segments=1)
    for suffix in (".log", ".index", ".timeindex"):
        (whole / f"{10:020d}{suffix}").rename(path / f"{0:020d}{suffix}")
    shutil.rmtree(whole)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_log_that_may_be_healthy_has_no_findings(name: str, log: Path) -> None:
    change, claims = HEALTHY[name]
    change(log)
    kinds = {kind for kind, *_ in found(log, claims)}
    assert not kinds & ABOUT_GAPS


def test_records_that_a_cleaner_would_retain_are_no_evidence(tmp_path: Path) -> None:
    """Each key occurs once below the gap: records in the gap may have been superseded by later ones."""
    once = [Rec(offset, NOW + offset, b"key-%d" % offset, b"v") for offset in range(END)]
    log = write(tmp_path / "orders-0", once)
    remove(log, 300)
    assert found(log) == []
    keyless = [replace(item, key=None) if item.offset == 299 else item for item in once]
    log = write(tmp_path / "keyless-0", keyless)
    remove(log, 300)
    assert found(log) == [("offsets-missing", f"{400:020d}.log", 300, 0)]
    marked = [replace(item, key=b"key-450") if item.offset == 420 else item for item in once]
    log = write(tmp_path / "above-0", marked)
    remove(log, 300)
    assert found(log) == [], "records above the gap are no evidence"


def test_no_gap_is_reported_while_a_broker_runs(log: Path) -> None:
    remove(log, 300)
    assert found(log, live=True) == []


@settings(max_examples=draws(50), deadline=None)
@given(gone=st.lists(st.integers(1, 4), unique=True, min_size=1, max_size=3), cleaner=st.integers(0, END))
def test_no_cleaned_log_is_reported_as_missing_a_segment(
    gone: list[int], cleaner: int, tmp_path_factory: Any
) -> None:
    """Segments whose records were all removed are not reported, whatever the cleaner checkpoint is."""
    log = write(tmp_path_factory.mktemp("cleaned") / "orders-0")
    for number in gone:
        remove(log, number * 100)
    assert found(log, replace(KNOWN, cleaner=cleaner)) == []


def test_golden_logs_have_no_findings_even_without_the_cleaner_checkpoint(tmp_path: Path) -> None:
    facts = survey_log_dirs(LOCAL, [str(golden.unpack(tmp_path))])[0]
    assert facts.partitions
    for entry in facts.partitions:
        claims = claims_of(facts, entry.topic, entry.partition)
        others = replace(claims, cleaner=None), replace(claims, clean_shutdown=not claims.clean_shutdown)
        for item in (claims, *others, Claims(), Claims(clean_shutdown=False)):
            kinds = {finding.kind for finding in verify_partition(LOCAL, entry.path, item)}
            assert not kinds & ABOUT_GAPS, entry.path


def test_findings_about_gaps_have_a_remedy() -> None:
    for kind in ABOUT_GAPS:
        assert "put them back" in KINDS[kind].remedy
        assert "offsets" in KINDS[kind].what
