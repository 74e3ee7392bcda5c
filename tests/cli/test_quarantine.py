"""The file of `--quarantine-report` lists all partitions that were left unchanged, and is written completely or not at
all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from keytail.cli import quarantine
from tests.hostile.directories import run
from tests.reference.batches import Rec, encode_batch
from tests.reference.indexing import index_files

T0 = 1_700_000_000_000
SOUND = b"".join(encode_batch([Rec(i, T0 + i, b"k%d" % (i % 2), b"v")]) for i in range(6))
AT = 3 * len(SOUND) // 6
DAMAGED = SOUND[: AT + 65] + bytes([SOUND[AT + 65] ^ 1]) + SOUND[AT + 66 :]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    root = tmp_path / "logs"
    for name, log in (("sound-0", SOUND), ("bad-0", DAMAGED)):
        (root / name).mkdir(parents=True)
        for base, data in ((0, log), (6, b"")):
            index, times = index_files(SOUND if data else b"", base, 4096)
            for suffix, content in ((".log", data), (".index", index), (".timeindex", times)):
                (root / name / f"{base:020d}{suffix}").write_bytes(content)
                os.utime(root / name / f"{base:020d}{suffix}", (T0 / 1000, T0 / 1000))
    (root / "meta.properties").write_text("version=1\n")
    (root / ".kafka_cleanshutdown").write_text("{}")
    return root


COMPACT = ["compact", "--topics-have-no-overrides", "--high-watermark", "log-end", "--force", "--execute",
           "--map-memory", "4m", "--topic-config", "sound:cleanup.policy=compact", "--topic-config",
           "bad:cleanup.policy=compact"]  # fmt: skip


def reported(logs: Path, file: Path, arguments: list[str]) -> list[dict[str, Any]]:
    run([*arguments, "--log-dirs", str(logs), "--output", "json", "--quarantine-report", str(file)])
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("arguments", [["verify"], ["rebuild-index"], COMPACT])
def test_the_report_names_the_file_and_the_bytes(logs: Path, tmp_path: Path, arguments: list[str]) -> None:
    found = reported(logs, tmp_path / "report.json", arguments)
    [bad] = [entry for entry in found if entry["topic"] == "bad"]
    assert bad["status"] in ("corrupt", "damaged", "refused")
    assert (bad["partition"], bad["log_dir"]) == (0, str(logs))
    place = next(place for place in bad["problems"] if place["byte_position"] == AT)
    assert place["file"] == str(logs / "bad-0" / f"{0:020d}.log")
    assert place["offset"] == 3
    assert "invalid CRC" in place["what"]
    if bad["status"] != "refused":
        assert [help["how"] for help in bad["helps"]] == ["re-fetch", "salvage"]  # a clean shutdown leaves no torn tail


def test_the_report_states_that_a_torn_tail_may_be_truncated(logs: Path, tmp_path: Path) -> None:
    (logs / ".kafka_cleanshutdown").unlink()
    active = logs / "bad-0" / f"{6:020d}.log"
    active.write_bytes(encode_batch([Rec(6, T0, b"k", b"v")])[:-1])
    (logs / "bad-0" / f"{0:020d}.log").write_bytes(SOUND)
    place = quarantine.Place("torn", str(active), 0, None, 6)
    row = quarantine_row("corrupt", logs)
    assert quarantine.remedies_of(quarantine.LOCAL, row, [place]) == ["re-fetch", "truncate", "salvage"]
    below = quarantine.Place("torn", str(logs / "bad-0" / f"{0:020d}.log"), 0, None, 3)
    assert quarantine.remedies_of(quarantine.LOCAL, row, [place, below]) == ["re-fetch", "salvage"]
    (logs / "recovery-point-offset-checkpoint").write_text("0\n1\nbad 0 7\n")
    assert quarantine.remedies_of(quarantine.LOCAL, row, [place]) == ["re-fetch", "salvage"]
    (logs / "recovery-point-offset-checkpoint").unlink()
    (logs / ".kafka_cleanshutdown").write_text("{}")
    assert quarantine.remedies_of(quarantine.LOCAL, row, [place]) == ["re-fetch", "salvage"]


def test_a_tail_of_unknown_offset_may_be_truncated_only_in_a_segment_above_the_recovery_point(logs: Path) -> None:
    (logs / ".kafka_cleanshutdown").unlink()
    torn = quarantine.Place("torn", str(logs / "bad-0" / f"{6:020d}.log"), 0, None, None)
    row = quarantine_row("corrupt", logs)
    for point, is_offered in ((6, True), (7, False)):
        (logs / "recovery-point-offset-checkpoint").write_text(f"0\n1\nbad 0 {point}\n")
        assert ("truncate" in quarantine.remedies_of(quarantine.LOCAL, row, [torn])) == is_offered


def quarantine_row(status: str, logs: Path) -> Any:
    from keytail.run.rows import ResultRow

    return ResultRow("bad", 0, str(logs), status)


def test_a_range_to_truncate_has_its_first_and_last_byte_position(logs: Path, tmp_path: Path) -> None:
    (logs / ".kafka_cleanshutdown").unlink()
    (logs / "bad-0" / f"{0:020d}.log").write_bytes(SOUND)
    torn = encode_batch([Rec(6, T0, b"k", b"v")])
    (logs / "bad-0" / f"{6:020d}.log").write_bytes(torn + torn[:30])
    row_of: list[Any] = []
    from keytail.cli.selection import PartitionFilter
    from keytail.rebuild_index import driver as rebuild

    row_of += rebuild.rebuild(rebuild.Request(PartitionFilter((str(logs),), partitions=("bad-0",))))
    [place] = row_of[0].places
    assert (place.byte_position, place.byte_end, place.offset) == (len(torn), len(torn) + 30, 7)


@pytest.mark.parametrize("where", ["logs", "logs/bad-0", "link"])
def test_a_report_in_a_log_dir_is_a_usage_error(logs: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "link").symlink_to(logs / "bad-0")
    file = tmp_path / where / "report.json"
    answer = run([*COMPACT, "--log-dirs", str(logs), "--quarantine-report", str(file)])
    assert answer.status == 2
    assert not file.exists()
    assert (logs / "sound-0" / f"{0:020d}.log").read_bytes() == SOUND  # nothing was started


def test_a_report_that_cannot_be_created_is_a_usage_error(logs: Path, tmp_path: Path) -> None:
    for file in (tmp_path / "nowhere" / "report.json", tmp_path):
        assert run(["verify", "--log-dirs", str(logs), "--quarantine-report", str(file)]).status == 2


def test_the_report_is_empty_if_no_partition_is_left_unchanged(logs: Path, tmp_path: Path) -> None:
    assert reported(logs, tmp_path / "r", [*COMPACT, "--partitions", "sound-0"]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "r"]  # no temporary file is left


def test_a_report_that_cannot_be_written_at_the_end_is_reported(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are still printed, and the old report is kept."""
    (tmp_path / "r").write_text("old")
    monkeypatch.setattr(quarantine.os, "replace", lambda *a, **b: (_ for _ in ()).throw(OSError(28, "No space left")))
    answer = run(["verify", "--log-dirs", str(logs), "--output", "json", "--quarantine-report", str(tmp_path / "r")])
    assert answer.status == 1
    assert len(answer.rows()) == 2
    assert "could not be written" in answer.err
    assert (tmp_path / "r").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "r"]


def test_the_report_is_written_even_if_the_file_of_rows_fails(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quarantine.write_whole

    def write(path: str, write: Any) -> None:
        if path.endswith("rows"):
            raise OSError(28, "No space left")
        real(path, write)

    monkeypatch.setattr(quarantine, "write_whole", write)
    files = ["--rows-file", str(tmp_path / "rows"), "--quarantine-report", str(tmp_path / "r")]
    answer = run(["verify", "--log-dirs", str(logs), "--output", "json", *files])
    assert "could not be written" in answer.err
    assert (tmp_path / "r").exists()


@pytest.mark.parametrize("missing", ["rows", "r"])
def test_a_file_that_cannot_be_written_changes_the_status_of_a_run_without_errors(
    missing: str, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quarantine.write_whole

    def write(path: str, write: Any) -> None:
        if path.endswith(f"/{missing}"):
            raise OSError(28, "No space left")
        real(path, write)

    files = ["--rows-file", str(tmp_path / "rows"), "--quarantine-report", str(tmp_path / "r")]
    command = [*COMPACT, "--log-dirs", str(logs), "--partitions", "sound-0", *files]
    assert run(command).status == 0
    for name in ("rows", "r"):
        (tmp_path / name).unlink()
    monkeypatch.setattr(quarantine, "write_whole", write)
    assert run(command).status == 1
    assert [name for name in ("rows", "r") if not (tmp_path / name).exists()] == [missing]


def test_rows_in_json_do_not_contain_the_report(logs: Path) -> None:
    for arguments in (["verify"], ["rebuild-index"], ["plan"]):
        for row in run([*arguments, "--log-dirs", str(logs), "--output", "json"]).rows():
            assert not {"problem", "places"} & row.keys()


@pytest.mark.parametrize("arguments", [["verify"], ["rebuild-index"], COMPACT])
def test_all_rows_are_written_to_a_file(logs: Path, tmp_path: Path, arguments: list[str]) -> None:
    """The file has the bytes that `--output json` prints, even if a table is printed."""
    both = [*arguments, "--log-dirs", str(logs), "--rows-file", str(tmp_path / "rows")]
    answer = run([*both, "--output", "json", "--quarantine-report", str(tmp_path / "bad")])
    assert (tmp_path / "rows").read_bytes() == answer.out
    assert {row["topic"] for row in answer.rows()} == {"sound", "bad"}
    assert [entry["topic"] for entry in json.loads((tmp_path / "bad").read_text())] == ["bad"]
    (tmp_path / "rows").unlink()
    assert run(both).out.startswith((b"Verified", b"Dry run", b"Compacted"))
    assert {row["topic"] for row in json.loads((tmp_path / "rows").read_text())} == {"sound", "bad"}


def test_a_file_of_rows_in_a_log_dir_is_a_usage_error(logs: Path) -> None:
    answer = run([*COMPACT, "--log-dirs", str(logs), "--rows-file", str(logs / "rows")])
    assert answer.status == 2
    assert "--rows-file is inside a log dir" in answer.err
    assert not (logs / "rows").exists()


def test_a_run_that_cannot_begin_writes_no_rows(logs: Path, tmp_path: Path) -> None:
    assert run(["verify", "--log-dirs", str(tmp_path / "none"), "--rows-file", str(tmp_path / "rows")]).status == 2
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("rows_so_far", [None, []])
def test_a_stopped_run_writes_the_rows_so_far(tmp_path: Path, rows_so_far: list[Any] | None) -> None:
    stop = quarantine.Stopped(15)
    stop.rows = rows_so_far
    with pytest.raises(quarantine.Stopped), quarantine.writing_row_files(None, [], str(tmp_path / "rows")):
        raise stop
    assert (tmp_path / "rows").exists() == (rows_so_far is not None)
