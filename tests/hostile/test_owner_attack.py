"""Root starts keytail on log dirs of a user who attacks it at the same time.

Nothing outside the log dirs is changed, opened or read, and nothing in them belongs to root. `KEYTAIL_ATTACKS` is the
number of runs (`make soak`: 40).
"""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chance import SEED
from tests.hostile.owner_attack import OWNER, Attacker, Watch, invisible_to_others
from tests.interop.broker_story import KEYTAIL
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.log_dirs import random_records, write_log_dir

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")

ATTACKS = int(os.environ.get("KEYTAIL_ATTACKS", "1"))
SECRET = b"root:$6$secret-of-root:19000:0:99999:7:::\n"
TOPICS = ["--topic-config", "orders:cleanup.policy=compact,delete", "--topic-config", "orders:retention.ms=-1",
          "--topic-config", "orders:retention.bytes=20000", "--topic-config", "orders:delete.retention.ms=0",
          "--topics-have-no-overrides"]  # fmt: skip


@pytest.mark.long
def test_no_file_outside_the_log_dirs_is_changed_or_read(fast_dir: Path) -> None:  # noqa: F811
    fast_dir.chmod(0o755)
    done, number = 0, 0
    while number < ATTACKS or (not done and number < ATTACKS + 5):  # in some attacks, the owner prevents every command
        here = fast_dir / str(number)
        here.mkdir(mode=0o755)
        with invisible_to_others(here):
            done += one_attack(f"{SEED}/{number}", here)
        number += 1
    assert done, f"seed {SEED}: no command of {number} attacks completed"


def test_only_the_test_and_its_processes_see_the_attacked_files(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as before:
        before.submit(int).result()  # the thread has started, with the mounts that all other processes see
        with invisible_to_others(tmp_path):
            (tmp_path / "file").touch()
            assert subprocess.check_output(["ls", tmp_path]) == b"file\n"
            assert before.submit(os.listdir, tmp_path).result() == []
    assert os.listdir(tmp_path) == []


def one_attack(seed: str, here: Path) -> int:
    """Run commands during an attack, check the files, and return the number of commands that completed."""
    rng = random.Random(seed)
    log_dir, backups, of_root = here / "logs", here / "backups", here / "of-root"
    outside = [here / "closed", here / "open"]
    partitions = {f"orders-{n}": random_records(rng.randrange(1000), 600) for n in range(2)}
    write_log_dir(log_dir, partitions)
    backups.mkdir()
    for path in [log_dir, backups, *log_dir.rglob("*")]:
        os.chown(path, OWNER, OWNER)
    of_root.mkdir(mode=0o700)
    for folder, mode in zip(outside, (0o700, 0o755), strict=True):
        make_outside(folder, mode, partitions)
    before = everything(outside)
    watch, attacker, done, message = Watch(outside), Attacker(seed, log_dir, backups, outside), 0, []
    try:
        for command in commands(rng, log_dir, backups, of_root):
            run = subprocess.run([str(KEYTAIL), *command], capture_output=True, cwd="/", check=False)
            message.append(run.stdout + run.stderr)
            done += run.returncode == 0
            assert b"Traceback" not in run.stderr, f"seed {seed}: {run.stderr.decode()}"
    finally:
        attacker.end()
    seen = watch.seen()
    watch.close()
    assert not seen, f"seed {seed}: {len(seen)} events, {seen[:50]}"
    assert everything(outside) == before, f"seed {seed}: files outside the log dirs have changed"
    message += [path.read_bytes() for path in of_root.rglob("*") if path.is_file()]
    message += [path.read_bytes() for path in here.rglob("*") if _is_in(path, log_dir, backups) and _is_file(path)]
    assert not any(b"secret-of-root" in text for text in message), f"seed {seed}: a secret was read"
    for path in [*log_dir.rglob("*"), *backups.rglob("*")]:
        facts = path.lstat()
        assert facts.st_uid == OWNER, f"seed {seed}: {path} belongs to {facts.st_uid}"
        assert not facts.st_mode & (stat.S_ISUID | stat.S_ISGID), f"seed {seed}: {path} has a set-ID bit"
    return done


def commands(rng: random.Random, log_dir: Path, backups: Path, of_root: Path) -> list[list[str]]:
    dirs = ["--log-dirs", str(log_dir)]
    compact: Callable[[], list[str]] = lambda: [  # noqa: E731
        "compact", *dirs, "--execute", "--force", *TOPICS, "--report", str(of_root / "report.html"),
        "--rows-file", str(of_root / "rows.json"), "--keep-originals", str(backups),
    ]  # fmt: skip
    choices = [
        compact(),
        ["rebuild-index", *dirs, "--all", "--execute"],
        ["verify", *dirs, "--output", "json"],
        ["expire", *dirs, "--execute", *TOPICS],
        ["prepared", *dirs, *TOPICS, "--discard", "--execute"],
        ["lookup", *dirs, "--partitions", "orders-0", "--offset", "100", "--output", "json"],
        ["describe", *dirs, "--output", "json"],
        ["undo", "--originals", str(backups), "--list"],
    ]
    prepare = ["compact", *dirs, "--prepare", "--force", *TOPICS]
    return [*rng.choice([[], [prepare], [prepare, prepare]]), compact(), *rng.sample(choices, 3)]


def make_outside(folder: Path, mode: int, partitions: dict[str, list]) -> None:
    """Create files of root, some of them in the form of a log dir."""
    write_log_dir(folder, partitions)
    (folder / "secret").write_bytes(SECRET)
    (folder / "setuid").write_bytes(b"#!/bin/sh\n")
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".log" and path.parent != folder:
            path.write_bytes(SECRET)
    folder.chmod(mode)


def everything(folders: list[Path]) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in [path for folder in folders for path in (folder, *folder.rglob("*"))]:
        facts = path.lstat()
        found[str(path)] = (facts.st_mode, facts.st_uid, facts.st_gid, facts.st_size, facts.st_mtime_ns,
                            facts.st_ctime_ns, facts.st_ino, facts.st_nlink)  # fmt: skip
    return found


def _is_in(path: Path, *folders: Path) -> bool:
    return any(folder in path.parents for folder in folders)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
