"""`plan` and `compact` with `--replica`: retained tombstones and markers, refusals, and that replicas are only read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, records_of, snapshot, write_log_dir
from tests.reference.batches import Rec

CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
          "users:cleanup.policy=delete")  # fmt: skip
LATER = BASE_MS + 10**12  # all delete horizons have passed


@pytest.fixture
def brokers(tmp_path: Path) -> list[Path]:
    """Write log dirs of three brokers with the same partition; every tenth record is a tombstone of a separate key."""
    records = [
        Rec(n, BASE_MS + n, b"key-%d" % (n % 7), b"v") if n % 10 else Rec(n, BASE_MS + n, b"gone-%d" % n, None)
        for n in range(400)
    ]
    made = [write_log_dir(tmp_path / name, {"orders-0": records}) for name in ("a", "b", "c")]
    for path in made:
        (path / "orders-0" / "partition.metadata").write_text("version: 0\ntopic_id: PMW8EpvDT9iCXFYB4MhqMA")
    return made


def cleaned(log_dir: Path, offset: int | str) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text(f"0\n1\norders 0 {offset}\n")


def compact(run: Run, log_dir: Path, *more: str | Path, now: int, command: str = "compact"):
    clock = ("--now", str(now))
    executed = ("--execute", "--unsafe-clock") if command == "compact" else ()
    result = run(command, "--log-dirs", log_dir, *CONFIG, *clock, *executed, "--output", "json", "--force", *more)
    return result, rows_of(result).get("orders-0", {}) if result.stdout else {}


def tombstones(log_dir: Path) -> list[int]:
    return [record.offset for record in records_of(log_dir / "orders-0") if record.value is None]


def test_tombstones_are_retained_until_all_replicas_have_been_cleaned(run: Run, brokers: list[Path]) -> None:
    a, b, c = brokers
    others = ("--replica", f"second={b}", "--replica", c)
    _, row = compact(run, a, *others, now=BASE_MS + 1000)  # this round sets the horizons
    assert (row["status"], row["removal_limit_offset"]) == ("compacted", 0)
    assert row["removal_limit_replica"] in ("second", str(c))
    before = tombstones(a)
    assert before == list(range(0, 400, 10))
    cleaned(b, 205)
    cleaned(c, 300)
    untouched = [snapshot(path) for path in (b, c)]
    _, row = compact(run, a, *others, "--from-log-start", now=LATER, command="plan")
    assert row["status"] == "would-compact"
    assert (row["removal_limit_offset"], row["removal_limit_replica"]) == (205, "second")
    again = ("--from-log-start", "--force", "--now", str(LATER))
    table = run("plan", "--log-dirs", a, *CONFIG, *again, *others).stdout
    kept = "tombstones and markers from offset 205 on are retained: replica second has not been cleaned further"
    assert kept in table
    _, row = compact(run, a, *others, "--from-log-start", now=LATER)
    assert row["status"] == "compacted"
    assert tombstones(a) == [n for n in before if n >= 200], "the limit is inside the batch of offsets 200 to 209"
    once = snapshot(a / "orders-0")
    result, row = compact(run, a, *others, now=LATER)
    assert (result.exit_code, row["status"]) == (0, "clean")
    _, row = compact(run, a, *others, "--from-log-start", now=LATER)
    assert row["records_after"] == row["records_before"]
    assert {name: data for name, (data, _) in snapshot(a / "orders-0").items()} == {
        name: data for name, (data, _) in once.items()
    }
    cleaned(b, 400)
    _, row = compact(run, a, *others, "--from-log-start", now=LATER)
    assert (row["removal_limit_offset"], row["removal_limit_replica"]) == (300, str(c))
    assert tombstones(a) == [n for n in before if n >= 300]
    assert [snapshot(path) for path in (c,)] == untouched[1:]


def test_a_replica_without_the_partition_delays_no_removal_and_is_reported(
    run: Run, brokers: list[Path]
) -> None:
    a, b, _ = brokers
    shutil.move(b / "orders-0", b / "orders-1")
    result, row = compact(run, a, "--replica", b, now=LATER, command="plan")
    assert (row["status"], row["removal_limit_offset"], row["removal_limit_replica"]) == ("would-compact", None, None)
    assert "no --replica hosts orders-0: " in result.stderr


def test_an_impossible_replica_is_a_usage_error(run: Run, brokers: list[Path], tmp_path: Path) -> None:
    a, b, _ = brokers
    (tmp_path / "link").symlink_to(b)
    for flags, text in (
        ((a,), "already given"),
        ((b, b), "already given"),
        ((b, tmp_path / "link"), "already given"),
        ((f"{b},{a}",), "already given"),
        ((tmp_path / "nowhere",), "no such log dir"),
        (("x=",), "contains no directory"),
        ((f"x={b}", f"x={brokers[2]}"), "two replicas are named x"),
    ):
        named = [part for flag in flags for part in ("--replica", flag)]
        result = run("plan", "--log-dirs", a, *CONFIG, *named)
        assert result.exit_code == 2, result.output
        assert text in result.stderr


def test_an_unreadable_replica_refuses_the_partition(run: Run, brokers: list[Path]) -> None:
    a, b, _ = brokers
    cleaned(b, "x")
    _, row = compact(run, a, "--replica", b, now=BASE_MS + 1000)
    assert row["status"] == "refused"
    assert "has been cleaned is unknown" in row["error"]
    (b / "cleaner-offset-checkpoint").unlink()
    (b / "orders-0" / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    _, row = compact(run, a, "--replica", b, now=BASE_MS + 1000)
    assert row["status"] == "refused"
    assert "has another topic of this name" in row["error"]
