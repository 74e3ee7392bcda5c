"""A file system that can stop before any operation, and knows what a power cut at that moment leaves.

Contents are durable as of their file's last fsync, names as of their directory's last fsync. The real
operations happen too, in a real directory, so that the code under test sees what it did.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keytail.log.fs import FileSystem

MUTATING = ("create", "write", "write_at", "truncate", "fsync", "fsync_dir", "rename", "unlink", "set_mtime_ns")


class Stopped(BaseException):
    """The process died here. Not an Exception: no handler of the code under test may live on."""


@dataclass
class _File:
    """One inode: what it holds now, and what of it a power cut leaves."""

    content: bytes
    mtime_ns: int
    durable_content: bytes
    durable_mtime_ns: int


class RecordingFileSystem(FileSystem):
    """Everything under `root` counts as durable at the start; operations elsewhere are refused.

    `stop_at(n)` stops before operation n (0 is the first); `torn` lets half of a write through first.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self._stop_at: int | None = None
        self._torn = False
        self._stopped = False
        self._open: dict[int, _File] = {}
        self._now: dict[str, dict[str, _File]] = {}
        self._durable: dict[str, dict[str, _File]] = {}
        # Of each directory: functions that do, to a directory's names, what was done since its last fsync.
        self._pending: dict[str, list[Callable[[dict[str, _File]], object]]] = {}
        for directory, _, file_names in os.walk(root):
            entries = {name: _read(os.path.join(directory, name)) for name in file_names}
            self._now[directory] = entries
            self._durable[directory] = dict(entries)
            self._pending[directory] = []

    def stop_at(self, operation: int, *, torn: bool = False) -> RecordingFileSystem:
        self._stop_at = operation
        self._torn = torn
        return self

    def open_write(self, path: str) -> int:
        fd = super().open_write(path)
        directory, name = self._split(path)
        self._open[fd] = self._now[directory][name]
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        assert operation in MUTATING, f"the recorder does not know {operation}"
        if self._stopped:
            raise Stopped  # a dead process does nothing more
        if len(self.operations) == self._stop_at:
            self._stopped = True
            if self._torn and operation == "write":
                fd, view = arguments
                half = view[: len(view) // 2]
                self._write(fd, half)
                self._did_write(fd, half, 0)
            if self._torn and operation == "write_at":
                fd, view, position = arguments
                half = view[: len(view) // 2]
                self._write_at(fd, half, position)
                self._did_write_at(fd, half, position, 0)
            raise Stopped
        self.operations.append((operation, _short(arguments)))
        result = None if operation in ("fsync", "fsync_dir") else action()  # the disk need not hurry
        getattr(self, f"_did_{operation}")(*arguments, result)
        return result

    def _did_create(self, path: str, fd: int) -> None:
        directory, name = self._split(path)
        made = _File(b"", os.fstat(fd).st_mtime_ns, b"", os.fstat(fd).st_mtime_ns)
        self._open[fd] = made
        self._name_change(directory, lambda entries: entries.__setitem__(name, made))

    def _did_write(self, fd: int, view: memoryview, _: int) -> None:
        self._open[fd].content += bytes(view)
        self._open[fd].mtime_ns = os.fstat(fd).st_mtime_ns

    def _did_write_at(self, fd: int, view: memoryview, position: int, _: int) -> None:
        file = self._open[fd]
        file.content = file.content[:position].ljust(position, b"\0") + view + file.content[position + len(view) :]
        file.mtime_ns = os.fstat(fd).st_mtime_ns

    def _did_truncate(self, fd: int, size_bytes: int, _: None) -> None:
        self._open[fd].content = self._open[fd].content[:size_bytes].ljust(size_bytes, b"\0")
        self._open[fd].mtime_ns = os.fstat(fd).st_mtime_ns

    def _did_fsync(self, fd: int, _: None) -> None:
        file = self._open[fd]
        file.mtime_ns = os.fstat(fd).st_mtime_ns
        file.durable_content, file.durable_mtime_ns = file.content, file.mtime_ns

    def _did_fsync_dir(self, path: str, _: None) -> None:
        self._durable[path] = dict(self._now[path])
        self._pending[path] = []

    def _did_rename(self, source: str, target: str, _: None) -> None:
        directory, old = self._split(source)
        other, new = self._split(target)
        assert directory == other, "a rename between directories is not modelled"

        moved = self._now[directory][old]

        def move(entries: dict[str, _File]) -> None:
            if entries.get(old) is moved:
                entries[new] = entries.pop(old)

        self._name_change(directory, move)

    def _did_unlink(self, path: str, _: None) -> None:
        directory, name = self._split(path)
        gone = self._now[directory][name]

        def remove(entries: dict[str, _File]) -> None:
            if entries.get(name) is gone:
                del entries[name]

        self._name_change(directory, remove)

    def _did_set_mtime_ns(self, path: str, mtime_ns: int, _: None) -> None:
        directory, name = self._split(path)
        self._now[directory][name].mtime_ns = mtime_ns

    def _name_change(self, directory: str, change: Callable[[dict[str, _File]], object]) -> None:
        change(self._now[directory])
        self._pending[directory].append(change)

    def _split(self, path: str) -> tuple[str, str]:
        directory, name = os.path.split(path)
        assert directory in self._now, f"outside of the recorded directories: {path}"
        return directory, name

    # What is left after the stop

    def as_it_is(self, target: Path) -> None:
        """The process died, the machine did not."""
        shutil.copytree(self.root, target)

    def power_cut(self, target: Path) -> None:
        """Everything is dropped that was not fsynced."""
        self._materialise(target, self._durable, lambda file: (file.durable_content, file.durable_mtime_ns))

    def partial_power_cut(self, target: Path, rng: random.Random, *, in_order: bool) -> None:
        """Some of the unsynced changes are there: of each directory the earliest ones, or any, of each file too.

        Journaling file systems keep the order of changes to names; that nothing relies on it is what shows
        whether every fsync is where it must be.
        """
        names = {}
        for directory, durable in self._durable.items():
            entries = dict(durable)
            pending = self._pending[directory]
            first, chance = rng.randint(0, len(pending)), rng.random()
            for number, change in enumerate(pending):
                if number < first if in_order else rng.random() < chance:
                    change(entries)
            names[directory] = entries

        def content(file: _File) -> tuple[bytes, int]:
            if rng.random() < 0.5:
                return file.content, file.mtime_ns
            unsynced = len(file.content) - len(file.durable_content)
            if rng.random() < 0.5 and unsynced > 0:
                return file.content[: len(file.durable_content) + rng.randint(0, unsynced)], file.mtime_ns
            return file.durable_content, file.durable_mtime_ns

        self._materialise(target, names, content)

    def _materialise(
        self,
        target: Path,
        names: dict[str, dict[str, _File]],
        content: Callable[[_File], tuple[bytes, int]],
    ) -> None:
        for directory, entries in names.items():
            made = target / os.path.relpath(directory, self.root)
            made.mkdir(parents=True, exist_ok=True)
            for name, file in entries.items():
                data, mtime_ns = content(file)
                (made / name).write_bytes(data)
                os.utime(made / name, ns=(mtime_ns, mtime_ns))

    def check(self) -> None:
        """The model of the present agrees with the real directory."""
        for directory, entries in self._now.items():
            real = {name for name in os.listdir(directory) if os.path.isfile(os.path.join(directory, name))}
            assert real == set(entries), directory
            for name, file in entries.items():
                path = Path(directory, name)
                assert path.read_bytes() == file.content, path
                assert path.stat().st_mtime_ns == file.mtime_ns, path


def _read(path: str) -> _File:
    content, mtime_ns = Path(path).read_bytes(), os.stat(path).st_mtime_ns
    return _File(content, mtime_ns, content, mtime_ns)


def _short(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """For reading: names instead of paths, sizes instead of contents."""
    return tuple(
        os.path.basename(a) if isinstance(a, str) else len(a) if isinstance(a, memoryview) else a for a in arguments
    )
