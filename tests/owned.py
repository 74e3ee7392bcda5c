"""Log dirs of a user other than the one who runs the tests, for tests that only root can run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

BROKER, OTHER = 52_001, 52_002
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """Create a temporary directory that other users can enter; they cannot enter pytest's own directories."""
    path = Path(tempfile.mkdtemp(prefix="keytail-owned-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def private_directory(path: Path) -> Path:
    """Create a directory that only root can read."""
    path.mkdir(mode=0o700)
    return path


def give(path: Path, uid: int, mode: int = 0o750) -> None:
    """Give a tree the owner and modes that a broker of that user leaves; directories have `mode`."""
    for item in [path, *path.rglob("*")]:
        os.chown(item, uid, uid, follow_symlinks=False)
        if not item.is_symlink():
            os.chmod(item, mode if item.is_dir() else mode & 0o666)


def foreign(path: Path, uid: int) -> list[str]:
    """Return the paths that belong to any other user or group."""
    return [str(item) for item in [path, *path.rglob("*")] if (item.lstat().st_uid, item.lstat().st_gid) != (uid, uid)]


def keytail(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    command = [sys.executable, "-m", "keytail", name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def python(script: str, *arguments: str | Path, status: int = 0) -> Any:
    """Run a script in a separate process, and return its output, parsed as JSON."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else None


def ids_of(status: str) -> Mapping[str, list[int]]:
    """Return the ids in a text of /proc/PID/status: real, effective, saved and file system ids, and the groups."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: list(map(int, fields[name].split())) for name in ("Uid", "Gid", "Groups")}


def ids_as(uid: int) -> Mapping[str, list[int]]:
    """Return the ids of a process that was started as root and works as `uid`, a user without a name."""
    return {"Uid": [0, uid, 0, uid], "Gid": [0, uid, 0, uid], "Groups": [uid]}
