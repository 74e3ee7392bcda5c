"""Protects keytail's JVM and its Python workers from other users of the host and from modules in the current directory.

The directories in which Spark keeps shuffle files, broadcasts and temporary files have mode 0700. The process that has
created a directory holds a lock on it (flock) until it removes the directory. Directories of a killed process are
removed by the next run of the same user, which recognises them by name, owner, mode and the free lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from keytail.errors import KeytailError, of_system

PREFIX = "keytail-spark-"
_PRIVATE = 0o700


class LocalDirs:
    """New private directories, one below each of `parents`. Raises KeytailError if a directory cannot be created."""

    def __init__(self, parents: list[str]) -> None:
        self._maker = os.getpid()
        self._fds: list[int] = []
        self.paths: list[str] = []
        try:
            for parent in parents:
                remove_abandoned(parent)
                path, fd = _make_locked(parent)
                self.paths.append(path)
                self._fds.append(fd)
        except OSError as problem:
            self.remove()
            raise of_system(problem) from problem

    def remove(self) -> None:
        """Remove the directories with their contents; do nothing in a forked child. Directories that cannot be removed
        now are removed by the next run."""
        if os.getpid() != self._maker:
            return
        while self.paths:
            shutil.rmtree(self.paths.pop(), ignore_errors=True)
        while self._fds:
            os.close(self._fds.pop())


def _make_locked(parent: str) -> tuple[str, int]:
    """Create a private directory; return its path, and a descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        # Before this process locks the directory, another run may lock it and remove it as abandoned.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                return path, fd
        os.close(fd)


def remove_abandoned(parent: str) -> None:
    """Remove those private directories of this user below `parent` whose creator has ended."""
    try:
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # the caller will fail to create a directory in `parent`, and report the error
        return
    try:
        for name in os.listdir(parent_fd):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError), _locked(name, parent_fd):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


@contextlib.contextmanager
def _locked(name: str, parent_fd: int) -> Iterator[None]:
    """Hold the lock of directory `name` while the context is open. Raises OSError if it is not a private directory of
    this user, or if its creator holds the lock."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o777 != _PRIVATE:
            raise PermissionError
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def configured_parents() -> list[str]:
    """Return the directories that are configured for Spark's temporary files: SPARK_LOCAL_DIRS, else spark.local.dir of
    spark-defaults.conf, else the temporary directory. Raises KeytailError if a directory cannot be created."""
    named = os.environ.get("SPARK_LOCAL_DIRS") or _local_dir_of_conf() or tempfile.gettempdir()
    parents = [os.path.abspath(parent) for parent in named.split(",") if parent]
    for parent in parents:
        try:
            os.makedirs(parent, exist_ok=True)
        except OSError as problem:
            raise KeytailError(
                f"the directory for Spark's temporary files cannot be created: {problem.strerror}",
                path=parent,
                remedy="Set SPARK_LOCAL_DIRS to directories to which this user may write",
                slug="unusable-spark-local-dir",
            ) from problem
    return parents


def _local_dir_of_conf() -> str | None:
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    with contextlib.suppress(OSError):
        lines = (Path(folder) / "spark-defaults.conf").read_text(errors="replace").splitlines()
        found = [match[1] for line in lines if (match := re.match(r"\s*spark\.local\.dir[\s=:]+(\S+)", line))]
        return found[-1] if found else None
    return None


def safe_environment(local_dirs: list[str]) -> dict[str, str]:
    """Return environment variables for a JVM and its Python workers, with `local_dirs` as Spark's local directories.
    The executors of a cluster use the variables of their hosts instead."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),  # an empty item is the current directory
        "SPARK_LOCAL_DIRS": ",".join(local_dirs),
    }


@contextlib.contextmanager
def environment_of_children(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start while the context is open; then restore the old values."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
