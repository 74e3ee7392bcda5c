"""`kill -9` of real runs of `keytail compact` and of jobs/compact.py under spark-submit: of the driver, its JVM,
workers, or the whole group.

KEYTAIL_REAL_KILLS sets the number (`make soak`: 200). KEYTAIL_SEED repeats the log dirs, the killed processes and the
moments.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keytail.compact.write_phase.passes import _MARGIN_BYTES
from keytail.log.lock import is_held
from tests.chance import SEED
from tests.cli.test_stopping import inode_of
from tests.crash.compactions import Found, LogDir, expect, find
from tests.kills.checks import Kills, check_ended, check_killed, contents
from tests.kills.forks import compact_here
from tests.kills.logs import flags, random_log_dir
from tests.kills.processes import Run, has_open, kill, start

pytestmark = pytest.mark.spark

KILLS = int(os.environ.get("KEYTAIL_REAL_KILLS", "1"))
# Three successive kills are of a driver, a JVM and a whole group, alternately with and without spark-submit. The seed
# decides which is first.
VICTIMS = (("driver", "submitted driver"), ("jvm", "submitted jvm"), ("group",))
MOMENTS = ("tasks run", "tasks run", "a group is replaced", "a checkpoint has moved")
THROTTLE = ("--throttle", "4m")
REAL_RUN_AFTER = 10  # one in ten runs after a kill is a real one; the others run in this process


@pytest.mark.one_of("a kill of a run with Spark")
def test_a_kill_of_a_real_run_loses_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print("seed", SEED)
    rng, kills, start_s = random.Random(SEED), Kills("compact, a real run"), time.monotonic()
    while kills.killed < KILLS:
        victim = victim_of(SEED + kills.killed)
        moment = rng.choice(MOMENTS)
        try:
            kill_one(tmp_path / "here", victim, moment, rng, kills)
        except AssertionError as error:
            kills.losses += 1
            message = (tmp_path / "here" / "stderr").read_text(errors="replace")
            text = f"seed {SEED}, kill {kills.killed}: {victim}, {moment}: {error}\n{message}"
            raise AssertionError(text) from error
        shutil.rmtree(tmp_path / "here")
        if kills.killed % 10 == 0:  # a soak run that is stopped has then printed its progress
            with capsys.disabled():
                print(f"\nseed {SEED}, {time.monotonic() - start_s:.0f} s: {kills}", flush=True)
    kills.seconds = time.monotonic() - start_s
    with capsys.disabled():
        print(f"\nseed {SEED}: {kills}")


def victim_of(number: int) -> str:
    turn, kind = divmod(number, len(VICTIMS))
    return VICTIMS[kind][(turn + kind) % len(VICTIMS[kind])]


def large_log_dir(rng: random.Random) -> tuple[LogDir, tuple[str, ...]]:
    """Return a log dir with one partition that is compacted in passes and some small ones, and flags for the run."""
    log_dir = random_log_dir(rng, sizes=(30, 6, 8, 5), value_bytes=12_000, join=2)
    largest = max(len(log) for log in log_dir.logs[0].segments.values())
    return log_dir, ("--max-scratch-bytes", str(_MARGIN_BYTES + 3 * largest * log_dir.join), *THROTTLE)


def kill_one(here: Path, victim: str, moment: str, rng: random.Random, kills: Kills) -> None:
    log_dir, more = large_log_dir(rng)
    root, undisturbed = here / "root", here / "undisturbed"
    log_dir.make(root)
    shutil.copytree(root, undisturbed)
    started = find(log_dir, root)
    compact_here(log_dir, undisturbed)
    check_ended(log_dir, undisturbed, started)
    run = start(flags(log_dir, root, *more), here, submitted=victim.startswith("submitted"))
    try:
        if not (wait_for(moment, root, run, rng) and kill_victim(victim, run)):
            run.end()
            kills.ended += 1
            return
        kills.killed += 1
        if victim.endswith("jvm"):  # the driver continues: it reports the loss, and removes scratch files
            left = check_orphan(run, log_dir, root, started, kills)
        else:
            run.process.wait()
            left = check_killed(log_dir, root, started, kills)
            if rng.random() < 0.5:
                run.end()  # in the other half, workers of this run may write while the next run begins
        was_killed_twice = left != started and rng.random() < 0.3
        check_next_run(log_dir, root, left, run, begin_really=kills.killed % REAL_RUN_AFTER == 0 or was_killed_twice)
        if left == started:
            assert contents(root) == contents(undisturbed), "the bytes differ from those of an undisturbed run"
    finally:
        run.kill_all()


def wait_for(moment: str, root: Path, run: Run, rng: random.Random) -> bool:
    """Wait until the run has reached `moment`, and then for a random time. Return whether the run has not ended."""
    first = next(root.glob("orders-0/*.log"))
    inode = first.stat().st_ino

    def replacing() -> bool:
        return any(name.endswith((".swap", ".deleted", ".cleaned")) for folder in root.glob("orders-*")
                   for name in os.listdir(folder))  # fmt: skip

    def replaced() -> bool:
        return inode_of(first) not in (None, inode)

    checkpoint = root / "cleaner-offset-checkpoint"
    was = checkpoint.read_bytes() if checkpoint.exists() else b""
    there: dict[str, Callable[[], object]] = {
        "tasks run": lambda: next(root.rglob("*.clean"), None),
        "a group is replaced": lambda: replacing() or replaced(),
        "a checkpoint has moved": lambda: checkpoint.exists() and checkpoint.read_bytes() != was,
    }
    if not run.wait(there[moment]):
        return False
    time.sleep(rng.uniform(0, 3.0) if moment == "tasks run" else rng.choice([0, 0, rng.uniform(0, 1.0)]))
    return not run.has_ended


def kill_victim(victim: str, run: Run) -> bool:
    """Kill the selected process or the whole group. Return False if the run has already ended."""
    try:
        if victim == "group":
            os.killpg(run.process.pid, 9)
        else:
            kill(run.jvm() if victim.endswith("jvm") else run.driver())
    except (StopIteration, ValueError, ProcessLookupError):
        return False
    return True


def check_orphan(run: Run, log_dir: LogDir, root: Path, started: Found, kills: Kills) -> Found:
    """Check that a driver whose JVM was killed reports this and leaves no scratch files or lock. Return its files."""
    status = run.end()
    left = check_killed(log_dir, root, started, kills)
    if (left.files(), left.checkpoints) != _all_done(log_dir, started):
        assert status != 0, "an incomplete run reported success"
        assert "safe to start the broker" in run.error_text() or "a broker may start" in run.error_text()
    assert not is_held(str(root))
    scratch = [path.name for path in root.rglob("*.clean")]
    assert not scratch, f"scratch files remain: {scratch}"
    return left


def _all_done(log_dir: LogDir, started: Found) -> tuple[object, object]:
    run = expect(log_dir, started)
    return run.files, run.checkpoints


def check_next_run(log_dir: LogDir, root: Path, left: Found, killed: Run, *, begin_really: bool) -> None:
    if begin_really:
        again = start(flags(log_dir, root), killed.output.parent / "again")
        status = again.end()
        assert status == 0, again.error_text()
    else:
        compact_here(log_dir, root)
    killed.end()
    # if workers of the killed run wrote during this run, another run removes their files
    if list(root.rglob("*.clean")):
        compact_here(log_dir, root)
    check_ended(log_dir, root, left)


@pytest.mark.soak("run/test_without_spark.py, compact/test_driver.py: a killed worker")
def test_a_partition_whose_worker_is_killed_again_fails_and_others_are_compacted(tmp_path: Path) -> None:
    """Each worker that has a file of orders-1 open is killed. The next run compacts that partition."""
    rng = random.Random(f"{SEED} workers")
    print("seed", SEED)
    log_dir = random_log_dir(rng, sizes=(6, 12, 6), value_bytes=12_000, join=2)
    root, victim = tmp_path / "root", tmp_path / "root" / "orders-1"
    log_dir.make(root)
    started, before = find(log_dir, root), contents(root)
    shutil.copytree(root, tmp_path / "undisturbed")
    compact_here(log_dir, tmp_path / "undisturbed")
    run, killed = start(flags(log_dir, root, *THROTTLE), tmp_path), set[int]()
    try:
        while not run.has_ended:
            for pid in set(run.workers()) - killed:
                if has_open(pid, victim):
                    killed.add(pid)
                    kill(pid)
            time.sleep(0.002)
        assert run.end() == 3, run.error_text()
    finally:
        run.kill_all()
    rows = {row["partition"]: row for row in json.loads(run.output.read_text())}
    assert {n: row["status"] for n, row in rows.items()} == {0: "compacted", 1: "failed", 2: "compacted"}
    assert "killed twice" in rows[1]["error"]
    assert len(killed) == 2
    after = contents(root)
    assert {n: d for n, d in after.items() if "orders-1/" in n} == {n: d for n, d in before.items() if "orders-1/" in n}
    assert find(log_dir, root).checkpoints.get("orders-1") == started.checkpoints.get("orders-1")
    compact_here(log_dir, root)
    assert contents(root) == contents(tmp_path / "undisturbed")
