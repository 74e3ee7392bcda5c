"""keytail's lock excludes brokers and other runs, and is held on the file that is named `.lock` now."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import Refused
from keytail.log import lock
from keytail.log.fs import LOCAL, FileSystem
from tests.chance import SEED

# Like Java's FileChannel.tryLock: a POSIX lock of the whole file, owned by the process.
AS_A_BROKER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("refused", flush=True)
else:
    print("locked", flush=True)
    sys.stdin.readline()
"""


def _broker(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AS_A_BROKER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_lock_file_is_never_removed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    (second / ".lock").touch()
    with lock.hold([str(first), str(second), str(first) + "/"]):
        inode = (first / ".lock").stat().st_ino
    assert (first / ".lock").stat().st_ino == inode
    assert (second / ".lock").exists()
    assert not lock.is_held(str(first)) and not lock.is_held(str(second))


def test_a_broker_that_opened_the_file_while_it_was_locked_locks_the_file_that_has_the_name(tmp_path: Path) -> None:
    """If the file were removed at the end, the broker would lock a removed file, and the next run would lock another
    one.
    """
    with lock.hold([str(tmp_path)]):
        opened = os.open(tmp_path / ".lock", os.O_RDWR)
    try:
        assert os.fstat(opened).st_ino == os.stat(tmp_path / ".lock").st_ino
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(Refused, match="in use"), lock.hold([str(tmp_path)]):
            raise AssertionError("two processes hold the lock")
    finally:
        os.close(opened)


def test_a_broker_cannot_start_while_the_lock_is_held(tmp_path: Path) -> None:
    with lock.hold([str(tmp_path)]):
        # Closing another descriptor of the file would release a POSIX lock of the process, but does not release this
        # lock.
        os.close(os.open(tmp_path / ".lock", os.O_RDWR))
        with _broker(tmp_path / ".lock") as process:
            assert _answer(process) == "refused"
    with _broker(tmp_path / ".lock") as process:
        assert _answer(process) == "locked"
        process.communicate("\n")


def test_the_error_names_a_running_broker(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with _broker(tmp_path / ".lock") as process:
        assert _answer(process) == "locked"
        with pytest.raises(Refused, match=f"in use by process {process.pid}, with a lock like that of a running"):
            with lock.hold([str(other), str(tmp_path)]):
                raise AssertionError("not reached")
        process.communicate("\n")
    assert (tmp_path / ".lock").exists()
    assert not lock.is_held(str(other)), "all locks must be taken, or none"
    with lock.hold([str(tmp_path)]):
        pass


def test_the_error_names_another_run(tmp_path: Path) -> None:
    with lock.hold([str(tmp_path)]):
        with pytest.raises(Refused, match="in use by another keytail run"):
            with lock.hold([str(tmp_path)]):
                raise AssertionError("not reached")
        assert (tmp_path / ".lock").exists()


def test_a_lock_file_that_is_removed_before_it_is_locked_is_opened_again(tmp_path: Path) -> None:
    """A broker that stops removes the file after keytail has opened it, and before keytail locks it."""

    class Raced(FileSystem):
        races = 0

        def open_lock_file(self, path, like):
            opened = super().open_lock_file(path, like)
            if self.races < 2:
                self.races += 1
                os.unlink(path)
                if self.races == 2:
                    Path(path).touch()
            return opened

    fs = Raced()
    with lock.hold([str(tmp_path)], fs):
        assert fs.races == 2
        with _broker(tmp_path / ".lock") as process:
            assert _answer(process) == "refused"
    assert (tmp_path / ".lock").exists()


def test_a_lock_file_that_is_removed_repeatedly_is_refused(tmp_path: Path) -> None:
    class Vanishing(FileSystem):
        def open_lock_file(self, path, like):
            opened = super().open_lock_file(path, like)
            os.unlink(path)
            return opened

    with pytest.raises(Refused, match="was replaced repeatedly"), lock.hold([str(tmp_path)], Vanishing()):
        raise AssertionError("not reached")


def test_the_error_for_a_lock_file_of_another_user_names_that_user(tmp_path: Path) -> None:
    class Forbidden(FileSystem):
        def open_lock_file(self, path, like):
            raise PermissionError(13, "Permission denied", path)

    with pytest.raises(Refused, match="Run as the user that the broker runs as"):
        with lock.hold([str(tmp_path)], Forbidden()):
            raise AssertionError("not reached")


@pytest.mark.parametrize("replacement", [None, "empty", "link to a copy of the held file"])
def test_a_lock_whose_file_was_removed_or_replaced_is_lost(tmp_path: Path, replacement: str | None) -> None:
    partition = tmp_path / "logs" / "orders-0"
    partition.mkdir(parents=True)
    log_dir, link = partition.parent, tmp_path / "link"
    link.symlink_to(log_dir)
    with lock.hold([str(link)]):
        for path in (log_dir, partition, link, link / "orders-0"):
            lock.refuse_lost(LOCAL, str(path))
        (log_dir / ".lock").unlink()
        if replacement == "empty":
            (log_dir / ".lock").touch()
        elif replacement is not None:
            (tmp_path / "twin").touch()
            (log_dir / ".lock").symlink_to(tmp_path / "twin")
        for path in (log_dir, partition, link, link / "orders-0"):
            with pytest.raises(lock.LockLost, match="removed or replaced while this run held the lock") as lost:
                lock.refuse_lost(LOCAL, str(path))
            assert lost.value.path == str(log_dir / ".lock")
    lock.refuse_lost(LOCAL, str(partition))  # no lock is held any more


def test_only_the_lock_of_the_changed_log_dir_is_checked(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "ab"
    first.mkdir()
    second.mkdir()
    with lock.hold([str(first), str(second)]):
        (first / ".lock").unlink()
        lock.refuse_lost(LOCAL, str(second / "orders-0"))
        lock.refuse_lost(LOCAL, str(tmp_path))
        with pytest.raises(lock.LockLost):
            lock.refuse_lost(LOCAL, str(first / "orders-0"))


# An iteration has up to two dozen context switches, each of which takes milliseconds on a busy machine.
TURNS = 400


def _take_the_lock_repeatedly(
    log_dir: str, seed: int, turns: int, start: multiprocessing.synchronize.Barrier, found: Any
) -> None:
    """Take the lock repeatedly, as keytail does; report how often it was taken, and how often two processes held it."""
    chance, had, together = random.Random(seed), 0, 0
    start.wait()
    for _ in range(turns):
        try:
            with lock.hold([log_dir]):
                inside = os.path.join(log_dir, "inside")
                try:
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    together += 1
                    continue
                if chance.random() < 0.5:
                    os.sched_yield()
                os.unlink(inside)
                had += 1
        except Refused:
            os.sched_yield()
    found.put((had, together))


def _start_and_stop(
    log_dir: str, seed: int, turns: int, start: multiprocessing.synchronize.Barrier, found: Any
) -> None:
    """Start repeatedly, as a broker does: open or create the file and, some time later, lock what was opened.

    Unlike a broker, do not remove the file.
    """
    chance, had, together = random.Random(seed), 0, 0
    start.wait()
    for _ in range(turns):
        opened = os.open(os.path.join(log_dir, ".lock"), os.O_RDWR | os.O_CREAT)
        for _ in range(chance.randrange(12)):
            os.sched_yield()
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
            continue
        inside = os.path.join(log_dir, "inside")
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            for _ in range(chance.randrange(12)):
                os.sched_yield()
            os.unlink(inside)
            had += 1
        except FileExistsError:
            together += 1
        os.close(opened)
    found.put((had, together))


def test_in_a_race_of_runs_and_starting_brokers_only_one_holds_the_lock(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    start, found = spawn.Barrier(4), spawn.Queue()
    runs = [
        spawn.Process(target=_take_the_lock_repeatedly, args=(str(tmp_path), SEED + n, TURNS, start, found))
        for n in range(2)
    ]
    brokers = [(str(tmp_path), SEED - n, TURNS, start, found) for n in range(1, 3)]
    runs += [spawn.Process(target=_start_and_stop, args=broker) for broker in brokers]
    for process in runs:
        process.start()
    counts = [found.get(timeout=600) for _ in runs]
    for process in runs:
        process.join()
    assert [together for _, together in counts] == [0] * 4
    assert sum(had for had, _ in counts) > 0
