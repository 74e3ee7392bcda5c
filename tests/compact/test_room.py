"""A plan refuses exactly the partitions for which a run would not have enough space."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keytail.cli.configuration import read_configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import PartitionFilter, select_partitions
from keytail.compact import driver
from keytail.compact.command import Request
from keytail.compact.keeper import Keeper
from keytail.compact.planning import plan_to_compact
from keytail.compact.running.bundles import BundleSize, Waiting
from keytail.compact.steps import cleaning_tasks
from keytail.errors import slugs_of
from keytail.kernels import jit
from keytail.log.fs import FileSystem
from keytail.run.kernels import kernels_of
from keytail.run.storage import ScratchSpace
from keytail.undo.backup import Backup
from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, snapshot, write_log_dir

MARGIN_BYTES = 1 << 20  # a run reserves this space for each partition in addition to its segments
INDEX_BYTES = 50_000
FLAGS = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")


class Filling(FileSystem):
    """A file system on which `free` bytes are always free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self, path: str) -> int:
        return self.free


@pytest.fixture(scope="module")
def log_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write log dirs with partitions of random sizes, some with large indexes, as active segments have."""
    chance = random.Random(7)
    found = []
    for number in range(4):
        partitions = {f"orders-{n}": random_records(n, chance.randrange(100, 900)) for n in range(5)}
        path = write_log_dir(tmp_path_factory.mktemp(f"logs-{number}") / "logs", partitions, segments=2 + number)
        for index in sorted(path.glob("*/*.index")):
            if chance.random() < 0.3:
                index.write_bytes(index.read_bytes().ljust(chance.randrange(INDEX_BYTES) // 8 * 8, b"\0"))
        found.append(path)
    return found


free_bytes = st.one_of(
    st.integers(0, 2 * MARGIN_BYTES), st.integers(MARGIN_BYTES - 1000, MARGIN_BYTES + 300_000), st.just(1 << 40)
)


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 3),
    free=free_bytes,
    limit=st.none() | free_bytes,
    segment_bytes=st.sampled_from([1000, 20_000, 1 << 30]),
    segment_index_bytes=st.sampled_from([INDEX_BYTES, 10 << 20]),
    grouping=st.sampled_from(["kafka", "measured"]),
    copies=st.booleans(),
)
def test_a_plan_refuses_partitions_for_which_a_run_has_no_space(
    log_dirs: list[Path],
    number: int,
    free: int,
    limit: int | None,
    segment_bytes: int,
    segment_index_bytes: int,
    grouping: str,
    copies: bool,
) -> None:
    log_dir, fs = log_dirs[number], Filling(free)
    sizes = f"segment.bytes={segment_bytes}", f"segment.index.bytes={segment_index_bytes}"
    kept = str(log_dir.parent / "kept") if copies else None
    request = Request(
        PartitionFilter(log_dirs=(str(log_dir),)),
        read_configuration(None, [f"orders:{item}" for item in ("cleanup.policy=compact", *sizes)], True),
        max_scratch_bytes=limit,
        grouping=grouping,  # type: ignore[arg-type]
        keep_originals=kept,
        copy_originals=copies,
    )
    rules = request.rules(fs)
    configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, rules.now_ms)
    planned = [
        plan_to_compact(fs, *item, configuration, rules)
        for item in select_partitions(fs, request.partition_filter).partitions
    ]
    tasks = cleaning_tasks(planned, rules, request.task_settings(), "run")
    assert len(tasks) == 5
    keeper = Keeper(fs, Backup(str(log_dir.parent), copies)) if copies else None
    waiting = Waiting(tasks, BundleSize(), ScratchSpace(fs, limit), keeper)
    has_room = set()
    while bundle := waiting.take():
        has_room |= {task.partition for task in bundle.tasks}
        waiting.release(bundle)
    refused = {task.partition: str(waiting.refusal(task)) for task in waiting.take_all()}

    rows = driver.plan(request, fs)
    assert {row.partition for row in rows if row.status == "would-compact"} == has_room
    if not copies:  # with copies, the reasons differ: the run creates the backup's directory
        assert {row.partition: row.error for row in rows if row.status == "refused"} == refused
    for row in rows:
        if row.status == "refused":
            assert set(slugs_of(row.error)) <= {"not-enough-space", "scratch-limit-too-low"}


def test_a_plan_with_little_free_space_prints_remedies(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--log-dirs", log_dir, "--topic", "orders", *FLAGS)
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: 300 << 10)
    before = snapshot(log_dir)
    for command in ("plan", "compact"):
        rows = rows_of(run(command, *flags, "--output", "json"))
        assert {row["status"] for row in rows.values()} == {"refused"}
        assert {slug for row in rows.values() for slug in row["slugs"]} == {"not-enough-space"}
    result = run("plan", *flags)
    assert result.exit_code == 1
    assert "2 partitions (orders-0, orders-1) refused: the largest group of segments needs up to " in result.stdout
    for remedy in ("300.0 KiB are free", "KiB more on this file system", "--output-dir", "another log dir"):
        assert remedy in result.stdout
    assert rows_of(run("compact", *flags, "--execute", "--output", "json")).keys() == rows.keys()
    assert snapshot(log_dir) == before, "the run must refuse it, too"
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: 1 << 30)
    assert {row["status"] for row in rows_of(run("plan", *flags, "--output", "json")).values()} == {"would-compact"}


def test_a_plan_out_of_place_considers_the_file_system_of_the_target(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--log-dirs", log_dir, "--topic", "orders", *FLAGS, "--output-dir", tmp_path / "out")
    monkeypatch.setattr(FileSystem, "free_bytes", lambda fs, path: 1 << 30 if "logs" in path else 300 << 10)
    result = run("compact", *flags, "--output", "json")
    assert {(row["status"], *row["slugs"]) for row in rows_of(result).values()} == {("refused", "not-enough-space")}
    assert "2 left out; up to 0 B would be written (300.0 KiB free)" in result.stderr
    monkeypatch.setattr(FileSystem, "free_bytes", lambda fs, path: 300 << 10 if "logs" in path else 1 << 30)
    assert {row["status"] for row in rows_of(run("compact", *flags, "--output", "json")).values()} == {"would-compact"}


def test_a_dry_run_out_of_place_reports_kernels_that_are_not_compiled(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("compact", "--log-dirs", log_dir, "--topic", "orders", *FLAGS, "--output-dir", tmp_path / "out")
    monkeypatch.setattr(jit, "IS_WRITABLE", True)
    monkeypatch.setattr(jit, "names_in_cache", set)
    assert "kernels are not compiled for this user, so `compact` takes about " in run(*flags).stderr
    monkeypatch.setattr(jit, "names_in_cache", lambda: {item.kernel for item in kernels_of(None)})
    assert "kernels are not compiled" not in run(*flags).stderr
