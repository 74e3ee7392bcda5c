"""Kills runs of `compact` in forked children at random moments, and some of the runs after them.

KEYTAIL_KILLS sets the number of kills (`make soak`: a thousand). KEYTAIL_SEED repeats the log dirs and the moments; the
state of a run at a moment also depends on the machine.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chance import SEED
from tests.crash.compactions import Found, LogDir, find
from tests.crash.test_compaction import SHAPES
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka
from tests.interop.test_crash_compaction import open_with_kafka
from tests.kills.checks import Kills, check_ended, check_killed, contents, moment
from tests.kills.forks import SlowFileSystem, compact_here, run_in_child
from tests.kills.logs import small_log_dir

KILLS = int(os.environ.get("KEYTAIL_KILLS", "20"))
KILLS_PER_LOG_DIR = 12
PAUSE_S = 0.0003
OPENED_BY_KAFKA = 10  # every tenth state


@pytest.mark.long
def test_a_kill_at_any_moment_loses_no_record(
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = Kills("compact, in a forked child")
    kill_at_random_moments(fast_dir, kills, KILLS, random.Random(SEED), lambda *_: None)
    with capsys.disabled():
        print(f"\nseed {SEED}: {kills}")
    assert are_varied(kills), "too few kills before or after the first commit, or in a run after a kill"


@pytest.mark.interop
def test_kafka_opens_log_dirs_of_killed_runs(
    fast_dir: Path,  # noqa: F811
    kafka: Kafka,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = Kills("compact, in a forked child, opened by Kafka")

    def open_some(log_dir: LogDir, root: Path, found: Found) -> None:
        if kills.killed % OPENED_BY_KAFKA == 0 or len(kills.states) <= 5:
            for log in log_dir.logs:
                open_with_kafka(kafka, log_dir, log, root / log.name, found.logs[log.name])
            kills.opened += 1

    kill_at_random_moments(fast_dir, kills, max(KILLS // 4, 1), random.Random(f"{SEED} kafka"), open_some)
    with capsys.disabled():
        print(f"\nseed {SEED}: {kills}")
    assert kills.opened > 3


def are_varied(kills: Kills) -> bool:
    least = kills.killed // 20
    return kills.between >= least and kills.before >= least and kills.second >= kills.killed // 10


def kill_at_random_moments(
    work_dir: Path,
    kills: Kills,
    wanted: int,
    rng: random.Random,
    look: Callable[[LogDir, Path, Found], object],
) -> None:
    _warm_up(work_dir)
    start_s = time.monotonic()
    # The states at the kills depend on the machine: more kills are tried until each kind has occurred.
    while kills.killed < wanted or (kills.killed < 3 * wanted and not are_varied(kills)):
        log_dir = small_log_dir(rng)
        scratch_bytes = _some_groups(log_dir) if rng.random() < 0.4 else None
        here = work_dir / "log-dir"
        try:
            _kill_over_one(log_dir, scratch_bytes, here, kills, wanted, rng, look)
        except AssertionError as error:
            kills.losses += 1
            text = f"after kill {kills.killed} of seed {SEED}: {error}\n{log_dir}, passes of {scratch_bytes}"
            raise AssertionError(text) from error
        shutil.rmtree(here)
    kills.seconds = time.monotonic() - start_s


def _warm_up(work_dir: Path) -> None:
    """Load or compile the kernels, so that children inherit them."""
    for number, name in enumerate(SHAPES):
        SHAPES[name].make(work_dir / f"warm-{number}")
        compact_here(SHAPES[name], work_dir / f"warm-{number}", max_scratch_bytes=_some_groups(SHAPES[name]))


def _some_groups(log_dir: LogDir) -> int:
    """Return a scratch limit with room for the largest group and saved state, but not for a large partition."""
    sizes = [len(log) for item in log_dir.logs for log in item.segments.values()]
    return log_dir.join * 3 * max(sizes) + 4096


def _kill_over_one(
    log_dir: LogDir,
    scratch_bytes: int | None,
    here: Path,
    kills: Kills,
    wanted: int,
    rng: random.Random,
    look: Callable[[LogDir, Path, Found], object],
) -> None:
    origin, root = here / "origin", here / "root"
    log_dir.make(origin)
    start = find(log_dir, origin)

    def run() -> None:
        rows = compact_here(log_dir, root, fs=SlowFileSystem(PAUSE_S), max_scratch_bytes=scratch_bytes)
        assert {row.status for row in rows} <= {"compacted", "clean", "skipped"}, rows

    shutil.copytree(origin, root)
    started_s = time.monotonic()
    run_in_child(run, None)
    whole_run_s = time.monotonic() - started_s
    check_ended(log_dir, root, start)
    undisturbed = contents(root)
    missing = wanted - kills.killed
    for _ in range(min(KILLS_PER_LOG_DIR, missing) if missing > 0 else KILLS_PER_LOG_DIR):
        shutil.rmtree(root)
        shutil.copytree(origin, root)
        started, is_second = start, False
        while run_in_child(run, moment(rng, whole_run_s)):
            kills.killed += 1
            kills.second += is_second
            started, is_second = check_killed(log_dir, root, started, kills), True
            look(log_dir, root, started)
            if rng.random() < 0.6:
                run_in_child(run, None)
                break
        else:
            kills.ended += 1
        check_ended(log_dir, root, started)
        left = contents(root)
        if started == start:
            assert left == undisturbed, "the bytes differ from those of an undisturbed run"
        run_in_child(run, None)
        assert contents(root) == left, "another run changed a file"
