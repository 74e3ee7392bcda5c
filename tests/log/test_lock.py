"""Kafka's lock: held against other processes and other runs, on the file that still has the name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keytail.errors import Refused
from keytail.log import lock
from keytail.log.fs import FileSystem

# As Java's FileChannel.tryLock: a POSIX lock of the whole file, owned by the process.
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


def test_a_file_that_was_made_goes_at_the_end_one_that_was_there_stays(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    (second / ".lock").touch()
    with lock.hold([str(first), str(second), str(first) + "/"]):
        assert (first / ".lock").exists()
    assert not (first / ".lock").exists()
    assert (second / ".lock").exists()


def test_a_broker_cannot_start_while_it_is_held(tmp_path: Path) -> None:
    with lock.hold([str(tmp_path)]):
        # Another descriptor of the same file, closed again, loses a process's lock, but not this one.
        os.close(os.open(tmp_path / ".lock", os.O_RDWR))
        with _broker(tmp_path / ".lock") as process:
            assert _answer(process) == "refused"
    with _broker(tmp_path / ".lock") as process:
        assert _answer(process) == "locked"
        process.communicate("\n")


def test_a_running_broker_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with _broker(tmp_path / ".lock") as process:
        assert _answer(process) == "locked"
        with pytest.raises(Refused, match=f"in use by process {process.pid}, by a lock as a running broker"):
            with lock.hold([str(other), str(tmp_path)]):
                raise AssertionError("not reached")
        process.communicate("\n")
    assert (tmp_path / ".lock").exists()
    assert not (other / ".lock").exists(), "all or none"
    with lock.hold([str(tmp_path)]):
        pass


def test_another_run_is_named(tmp_path: Path) -> None:
    with lock.hold([str(tmp_path)]):
        with pytest.raises(Refused, match="in use by another keytail run"):
            with lock.hold([str(tmp_path)]):
                raise AssertionError("not reached")
        assert (tmp_path / ".lock").exists()


def test_a_file_that_lost_its_name_is_not_the_lock(tmp_path: Path) -> None:
    """A broker that stops unlinks the file between our open and our lock."""

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
    assert (tmp_path / ".lock").exists(), "made by someone else"


def test_a_lock_file_that_keeps_vanishing_is_refused(tmp_path: Path) -> None:
    class Vanishing(FileSystem):
        def open_lock_file(self, path, like):
            opened = super().open_lock_file(path, like)
            os.unlink(path)
            return opened

    with pytest.raises(Refused, match="keeps being replaced"), lock.hold([str(tmp_path)], Vanishing()):
        raise AssertionError("not reached")


def test_another_users_lock_file_says_whom_to_run_as(tmp_path: Path) -> None:
    class Forbidden(FileSystem):
        def open_lock_file(self, path, like):
            raise PermissionError(13, "Permission denied", path)

    with pytest.raises(Refused, match="Run as the user that the broker runs as"):
        with lock.hold([str(tmp_path)], Forbidden()):
            raise AssertionError("not reached")
