"""`--report` of each command on the log dir of a real broker, the page of a run that fails, and the command `report`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result

from keytail.cli.stopping import Stopped
from keytail.compact.map_phase.key_counts import HOTTEST
from keytail.errors import KeytailError, UsageProblem
from keytail.ledger import history
from keytail.ledger.command import PartitionRow, RunRow
from keytail.report import page as page_module
from keytail.report import writing
from keytail.report.writing import Page, reporting
from keytail.run.ended import SparkEnded
from keytail.run.rows import ResultRow
from keytail.verify import driver as verification
from tests import golden
from tests.compact.test_command import keytail
from tests.log_dirs import BASE_MS, snapshot, write_log_dir
from tests.no_spark import without_spark
from tests.reference import key_counts as model
from tests.reference.batches import Rec

Run = Callable[..., Result]


def raw_rows(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<pre class="raw">(.*?)</pre>', page, re.DOTALL)
    assert found is not None
    rows: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return rows


def content_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of the rows as it is on a page."""
    return [{name: value for name, value in row.items() if value not in (None, "", [], {})} for row in rows]


def text_of(page: str) -> str:
    found = re.search(r"<h1>.*?</span>(.*?)</h1>", page, re.DOTALL)
    assert found is not None
    return html.unescape(found[1])


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """Unpack a log dir written by a broker, with a damaged batch in zstd-0."""
    log_dir = golden.unpack(tmp_path)
    second = sorted((log_dir / "zstd-0").glob("*.log"))[1]
    data = bytearray(second.read_bytes())
    data[300] ^= 1
    second.write_bytes(data)
    return log_dir


def flags_of(log_dir: Path) -> tuple[str, ...]:
    return "--config", str(log_dir.parent / "server.properties"), "--log-dirs", str(log_dir), "--output", "json"


@pytest.mark.long
def test_a_plan_and_its_execution_have_pages(run: Run, broker: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    planned = run("plan", *flags_of(broker), "--force", "--report", file)
    assert planned.exit_code == 0
    page = file.read_text()
    assert "18 of 23 partitions would be compacted" in text_of(page)
    assert content_of(json.loads(planned.stdout)) == raw_rows(page)
    assert page.count("<svg") == 2 + 6, "there must be two charts and six maps"
    assert "dirty</li>" in page
    assert "live</li>" not in page, "live records, which were not counted, must not be shown"

    without = json.loads(run("plan", *flags_of(broker), "--force").stdout)
    assert without == json.loads(planned.stdout), "a report must not change rows"

    done = keytail("compact", *flags_of(broker), "--force", "--execute", "--report", file)
    assert done.returncode == 3, done.stderr
    assert f"keytail: the report is {file}" in done.stderr
    page, rows = file.read_text(), json.loads(done.stdout)
    assert content_of(rows) == raw_rows(page)
    assert "detail" not in rows[0]
    assert "17 of 23 partitions compacted. 1 partition is not done." in text_of(page)
    assert "batch has an invalid CRC" in page
    assert "given below" in page
    for words in ("live</li>", "0 to 20 % live", ">prove<", "keys mapped", "records per key", "tombstones and",
                  "exit status</dt><dd>3", "Settings that were given", "--force --execute"):  # fmt: skip
        assert words in page, words
    counted = re.findall(r"of ([\d,]+) records ([\d,]+) were live", page)
    assert len(counted) == 6


@pytest.mark.long
def test_verify_rebuild_index_and_audit_have_pages(run: Run, broker: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    other = golden.unpack(tmp_path / "other")
    (other / "lz4-0" / "00000000000000000000.timeindex").write_bytes(b"")
    before = snapshot(broker)

    verified = run("verify", *flags_of(broker), "--report", file)
    assert verified.exit_code == 1
    assert "1 of 23 partitions has findings (1 damaged)" in text_of(file.read_text())
    assert content_of(json.loads(verified.stdout)) == raw_rows(file.read_text())

    found = run("rebuild-index", *flags_of(other), "--report", file)
    assert found.exit_code == 1
    assert "Index files of 1 of 23 partitions are missing or wrong." in text_of(file.read_text())
    assert "dry run</span>" in file.read_text()
    assert content_of(json.loads(found.stdout)) == raw_rows(file.read_text())

    names = ("--replica", f"a={broker}", "--replica", f"b={other}", "--output", "json")
    audited = run("audit", *names, "--report", file)
    assert audited.exit_code == 3
    assert "The replicas of 22 of 23 partitions are alike" in text_of(file.read_text())
    assert content_of(json.loads(audited.stdout)) == raw_rows(file.read_text())
    assert snapshot(broker) == before


@pytest.mark.long
def test_a_compaction_out_of_place_has_a_page(run: Run, broker: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "page.html", tmp_path / "target"
    inside = run("compact", *flags_of(broker), "--output-dir", target, "--report", target / "page.html")
    assert inside.exit_code == 2
    arguments = ("compact", *flags_of(broker), "--force", "--output-dir", target, "--report", file)
    assert run(*arguments).exit_code == 0
    assert "18 of 23 partitions would be compacted" in text_of(file.read_text())
    with without_spark():
        done = run(*arguments, "--execute", "--topic", "none|lz4|zstd")
    assert done.exit_code == 3, done.stderr
    assert "3 of 4 partitions compacted" in text_of(file.read_text())
    assert content_of(json.loads(done.stdout)) == raw_rows(file.read_text())
    assert "live</li>" in file.read_text()


# Keys


def secret_log_dir(path: Path) -> tuple[Path, dict[str, list[Rec]]]:
    """Write two partitions with unique keys and values; one key of `orders-0` has most of the records."""
    partitions = {}
    for name in ("orders-0", "users-0"):
        keys = [b"zebra-%s-%d" % (name.encode(), n // 3 if n % 5 else 0) for n in range(400)]
        partitions[name] = [Rec(n, BASE_MS + n, key, b"quokka-%d" % n) for n, key in enumerate(keys)]
    return write_log_dir(path, partitions), partitions


def check_no_keys(page: str, partitions: dict[str, list[Rec]]) -> None:
    """Check that no key and no value is in the page as text, hex digits or base64, at any byte alignment."""
    assert "zebra" not in page
    assert "quokka" not in page
    for records in partitions.values():
        for data in {record.key for record in records} | {record.value for record in records}:
            assert data is not None
            assert data.hex() not in page.lower()
    for word in (b"zebra-orders", b"quokka-"):
        for before in range(3):
            encoded = base64.b64encode(b"x" * before + word).decode()
            assert encoded[4 if before else 0 : -4] not in page
        assert word.hex() not in page.lower()


def expected_hottest(records: list[Rec], end: int) -> list[tuple[int, int, bytes]]:
    return model.hottest([(record.key or b"", record.offset) for record in records if record.offset < end], HOTTEST)


SETTINGS = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
            "users:cleanup.policy=compact")  # fmt: skip


@pytest.mark.parametrize("strategy", ["in place", "elsewhere"])
@pytest.mark.parametrize("show", [False, True])
def test_hottest_keys_are_listed_by_hashes_or_shown(strategy: str, show: bool, run: Run, tmp_path: Path) -> None:
    with without_spark():
        check_hottest_keys(strategy, show, run, tmp_path)


@pytest.mark.one_of()
@pytest.mark.spark
@pytest.mark.parametrize("show", [False, True])
def test_hottest_keys_of_a_fan_out_are_listed(show: bool, run: Run, on_spark: None, tmp_path: Path) -> None:
    check_hottest_keys("fan-out", show, run, tmp_path)


def check_hottest_keys(strategy: str, show: bool, run: Run, tmp_path: Path) -> None:
    log_dir, partitions = secret_log_dir(tmp_path / "logs")
    file, rows_file = tmp_path / "page.html", tmp_path / "rows.json"
    flags = {"elsewhere": ["--output-dir", tmp_path / "target"], "fan-out": ["--fan-out", "always"]}.get(strategy, [])
    flags += ["--show-keys"] if show else []
    arguments = ("compact", "--log-dirs", log_dir, *SETTINGS, "--force", "--execute", *flags, "--output", "json",
                 "--report", file, "--rows-file", rows_file)  # fmt: skip
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    page = file.read_text()
    ends = {name: max(int(log.stem) for log in (log_dir / name).glob("*.log")) for name in partitions}
    expected = sorted(
        ((number, name, offset, key) for name, records in partitions.items()
         for number, offset, key in expected_hottest(records, ends[name])),
        key=lambda item: (-item[0], item[1], -item[2]),
    )[:HOTTEST]  # fmt: skip
    [table] = re.findall(r'<table class="rows" data-name="hot_keys">(.*?)</table>', page, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    digests = [hashlib.sha256(key).hexdigest()[:16] for *_, key in expected]
    reported = [[digest, name, str(number)] for digest, (number, name, _, _) in zip(digests, expected, strict=True)]
    at = 1 if show else 0
    assert [row[at : at + 3] for row in rows] == reported
    assert [row[-1] for row in rows] == [str(offset) for _, _, offset, _ in expected]
    if show:
        assert [html.unescape(row[0]) for row in rows] == [f'"{key.decode()}"' for *_, key in expected]
        assert "this page contains data" in page
    else:
        check_no_keys(page, partitions)
    assert "quokka" not in page
    for text in (done.stdout, done.stderr, rows_file.read_text()):
        assert "zebra" not in text, "rows must not contain keys"


@pytest.mark.long
def test_pages_of_inspections_and_plans_contain_no_keys(run: Run, tmp_path: Path) -> None:
    """The page of an audit has an example of a difference, whose value is only in the raw rows, as a hash."""
    log_dir, partitions = secret_log_dir(tmp_path / "a")
    other = {name: [replace(record, value=b"quokka!") if record.offset % 50 == 7 else record for record in records]
             for name, records in partitions.items()}  # fmt: skip
    write_log_dir(tmp_path / "b", {name: records[:-3] for name, records in other.items()})
    file = tmp_path / "page.html"
    audited = run("audit", "--replica", f"a={log_dir}", "--replica", f"b={tmp_path / 'b'}", "--report", file)
    assert audited.exit_code == 1
    assert "value_hash" in file.read_text()
    check_no_keys(file.read_text(), other)
    check_no_keys(file.read_text(), partitions)
    damaged = next((log_dir / "users-0").glob("*300.log"))
    damaged.write_bytes(damaged.read_bytes()[:-40].replace(b"zebra-users-0-100", b"zebra-users-1-100"))
    for command, more in (("verify", ()), ("plan", SETTINGS), ("compact", SETTINGS), ("rebuild-index", ())):
        run(command, "--log-dirs", log_dir, *more, "--report", file)
        check_no_keys(file.read_text(), partitions)
        assert ("a plan reads no records" in file.read_text()) == (command in ("plan", "compact"))


def test_keys_are_shown_only_in_a_page(run: Run, log_dir: Path) -> None:
    result = run("compact", "--log-dirs", log_dir, "--show-keys")
    assert (result.exit_code, "--show-keys requires --report" in result.stderr) == (2, True)


# Where a page may be written


@pytest.mark.parametrize("command", ["plan", "compact", "verify", "rebuild-index", "audit"])
def test_a_page_in_a_log_dir_is_a_usage_error(command: str, run: Run, log_dir: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    which = ("--replica", log_dir, "--replica", tmp_path / "b") if command == "audit" else ("--log-dirs", log_dir)
    (tmp_path / "link").symlink_to(log_dir / "orders-0")
    for path in (log_dir / "page.html", log_dir / "orders-0" / "x.html", tmp_path / "link" / "x.html"):
        result = run(command, *which, "--report", path)
        assert result.exit_code == 2
        assert "is inside a log dir" in result.stderr
    (tmp_path / "link").unlink()
    result = run(command, *which, "--report", tmp_path / "nowhere" / "page.html")
    assert (result.exit_code, "cannot be written" in result.stderr) == (2, True)
    assert snapshot(tmp_path) == before


def test_a_page_in_the_log_dir_of_another_broker_is_a_usage_error(run: Run, log_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "meta.properties").write_text("version=1\n")
    result = run("plan", "--log-dirs", log_dir, "--report", other / "page.html")
    assert result.exit_code == 2
    assert list(other.iterdir()) == [other / "meta.properties"]


def test_missing_packages_end_a_run_before_it_starts(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run("plan", "--log-dirs", log_dir, "--report", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "pip install 'keytail[report]'" in result.stderr
    assert result.stdout == ""


# Failures


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def mistake(*_: Any) -> None:
    raise ValueError("a mistake")


@pytest.mark.parametrize("function", ["os.fsync", "os.replace", "page"])
@pytest.mark.parametrize(("status", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_a_page_that_cannot_be_written_is_reported_and_changes_only_exit_status_0(
    function: str, status: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "page.html"
    file.write_text("of yesterday")
    if function == "page":
        monkeypatch.setattr(page_module, "page", mistake)
    else:
        monkeypatch.setattr(function, full_disk)
    with pytest.raises(typer.Exit) as ended, reporting(str(file), Page("compact"), []):
        raise typer.Exit(status)
    monkeypatch.undo()
    assert ended.value.exit_code == expected
    assert "the report could not be written" in capfd.readouterr().err
    assert file.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [file]


ROWS = [ResultRow("orders", 0, "/logs", "compacted", bytes_before=4096, bytes_after=1024),
        ResultRow("orders", 1, "/logs", "skipped", "interrupted before anything was replaced")]  # fmt: skip


def stopped(rows: list[Any] | None) -> Stopped:
    stop = Stopped(signal.SIGTERM)
    stop.rows = rows
    return stop


def spark_ended(rows: list[Any] | None) -> SparkEnded:
    end = SparkEnded()
    end.rows = rows
    return end


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (stopped(ROWS), "The run did not complete: interrupted by SIGTERM. Reclaimed 3.0 KiB of 4.0 KiB"),
        (spark_ended(ROWS), "The run did not complete: Spark"),
        (stopped(None), "interrupted by SIGTERM. Reclaimed 3.0 KiB of 4.0 KiB (75 %): 1 of 1 partition compacted."),
        (KeytailError("the disk is on fire", remedy="Run"), "did not complete: the disk is on fire. Run. Recl"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "did not complete: out of memory on host"),
    ],
)
def test_a_run_that_ends_early_has_a_page_of_its_rows_so_far(
    problem: BaseException, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    page = Page("compact", execute=True)
    page.add_row(ROWS[0])
    with pytest.raises(type(problem)) as raised, reporting(str(file), page, []):
        raise problem
    assert raised.value is problem
    text = file.read_text()
    assert words in text_of(text)
    assert "Run the same command again to continue." in text
    assert '<header class="bad">' in text
    assert len(raw_rows(text)) == (2 if getattr(problem, "rows", None) else 1)


def test_a_usage_error_writes_no_page(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem), reporting(str(tmp_path / "page.html"), Page("plan"), []):
        raise UsageProblem("--topic names none")
    assert list(tmp_path.iterdir()) == []


def test_without_the_flag_no_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "write_page", mistake)
    with pytest.raises(typer.Exit), reporting(None, Page("plan"), []):
        raise typer.Exit(0)


def test_a_stopped_verify_reports_the_partitions_that_it_has_checked(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keytail.verify.driver as spark_verify

    file, real = tmp_path / "page.html", spark_verify.verify_here

    def some(tasks: Any, on_result: Any) -> None:
        real(tasks[:2], on_result)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(spark_verify, "verify_here", some)
    result = run("verify", "--log-dirs", log_dir, "--report", file)
    assert result.exit_code == 143
    assert "interrupted by SIGTERM. No problems were found in 2 partitions" in text_of(file.read_text())
    assert verification.verify is not None


# Pages of a ledger

RUN = RunRow(
    "20260101T000000Z-3f2a91c0", "compact", "broker-7", "interrupted", "the run recorded no outcome", 1_767_225_600_000,
    None, ("/logs",), arguments=("compact", "--ledger", "s3://me:hunter2@bucket/l"), versions={"keytail": "1.2.3"},
    config={"broker log.retention.hours": "168"}, now_ms=1_767_225_600_000,
)  # fmt: skip
PARTITION = PartitionRow("orders", 0, "/logs", "compacted", "", run_id=RUN.run_id, command="compact", bytes_before=4096,
                         bytes_after=1024, start_ms=1_767_225_600_000, end_ms=1_767_225_601_000)  # fmt: skip


def test_runs_of_a_ledger_are_shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "page.html", []

    def one(flags: Any, run_id: str, **more: Any) -> Any:
        asked.append((run_id, more["newest"]))
        return RUN, [PARTITION]

    monkeypatch.setattr(history, "run", one)
    assert run("report", "--ledger", "/l", file).exit_code == 0
    assert run("report", "--ledger", "/l", "--run", "3f2a91c0", file).exit_code == 0
    assert asked == [("", True), ("3f2a91c0", False)]
    text = file.read_text()
    assert "The run did not complete: the run recorded no outcome. Reclaimed 3.0 KiB of 4.0 KiB" in text_of(text)
    assert "broker log.retention.hours" in text
    assert "hunter2" not in text

    monkeypatch.setattr(history, "runs_since", lambda flags, since_ms, **_: ([RUN] * (since_ms < 10**12), [PARTITION]))
    assert run("report", "--ledger", "/l", "--since", "1970-01-02", file).exit_code == 0
    assert "1 run since 2026-01-01 00:00:00 UTC" in file.read_text()
    assert "<summary>Runs (1)" in file.read_text()
    none = run("report", "--ledger", "/l", "--since", "2026-01-02", file)
    assert (none.exit_code, "[no-run-since]" in none.stderr) == (2, True)


@pytest.mark.parametrize("flags", [("--run", "x", "--since", "1970-01-01"), ("--since", "yesterday")])
def test_wrong_flags_of_report_are_refused(flags: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    assert run("report", "--ledger", "/l", *flags, tmp_path / "page.html").exit_code == 2


def test_the_latest_run_and_runs_since_a_time_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    from keytail.ledger.of_run import LedgerFlags

    runs = [replace(RUN, run_id=f"2026010{n}T000000Z-{n}", start_ms=1000 * n) for n in range(3)]
    asked: list[Any] = []
    monkeypatch.setattr(history, "folded_runs", lambda rows: runs)
    monkeypatch.setattr(history, "folded_partitions", lambda rows: [])
    monkeypatch.setattr(history, "_read", lambda flags, table, filters, spark: asked.append((table, filters)))
    assert history.run(LedgerFlags("/l"), "", newest=True)[0] is runs[2]
    assert history.runs_since(LedgerFlags("/l"), 1000)[0] == runs[1:]
    assert asked[-1] == ("partitions", {"run_id": [run.run_id for run in runs[1:]]})
    assert history.runs_since(LedgerFlags("/l"), 5000) == ([], [])


def test_a_ledger_without_runs_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(history, "_read", lambda flags, table, filters, spark: [])
    done = run("report", "--ledger", "/l", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "the ledger has no runs (/l)" in done.stderr
