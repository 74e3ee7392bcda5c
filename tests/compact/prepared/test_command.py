"""`compact --prepare`, and `--execute`, which commits the result: the bytes equal those of one ordinary run, and a
preparation is discarded if a later change makes it invalid.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keytail.cli.configuration import Configuration
from keytail.compact import planning
from keytail.compact.prepared import committing, driver
from keytail.compact.worker import clean_on_worker
from keytail.doctor import log_dirs as doctor_log_dirs
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import hold
from keytail.run import storage
from tests.chance import chance
from tests.command_line import Run, rows_of
from tests.log.test_lock import AS_A_BROKER
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark
from tests.reference.batches import Rec, encode_batch

NOW = ("--now", "1800000000000", "--unsafe-clock")
CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
          "users:cleanup.policy=delete")  # fmt: skip


PARTITIONS = ("orders-0", "orders-1")


def compact(run: Run, log_dir: Path, *flags: str, status: int = 0) -> dict[str, dict[str, Any]]:
    with without_spark():
        done = run("compact", "--log-dirs", log_dir, *CONFIG, *NOW, *flags, "--output", "json")
    assert done.exit_code == status, done.output
    return rows_of(done)


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def scratch(log_dir: Path) -> list[str]:
    return [path.name for path in log_dir.glob("*/*.clean")]


@pytest.fixture
def prepared(run: Run, log_dir: Path) -> Path:
    rows = compact(run, log_dir, "--prepare", status=0)
    assert statuses(rows) == {"orders-0": "prepared", "orders-1": "prepared", "users-0": "skipped"}
    return log_dir


def test_the_page_of_a_preparation_states_what_was_prepared(run: Run, log_dir: Path, tmp_path: Path) -> None:
    compact(run, log_dir, "--prepare", "--report", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "2 of 3 partitions prepared." in page
    assert "dry run</span>" not in page


def test_plan_and_doctor_report_the_space_used_by_preparations(run: Run, prepared: Path) -> None:
    used = sum(path.stat().st_size for path in prepared.glob("*/*.clean") if ".prepared." not in path.name)
    with without_spark():
        done = run("plan", "--log-dirs", prepared, *CONFIG, *NOW, "--output", "json", "--log-format", "json")
    assert {name: row["prepared"] for name, row in rows_of(done).items()} == {
        "orders-0": "for --execute", "orders-1": "for --execute", "users-0": None
    }  # fmt: skip
    [facts] = [item for line in done.stderr.splitlines() if (item := json.loads(line)).get("event") == "totals"]
    records = sum(path.stat().st_size for path in prepared.glob("*/*.prepared.*.clean"))
    assert facts["scratch"][0]["prepared_bytes"] == used + records
    checks = doctor_log_dirs.log_dirs(FileSystem(), [str(prepared)], 2**60, Configuration())
    [storage] = [row.found for row in checks if row.check == f"{prepared}: storage"]
    assert "prepared compactions of 2 partitions take" in storage


def test_the_run_id_of_a_preparation_is_that_of_prepared(run: Run, log_dir: Path) -> None:
    with without_spark():
        done = run("compact", "--log-dirs", log_dir, *CONFIG, *NOW, "--prepare", "--output", "json-v1")
    listed = run("prepared", "--log-dirs", log_dir, *CONFIG, "--output", "json")
    assert {row["run_id"] for row in rows_of(listed).values()} == {json.loads(done.stdout)["run_id"]}


def append(partition: Path, offset: int, key: bytes = b"key-1") -> None:
    """Append a record to the active segment, as a broker does."""
    log = sorted(partition.glob("*.log"))[-1]
    log.write_bytes(log.read_bytes() + encode_batch([Rec(offset, 1_700_000_900_000, key, b"later", ())]))


def all_files(log_dir: Path) -> dict[str, tuple[bytes, int]]:
    files = {name: data for name, data in snapshot(log_dir).items() if name != names.PREPARE_LOCK}
    return {name: (data, 0 if "/" not in name else mtime) for name, (data, mtime) in files.items()}


def test_a_preparation_and_its_commit_write_the_bytes_of_a_single_run(run: Run, tmp_path: Path) -> None:
    log_dirs = []
    draws = chance()
    seeds = [draws.randrange(10**6) for _ in range(4)]
    for name in ("one", "two"):
        records = {f"orders-{n}": random_records(seed, 300 + 50 * n, 5 + 10 * n) for n, seed in enumerate(seeds)}
        log_dirs.append(write_log_dir(tmp_path / name, records, segments=5))
    for path in log_dirs[0].rglob("*"):  # the two log dirs were written at different times
        other = log_dirs[1] / path.relative_to(log_dirs[0])
        os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    grouping = ("--grouping", draws.choice(["kafka", "measured"]))
    compact(run, log_dirs[0], "--execute", *grouping)
    before = snapshot(log_dirs[1])
    rows = compact(run, log_dirs[1], "--prepare", *grouping)
    after = {name: file for name, file in snapshot(log_dirs[1]).items() if not name.endswith(".clean")}
    after.pop(names.PREPARE_LOCK)
    assert after == before, "the preparation changed a file"
    assert set(statuses(rows).values()) == {"prepared"}
    done = compact(run, log_dirs[1], "--execute", "--prepared-only", *grouping)
    assert {row["prepared"] for row in done.values()} == {"committed"}
    assert all_files(log_dirs[1]) == all_files(log_dirs[0])
    numbers = ("records_after", "bytes_after", "segments_after", "end_dirty_offset", "tombstones_removed")
    for name, row in rows.items():
        assert {number: row[number] for number in numbers} == {number: done[name][number] for number in numbers}


def test_records_appended_after_the_preparation_belong_to_the_next_round(run: Run, prepared: Path) -> None:
    partition = prepared / "orders-0"
    before = newest_by_key(records_of(partition))
    append(partition, 400)
    rows = compact(run, prepared, "--execute")
    assert statuses(rows) == {"orders-0": "compacted", "orders-1": "compacted", "users-0": "skipped"}
    assert {rows[name]["prepared"] for name in ("orders-0", "orders-1")} == {"committed"}
    after = newest_by_key(records_of(partition))
    assert after == before | {b"key-1": records_of(partition)[-1]}
    assert records_of(partition)[-1].offset == 400
    assert scratch(prepared) == []
    again = compact(run, prepared, "--execute", status=0)
    assert again["orders-0"]["status"] in ("clean", "skipped")


def test_a_second_preparation_replaces_the_first_only_if_more_can_be_cleaned(run: Run, prepared: Path) -> None:
    files = scratch(prepared)
    assert statuses(compact(run, prepared, "--prepare"))["orders-0"] == "prepared"
    assert scratch(prepared) == files
    partition = prepared / "orders-0"
    for suffix in (".log", ".index", ".timeindex"):  # as after a roll by the broker
        (partition / f"{401:020d}{suffix}").write_bytes(b"")
    append(partition, 401)
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        (prepared / name).write_text("0\n2\norders 0 402\norders 1 400\n")
    (partition / f"{401:020d}.snapshot").write_bytes(b"")
    row = compact(run, prepared, "--prepare")["orders-0"]
    assert (row["status"], row["end_dirty_offset"]) == ("prepared", 401)
    assert not set(files) & set(scratch(prepared)) & {path.name for path in partition.iterdir()}
    done = compact(run, prepared, "--execute")["orders-0"]
    assert (done["prepared"], done["end_dirty_offset"]) == ("committed", 401)


def _replace_source(log_dir: Path) -> None:
    path = min((log_dir / "orders-0").glob("*.log"))
    # as after a round that removed nothing: a new file replaces the old one
    shutil.copy2(path, path.with_suffix(".swap"))
    path.with_suffix(".swap").rename(path)


def _touch_source(log_dir: Path) -> None:
    os.utime(min((log_dir / "orders-0").glob("*.log")))


def _retain_less(log_dir: Path) -> None:
    partition = log_dir / "orders-0"
    base = min(partition.glob("*.log")).stem
    for path in partition.glob(f"{base}*"):
        if not path.name.endswith(".clean"):
            path.unlink()


def _move_checkpoint(log_dir: Path) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 100\n")


def _delete_records(log_dir: Path) -> None:
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\norders 0 7\n")


def _truncate(log_dir: Path) -> None:
    log = max((log_dir / "orders-0").glob("*.log"))
    log.write_bytes(b"".join(encode_batch([record]) for record in records_of(log_dir / "orders-0")[300:350]))
    for suffix in (".index", ".timeindex"):
        log.with_suffix(suffix).write_bytes(b"")
    (log_dir / "replication-offset-checkpoint").write_text("0\n2\norders 0 350\norders 1 400\n")


def _truncate_and_append(log_dir: Path) -> None:
    (log_dir / "orders-0" / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 350\n")


def _lower_high_watermark(log_dir: Path) -> None:
    (log_dir / "replication-offset-checkpoint").write_text("0\n2\norders 0 250\norders 1 400\n")


def _lose_output(log_dir: Path) -> None:
    next((log_dir / "orders-0").glob("*.log.r*.clean")).unlink()


def _grow_output(log_dir: Path) -> None:
    path = next((log_dir / "orders-0").glob("*.log.r*.clean"))
    path.write_bytes(path.read_bytes() + b"x")


def _replace_output(log_dir: Path) -> None:
    path = next((log_dir / "orders-0").glob("*.log.r*.clean"))
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    other.rename(path)


def _make_record_of_later_version(log_dir: Path) -> None:
    path = next((log_dir / "orders-0").glob("*.prepared.*.clean"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "more": [{"new": 1}]}))


def _damage_record(log_dir: Path) -> None:
    next((log_dir / "orders-0").glob("*.prepared.*.clean")).write_bytes(b"{")


def _take_record_of_other(log_dir: Path) -> None:
    record = next((log_dir / "orders-1").glob("*.prepared.*.clean"))
    own = next((log_dir / "orders-0").glob("*.prepared.*.clean"))
    own.unlink()
    shutil.copy2(record, own.parent / record.name)


def _name_other_directory(log_dir: Path) -> None:
    """Name a file of another directory in the record, as an attacker could."""
    path = next((log_dir / "orders-0").glob("*.prepared.*.clean"))
    record = json.loads(path.read_text())
    record["result"]["groups"][0]["segments"][0]["files"][0]["name"] = "../../other.log"
    path.write_text(json.dumps(record))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a source replaced by a copy": (_replace_source, "prepared-sources-changed"),
    "a source written to": (_touch_source, "prepared-sources-changed"),
    "a source removed by retention": (_retain_less, "prepared-sources-changed"),
    "the broker's cleaner has cleaned": (_move_checkpoint, "prepared-basis-changed"),
    "records deleted up to an offset": (_delete_records, "prepared-basis-changed"),
    "the log truncated": (_truncate, "prepared-basis-changed"),
    "the log truncated and appended to": (_truncate_and_append, "prepared-basis-changed"),
    "the high watermark below the end": (_lower_high_watermark, "prepared-end-not-reached"),
    "an output lost": (_lose_output, "prepared-output-changed"),
    "an output changed": (_grow_output, "prepared-output-changed"),
    "an output replaced by one of the same size and time": (_replace_output, "prepared-output-changed"),
    "the record of a later version": (_make_record_of_later_version, "invalid-prepared-record"),
    "the record unreadable": (_damage_record, "invalid-prepared-record"),
    "the record of another partition": (_take_record_of_other, "invalid-prepared-record"),
    "a record that names another directory": (_name_other_directory, "invalid-prepared-record"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_invalid_preparation_is_discarded_and_the_partition_compacted_as_usual(
    run: Run, prepared: Path, change: str
) -> None:
    make, slug = CHANGES[change]
    make(prepared)
    reference = prepared.parent / "reference"
    shutil.copytree(prepared, reference)
    for path in reference.glob("*/*.clean"):
        path.unlink()
    with_mtimes = {path.relative_to(prepared): path.stat() for path in prepared.rglob("*") if path.is_file()}
    for name, facts in with_mtimes.items():
        if (reference / name).exists():
            os.utime(reference / name, ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    rows = compact(run, prepared, "--execute")
    expected = compact(run, reference, "--execute")
    row = rows["orders-0"]
    assert row["prepared"].startswith("discarded: "), row
    assert slug in row["slugs"] or f"[{slug}]" in row["prepared"], row
    assert rows["orders-1"]["prepared"] == "committed"
    assert statuses(rows) == statuses(expected)
    assert all_files(prepared) == all_files(reference)
    assert scratch(prepared) == []


@pytest.mark.parametrize("pattern", ["*.log.r*.clean", "*.prepared.*.clean"], ids=["an output", "the record"])
def test_a_link_in_place_of_a_prepared_file_is_refused_until_it_is_discarded(
    run: Run, prepared: Path, pattern: str
) -> None:
    path, elsewhere = next((prepared / "orders-0").glob(pattern)), prepared.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = {name: file for name, file in snapshot(prepared).items() if name.startswith("orders-0")}
    outside = elsewhere.stat()
    row = compact(run, prepared, "--execute", status=3)["orders-0"]
    assert (row["status"], row["slugs"]) == ("refused", ["not-a-regular-file"])
    assert {name: file for name, file in snapshot(prepared).items() if name.startswith("orders-0")} == before
    done = run("prepared", "--log-dirs", prepared, *CONFIG, NOW[0], NOW[1], "--discard", "--execute")
    assert done.exit_code == 0, done.output
    assert scratch(prepared) == []
    assert compact(run, prepared, "--execute")["orders-0"]["status"] == "compacted"
    assert elsewhere.stat()[:9] == outside[:9]


def test_a_preparation_with_other_settings_is_discarded(run: Run, log_dir: Path) -> None:
    compact(run, log_dir, "--prepare")
    rows = compact(run, log_dir, "--execute", "--topic-config", "orders:delete.retention.ms=5")
    assert "settings were changed after the preparation: delete.retention.ms" in rows["orders-0"]["prepared"]


def test_an_old_preparation_is_discarded(run: Run, log_dir: Path) -> None:
    compact(run, log_dir, "--prepare")
    with without_spark():
        late = ("--now", str(1_800_000_000_000 + 43_200_001), "--unsafe-clock", "--execute", "--output", "json")
        done = run("compact", "--log-dirs", log_dir, *CONFIG, *late)
    assert "ago" in rows_of(done)["orders-0"]["prepared"]


def test_with_prepared_only_other_partitions_are_not_compacted(run: Run, log_dir: Path) -> None:
    rows = compact(run, log_dir, "--prepare", "--partitions", "orders-0")
    assert statuses(rows) == {"orders-0": "prepared"}
    before = {name: file for name, file in snapshot(log_dir).items() if name.startswith("orders-1")}
    rows = compact(run, log_dir, "--execute", "--prepared-only")
    assert statuses(rows) == {"orders-0": "compacted", "orders-1": "skipped", "users-0": "skipped"}
    assert "not prepared" in rows["orders-1"]["error"]
    assert {name: file for name, file in snapshot(log_dir).items() if name.startswith("orders-1")} == before


def test_a_preparation_runs_beside_a_broker_but_not_beside_another_preparation(run: Run, log_dir: Path) -> None:
    command = [sys.executable, "-c", AS_A_BROKER, str(log_dir / names.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == "locked\n"
        assert statuses(compact(run, log_dir, "--prepare"))["orders-0"] == "prepared"
        broker.communicate("\n")
    with hold([str(log_dir)], name=names.PREPARE_LOCK):
        for flags in (["--prepare"], ["--execute"]):
            with without_spark():
                done = run("compact", "--log-dirs", log_dir, *CONFIG, *NOW, *flags)
            assert done.exit_code == 1
            assert "another run is preparing compactions" in done.stderr


def test_a_run_that_changes_partitions_excludes_a_preparation(run: Run, log_dir: Path) -> None:
    """The first preparation in a log dir creates the lock file of preparations, so a run that began earlier does not
    hold it.
    """
    with hold([str(log_dir)]), without_spark():
        done = run("compact", "--log-dirs", log_dir, *CONFIG, *NOW, "--prepare")
    assert done.exit_code == 1
    assert "in use by another keytail run" in done.stderr
    assert scratch(log_dir) == []


@pytest.mark.parametrize("flags", [["--execute"], ["--output-dir", "out"], ["--keep-originals", "kept"]])
def test_conflicting_flags_are_refused(run: Run, log_dir: Path, flags: list[str]) -> None:
    done = run("compact", "--log-dirs", log_dir, *CONFIG, "--prepare", *flags)
    assert done.exit_code == 2
    assert f"--prepare cannot be combined with {flags[0]}" in done.stderr


def test_prepared_only_requires_execute(run: Run, log_dir: Path) -> None:
    done = run("compact", "--log-dirs", log_dir, *CONFIG, "--prepared-only")
    assert done.exit_code == 2


def test_sources_of_committed_partitions_are_backed_up(run: Run, prepared: Path) -> None:
    kept = prepared.parent / "kept"
    before = snapshot(prepared / "orders-0")
    compact(run, prepared, "--execute", "--keep-originals", str(kept))
    [run_dir] = kept.iterdir()
    assert (run_dir / "orders-0" / f"{0:020d}.log").read_bytes() == before[f"{0:020d}.log"][0]
    done = run("undo", "--originals", kept, "--run", run_dir.name, "--execute", "--output", "json")
    assert done.exit_code == 0, done.output
    after = snapshot(prepared / "orders-0")
    assert {name: data for name, (data, _) in after.items()} == {
        name: data for name, (data, _) in before.items() if not name.endswith(".clean")
    }


def _disturbed(log_dir: Path, times: int) -> Callable[..., Any]:
    """Return a task function that replaces a segment of orders-0 after each of its first `times` cleanings, as a
    broker's cleaner does.
    """
    left = [times]

    def clean(*arguments: Any, **more: Any) -> Any:
        result = clean_on_worker(*arguments, **more)
        if left[0] and arguments[1].partition == 0:
            left[0] -= 1
            _replace_source(log_dir)
        return result

    return clean


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_partition_that_a_broker_cleans_during_the_preparation_is_prepared_again(
    run: Run, log_dir: Path, times: int
) -> None:
    with patch.object(driver, "clean_on_worker", _disturbed(log_dir, times)):
        rows = compact(run, log_dir, "--prepare")
    assert rows["orders-1"]["status"] == "prepared"
    row = rows["orders-0"]
    left = list((log_dir / "orders-0").glob("*.clean"))
    if times < 3:
        assert (row["status"], row["error"]) == ("prepared", "")
        assert len({names.parse_file_name(path.name).run_id for path in left}) == 1
    else:
        assert row["status"] == "skipped"
        assert "a segment was replaced after it was listed" in row["error"]
        assert "segments-changed-meanwhile" in row["slugs"]
        assert left == []
    assert compact(run, log_dir, "--execute")["orders-0"]["status"] == "compacted"


def test_a_partition_that_does_not_fit_is_not_prepared(run: Run, log_dir: Path) -> None:
    rows = compact(run, log_dir, "--prepare", "--max-scratch-bytes", "1k", status=3)
    assert statuses(rows) == {"orders-0": "refused", "orders-1": "refused", "users-0": "skipped"}
    assert "the partition needs up to" in rows["orders-0"]["error"]
    assert scratch(log_dir) == []


def test_earlier_preparations_count_as_used_space(run: Run, log_dir: Path) -> None:
    """If they did not count, each run would use half of the space that earlier preparations left to the broker."""

    def prepare(limit_bytes: int, status: int = 0) -> dict[str, Any]:
        return compact(run, log_dir, "--prepare", "--max-scratch-bytes", str(limit_bytes), status=status)["orders-1"]

    compact(run, log_dir, "--prepare", "--partitions", "orders-0")
    used = sum(path.stat().st_size for path in log_dir.glob("*/*.clean") if ".prepared." not in path.name)
    # on a small disk, half of the free space may be less than the limit
    with patch.object(FileSystem, "free_bytes", lambda *_: 10**10):
        with patch.object(storage, "human_bytes", str):
            [need] = map(int, re.findall(r"needs up to ([0-9]+) of", prepare(1, status=3)["error"]))
            assert f"{used} are in use" in prepare(need + used - 1, status=3)["error"]
        assert prepare(need + used + 100_000)["status"] == "prepared"


def test_a_topic_that_is_deleted_during_the_preparation_does_not_end_the_run(run: Run, log_dir: Path) -> None:
    def clean(*arguments: Any, **more: Any) -> Any:
        result = clean_on_worker(*arguments, **more)
        if arguments[1].partition == 0:
            (log_dir / "orders-0").rename(log_dir / f"orders-0.{'0a' * 16}-delete")
        return result

    with patch.object(driver, "clean_on_worker", clean):
        rows = compact(run, log_dir, "--prepare", "--partitions", "orders-0,orders-1", status=3)
    assert statuses(rows) == {"orders-0": "skipped", "orders-1": "prepared"}
    assert "a segment was removed after it was listed" in rows["orders-0"]["error"]


def test_a_preparation_that_cannot_be_discarded_refuses_only_its_partition(run: Run, prepared: Path) -> None:
    _touch_source(prepared)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with patch.object(committing, "discard", fail):
        rows = compact(run, prepared, "--execute", status=3)
    assert statuses(rows) == {"orders-0": "refused", "orders-1": "compacted", "users-0": "skipped"}
    assert "cannot be discarded" in rows["orders-0"]["error"]
    assert compact(run, prepared, "--execute")["orders-0"]["status"] == "compacted"
    assert scratch(prepared) == []


def test_a_copied_backup_may_use_more_than_half_of_the_free_space(run: Run, prepared: Path) -> None:
    """Sources are copied to the backup one partition at a time, as in a run without a preparation."""
    sources = {name: sum(path.stat().st_size for path in (prepared / name).glob("0*[!n]")) for name in PARTITIONS}
    with patch.object(FileSystem, "free_bytes", lambda *_: max(sources.values())):
        kept = ("--keep-originals", str(prepared.parent / "kept"), "--copy-originals")
        rows = compact(run, prepared, "--execute", *kept)
    assert {rows[name]["prepared"] for name in PARTITIONS} == {"committed"}


def test_a_preparation_waits_until_a_running_cleaner_has_removed_its_swap_files(run: Run, log_dir: Path) -> None:
    swap = log_dir / "orders-0" / f"{0:020d}.index.swap"
    swap.touch()
    with patch.object(planning.time, "sleep", lambda _: swap.unlink(missing_ok=True)):
        assert statuses(compact(run, log_dir, "--prepare"))["orders-0"] == "prepared"


def test_a_partition_with_permanent_swap_files_is_refused(run: Run, log_dir: Path) -> None:
    (log_dir / "orders-0" / f"{0:020d}.index.swap").touch()
    with patch.object(planning.time, "sleep", lambda _: None):
        rows = compact(run, log_dir, "--prepare", status=3)
    assert statuses(rows) == {"orders-0": "refused", "orders-1": "prepared", "users-0": "skipped"}


def test_the_preparation_of_a_topic_that_is_no_longer_compacted_is_discarded(run: Run, prepared: Path) -> None:
    before = {name: file for name, file in all_files(prepared).items() if not name.endswith(".clean")}
    config = [flag.replace("orders:cleanup.policy=compact", "orders:cleanup.policy=delete") for flag in CONFIG]
    with without_spark():
        rows = rows_of(run("compact", "--log-dirs", prepared, *config, *NOW, "--execute", "--output", "json"))
    assert set(statuses(rows).values()) == {"skipped"}
    assert rows["orders-0"]["prepared"] == "discarded: the topic is not compacted any more"
    assert all_files(prepared) == before


def test_a_preparation_is_not_discarded_while_the_settings_are_unknown(run: Run, prepared: Path) -> None:
    files = scratch(prepared)
    with without_spark():
        run("compact", "--log-dirs", prepared, *NOW, "--execute")
    assert scratch(prepared) == files


def test_tombstones_are_retained_for_half_of_their_retention_time_after_the_commit(run: Run, tmp_path: Path) -> None:
    """A consumer that read a value before the commit can read the tombstone for half of delete.retention.ms."""
    keys = [Rec(n, 1_700_000_000_000 + n, b"key-%d" % n, b"value" if n % 10 else None, ()) for n in range(400)]
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": keys}, segments=5)
    partition, day_ms = log_dir / "orders-0", 86_400_000

    def compact_at(later_ms: int, *flags: str) -> dict[str, Any]:
        now = ("--now", str(1_800_000_000_000 + later_ms), "--unsafe-clock", "--force", "--output", "json")
        with without_spark():
            return rows_of(run("compact", "--log-dirs", log_dir, *CONFIG, *now, *flags))["orders-0"]

    compact_at(0, "--prepare")
    assert compact_at(day_ms // 2, "--execute")["prepared"] == "committed"
    for suffix in (".log", ".index", ".timeindex", ".snapshot"):  # as after a roll by the broker
        (partition / f"{401:020d}{suffix}").write_bytes(b"")
    append(partition, 401)
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        (log_dir / name).write_text("0\n1\norders 0 402\n")
    row = compact_at(day_ms - 1, "--execute")
    assert (row["status"], row["tombstones_removed"]) == ("compacted", 0)


def test_a_run_without_drop_keyless_does_not_commit_a_preparation_with_it(run: Run, tmp_path: Path) -> None:
    records = random_records(3, 200)
    records[20] = replace(records[20], key=None)
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": records})
    assert compact(run, log_dir, "--prepare", status=1)["orders-0"]["slugs"] == ["records-without-key"]
    for flags, status in (((), "refused"), (("--drop-keyless",), "compacted")):
        assert compact(run, log_dir, "--prepare", "--drop-keyless")["orders-0"]["status"] == "prepared"
        [row] = compact(run, log_dir, "--execute", *flags, status=0 if flags else 1).values()
        assert row["status"] == status
        discarded = "discarded: the partition was prepared with --drop-keyless"
        assert row["prepared"].startswith("committed" if flags else discarded)
        assert (records[20] in records_of(log_dir / "orders-0")) == (not flags)


def test_a_preparation_is_committed_although_no_round_is_due(run: Run, log_dir: Path) -> None:
    never = ("--topic-config", "orders:min.cleanable.dirty.ratio=1")
    compact(run, log_dir, "--prepare", "--force", *never)
    rows = compact(run, log_dir, "--execute", *never)
    assert {rows[name]["prepared"] for name in PARTITIONS} == {"committed"}
    assert {rows[name]["status"] for name in PARTITIONS} == {"compacted"}


def test_a_topic_that_is_created_again_is_compacted_as_usual(run: Run, prepared: Path) -> None:
    """A broker renames the directory of a deleted topic; the new directory differs only in the topic id."""
    old, new = prepared / f"orders-0.{'0a' * 16}-delete", prepared / "orders-0"
    new.rename(old)
    shutil.copytree(old, new)
    (new / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    for path in new.glob("*.clean"):
        path.unlink()
    before = snapshot(old)
    row = compact(run, prepared, "--execute")["orders-0"]
    assert (row["status"], row["prepared"]) == ("compacted", None)
    assert snapshot(old) == before
    assert not list(new.glob("*.clean"))


def test_a_preparation_for_a_deleted_topic_of_the_same_name_is_discarded(run: Run, prepared: Path) -> None:
    """The topic id, inodes and times of the files differ, and their bytes are equal, as after a restore of the
    directory.
    """
    partition = prepared / "orders-0"
    copy = prepared.parent / "copy"
    shutil.copytree(partition, copy)  # this keeps file times
    shutil.rmtree(partition)
    copy.rename(partition)
    (partition / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    row = compact(run, prepared, "--execute")["orders-0"]
    assert row["status"] == "compacted"
    assert row["prepared"].startswith("discarded: the segment at offset 0 was replaced")


@pytest.mark.parametrize("room_bytes", [0, 300, "record"])
def test_after_a_full_disk_no_file_of_the_preparation_remains(run: Run, log_dir: Path, room_bytes: int | str) -> None:
    before = snapshot(log_dir)
    written_bytes, write_some = [0], FileSystem._write_some

    def write(fs: FileSystem, fd: int, view: memoryview, position: int | None = None) -> int:
        path = fs._path_of[fd]
        if path.endswith(".clean") and "/orders-0/" in path:
            is_record = ".prepared." in path
            if is_record if room_bytes == "record" else written_bytes[0] >= int(room_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if room_bytes != "record":
                view = view[: int(room_bytes) - written_bytes[0]]
            written_bytes[0] += len(view)
        return write_some(fs, fd, view, position)

    with patch.object(FileSystem, "_write_some", write):
        rows = compact(run, log_dir, "--prepare", status=3)
    assert statuses(rows) == {"orders-0": "failed", "orders-1": "prepared", "users-0": "skipped"}
    assert "No space left on device while writing to the file" in rows["orders-0"]["error"]
    after = {name: file for name, file in snapshot(log_dir).items() if name.startswith("orders-0")}
    assert after == {name: file for name, file in before.items() if name.startswith("orders-0")}
    assert compact(run, log_dir, "--prepare")["orders-0"]["status"] == "prepared"
    rows = compact(run, log_dir, "--execute", "--prepared-only")
    assert {rows[name]["prepared"] for name in PARTITIONS} == {"committed"}


@pytest.mark.spark
def test_spark_prepares_the_same_outputs(run: Run, on_spark: None, log_dir: Path) -> None:
    def outputs(log_dir: Path) -> list[tuple[str, bytes]]:
        """Return the names of the outputs, without the ids of run and attempt, and their contents."""
        found = [path for path in log_dir.glob("*/*.clean") if ".prepared." not in path.name]
        return sorted((f"{path.parent.name}/{path.name.partition('.r')[0]}", path.read_bytes()) for path in found)

    other = log_dir.parent / "other"
    shutil.copytree(log_dir, other)
    compact(run, other, "--prepare")
    throttle = ("--throttle", "100m")
    done = run(
        "compact", "--log-dirs", log_dir, *CONFIG, *NOW, "--prepare", *throttle, "--master", "local[2]",
        "--output", "json",
    )
    assert {rows_of(done)[name]["status"] for name in PARTITIONS} == {"prepared"}, done.output
    assert outputs(log_dir) == outputs(other)
    rows = compact(run, log_dir, "--execute", "--prepared-only")
    assert {rows[name]["prepared"] for name in PARTITIONS} == {"committed"}
