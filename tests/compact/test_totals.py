"""The totals that a plan prints below its rows, and the output of a run about unchanged partitions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from keytail.cli.selection import PartitionFilter
from keytail.compact import totals
from keytail.compact.command import Request
from keytail.compact.totals import Downtime, Scratch, figures, sentences, totals_of
from keytail.errors import refusal
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import FileSystem
from keytail.run import workers
from keytail.run.rates import COMMAND_S, SPARK_START_S, VERIFIED_BYTES_PER_S
from keytail.run.rows import ResultRow
from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS

GIB = 1 << 30


class Disks(FileSystem):
    """/a and /b are on one file system, /c on another."""

    def stat(self, path: str) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(device=2 if path == "/c" else 1)

    def free_bytes(self, path: str) -> int:
        return 3 * GIB if path == "/c" else 100 * GIB


def row(number: int, log_dir: str, status: str = "would-compact", **more: object) -> ResultRow:
    due = {"strategy": "one task", "expected_s": 10.0, "expected_scratch_bytes": 2 * GIB}
    more = {**(due if status == "would-compact" else {}), **more}
    return ResultRow("t", number, log_dir, status, bytes_before=2 * GIB, **more)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (totals, workers):
        monkeypatch.setattr(module, "cores", lambda: 4)
    monkeypatch.setattr(totals, "expected_seconds", lambda commands: 17.0 if commands == ["compact", "verify"] else 0.0)


def test_totals_have_sums_by_file_system_and_the_parts_of_the_downtime(machine: None) -> None:
    no_room = refusal("no room", slug="not-enough-space")
    rows = [row(0, "/a"), row(1, "/b"), row(2, "/c"), row(3, "/c", "refused", error=no_room), row(4, "/a", "clean")]
    found = totals_of(rows, Request(PartitionFilter()), Disks())
    assert found is not None
    assert found.read_bytes == 6 * GIB
    assert found.scratch == (Scratch("/a", 4 * GIB, 100 * GIB), Scratch("/c", 2 * GIB, 3 * GIB, without_room=1))
    verify_s = max(5 * 2 * GIB / VERIFIED_BYTES_PER_S / 4, 2 * GIB / VERIFIED_BYTES_PER_S)
    down = found.downtime
    assert down is not None
    assert (down.compile_s, down.start_spark_s, down.compact_s) == (17.0, 0.0, COMMAND_S + 10.0)
    assert down.verify_s == pytest.approx(COMMAND_S + verify_s)
    assert down.total_s == pytest.approx(sum((17.0, down.compact_s, down.verify_s)))
    text = sentences(found)
    assert text[0] == "Scratch space: up to 4.0 GiB, of 100.0 GiB free on the file system of /a."
    assert "At most half of that is used at a time" in text[1]
    assert "1 partitions without room are tried again when others have freed space." in text[1]
    assert text[2] == (
        f"Downtime: about {down.total_s:.1f} s from the stop of the broker to its start, on 4 cores: 17.0 s to compile "
        f"the kernels of both commands, 11.0 s to compact, {down.verify_s:.1f} s to verify."
    )
    facts = figures(found)
    assert json.loads(json.dumps(facts))["scratch"][1]["without_room"] == 1
    assert facts["downtime_s"] == round(down.total_s, 1)


@pytest.mark.parametrize(
    ("given", "strategy", "seconds", "starts"),
    [
        ({}, "one task", 10.0, 0),
        ({}, "maybe fan-out", 10.0, 1),
        ({"fan_out": "never"}, "maybe fan-out", 10.0, 0),
        ({"fan_out": "always"}, "one task", 10.0, 1),
        ({}, "one task", 100.0, 1),
        ({"master": "local[2]"}, "one task", 1.0, 2),
    ],
)
def test_the_start_of_spark_counts_if_a_run_starts_it(
    given: dict, strategy: str, seconds: float, starts: int, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.SPARK.__class__, "missing", lambda extra: ())
    rows = [row(0, "/a", strategy=strategy, expected_s=seconds)]
    found = totals_of(rows, Request(PartitionFilter(), **given), Disks())
    assert found is not None and found.downtime is not None
    assert found.downtime.start_spark_s == starts * SPARK_START_S


def test_no_downtime_is_printed_if_it_is_unknown(machine: None) -> None:
    on_cluster = totals_of([row(0, "/a")], Request(PartitionFilter(), master="spark://host:7077"), Disks())
    assert on_cluster is not None and on_cluster.downtime is None
    assert "downtime_s" not in figures(on_cluster)
    assert totals_of([row(0, "/a", "clean")], Request(PartitionFilter()), Disks()) is None
    assert totals_of([row(0, "/a")], Request(PartitionFilter(), output_dirs=("/out",)), Disks()) is None
    assert Downtime(1.0, 2.0, 3.0, 4.0).total_s == 10.0


def test_totals_are_printed_below_the_table_and_beside_json(run: Run, log_dir: Path) -> None:
    flags = ("plan", "--log-dirs", log_dir, "--topics-have-no-overrides", "--topic", "orders")
    flags += ("--topic-config", "orders:cleanup.policy=compact")
    printed = run(*flags).stdout.splitlines()
    assert printed[-3].startswith("2 partitions: 2 would-compact. To read: up to ")
    assert printed[-2].startswith("Scratch space: up to 2.")
    assert printed[-1].startswith("Downtime: about ")
    result = run(*flags, "--output", "json", "--log-format", "json")
    assert len(rows_of(result)) == 2, "standard output must have only rows"
    [facts] = [item for line in result.stderr.splitlines() if (item := json.loads(line)).get("event") == "totals"]
    assert facts["downtime_s"] > 0
    assert facts["read_bytes"] == sum(row["bytes_before"] for row in rows_of(result).values())


def test_the_reason_why_only_a_part_of_a_partition_is_cleaned_is_reported(
    run: Run, log_dir: Path, tmp_path: Path
) -> None:
    """The reason must be known before the broker is stopped: later no transaction can be ended or aborted."""
    producer = ProducerEntry(
        producer_id=7, epoch=3, last_sequence=0, last_offset=250, offset_delta=0, timestamp_ms=BASE_MS,
        coordinator_epoch=0, current_txn_first_offset=250,
    )  # fmt: skip
    (log_dir / "orders-0" / f"{400:020d}.snapshot").write_bytes(encode_snapshot([producer]))
    flags = ("--log-dirs", log_dir, "--topic", "orders", "--topics-have-no-overrides")
    flags += ("--topic-config", "orders:cleanup.policy=compact", "--now", str(BASE_MS + 1000), "--unsafe-clock")
    why = (
        "cleaned only up to offset 200: producer id 7, epoch 3, has an open transaction with first offset 250 and "
        "age 1 s"
    )
    planned = run("plan", *flags, "--report", tmp_path / "plan.html")
    assert why in (tmp_path / "plan.html").read_text()
    advice = "Let the transaction end, or abort it (kafka-transactions.sh)"
    assert f"orders-0 would-compact: {why}. {advice}" in planned.stdout
    assert "orders-1 would-compact:" not in planned.stdout
    row = rows_of(run("plan", *flags, "--output", "json"))["orders-0"]
    assert (row["status"], row["error"], row["end_dirty_offset"]) == ("would-compact", "", 200)
    assert f"orders-0 compacted: {why}" in run("compact", *flags, "--execute").stdout


def test_a_second_run_prints_one_line(run: Run, log_dir: Path) -> None:
    flags = ("compact", "--log-dirs", log_dir, "--topics-have-no-overrides", "--execute")
    flags += ("--topic-config", "orders:cleanup.policy=compact", "--topic-config", "users:cleanup.policy=compact")
    assert "3 partitions: 3 compacted." in run(*flags).stdout
    again = run(*flags)
    assert again.stdout == "3 partitions: 3 clean.\n"
    assert "Nothing was due" in again.stderr
    assert {row["status"] for row in rows_of(run(*flags, "--output", "json")).values()} == {"clean"}
