"""A file system that can stop before any operation or make it fail, and compute the state after a power cut.

Contents are durable since the last fsync of their file, and names since the last fsync of their directory. Operations
are also executed in a real directory, so that the code under test reads its own changes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from keytail.log.fs import FileSystem
from tests.crash.faults import CUT, PARTIAL, SHORT_WRITE, Fault
from tests.crash.trees import Tree, read_file, read_tree

MUTATING = (
    "create", "mkdir", "write", "write_at", "truncate", "fsync", "fsync_dir", "rename", "link", "unlink", "rmdir",
    "set_mtime_ns",
)  # fmt: skip


class Stopped(BaseException):
    """Raised where the process ends. Not an Exception, so that no handler of the code under test catches it."""


@dataclass
class _File:
    """An inode: its present content and mtime, and those after a power cut."""

    content: bytes
    mtime_ns: int
    durable_content: bytes
    durable_mtime_ns: int
    # After a failed fsync, the pages count as clean, so that a later fsync succeeds and writes nothing.
    fsync_failed: bool = False


@dataclass
class _Dir:
    """A directory. `pending` has a function for each change of its names since the last fsync."""

    now: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        change(self.now)
        self.pending.append(change)


_Node: TypeAlias = _File | _Dir
_Change: TypeAlias = Callable[[dict[str, _Node]], object]


class RecordingFileSystem(FileSystem):
    """Records all changes. Everything under `root` counts as durable at the start; changes elsewhere are refused.

    `stop_at(n)` stops before changing operation n (0 is the first); `torn` first executes half of a write. `fail_at(n,
    fault)` makes call n fail; reads are counted as well. `before_each` is called before every changing operation;
    `as_it_is` and the power cuts then return the state after a stop at this point or, while a write is `torn`, after
    half of that write. `tree` is the content of `root`, if the caller knows it.
    """

    def __init__(self, root: Path, tree: Tree | None = None) -> None:
        super().__init__()
        self.root = root
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failed: list[tuple[str, str]] = []  # operations that failed, each with the name of its file
        self._stop_at: int | None = None
        self._torn = False
        self._stopped = False
        self._fail_at: int | None = None
        self._fault: Fault | None = None
        self._does_half = False  # whether this call reads or writes only half of the data
        self._open: dict[int, _File] = {}
        self._tree = _dir_of(read_tree(root) if tree is None else tree)
        self.before_each: Callable[[str, tuple[Any, ...]], object] | None = None

    def stop_at(self, operation: int, *, torn: bool = False) -> RecordingFileSystem:
        self._stop_at = operation
        self._torn = torn
        return self

    def fail_at(self, call: int, fault: Fault) -> RecordingFileSystem:
        self._fail_at = call
        self._fault = fault
        return self

    def repair(self) -> None:
        """End the fault: no further operation fails."""
        self._fault = None

    def close_all(self) -> None:
        for fd in list(self._path_of):
            self.close(fd)

    def open_write(self, path: str) -> int:
        fd = super().open_write(path)
        directory, name = self._split(path)
        self._open[fd] = _file(directory.now[name])
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        if self._stopped:
            return super()._look(operation, arguments, action)
        fault = self._fault_now(operation, arguments)
        if fault is None:
            return super()._look(operation, arguments, action)
        if fault.kind in PARTIAL:
            self._does_half = True
            try:
                return super()._look(operation, arguments, action)
            finally:
                self._does_half = False
        if fault.kind == CUT:
            return self._cut(operation, arguments, action)

        def fail() -> None:
            if operation == "close":
                action()  # a failed close also closes the descriptor
            raise fault.error()

        return super()._look(operation, arguments, fail)

    def _cut(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        if operation == "read_bytes":
            data = action()
            return data[: len(data) // 2]
        fd, view, position = arguments
        return self._read_into(fd, view[: len(view) // 2], position)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        assert operation in MUTATING, f"the recorder does not know {operation}"
        if self._stopped:
            raise Stopped  # an ended process makes no more changes
        if self.before_each is not None:
            self.before_each(operation, arguments)
        if len(self.operations) == self._stop_at:
            self._stopped = True
            if self._torn:
                self._half(operation, arguments)
            raise Stopped
        fault = self._fault_now(operation, arguments)
        if fault is not None and fault.kind not in PARTIAL:
            return super()._change(operation, arguments, lambda: self._fail(operation, arguments, fault))
        self.operations.append((operation, _short(arguments)))
        self._does_half = fault is not None
        try:
            # No real fsync is needed.
            done = (lambda: None) if operation in ("fsync", "fsync_dir") else action
            result = super()._change(operation, arguments, done)
        finally:
            self._does_half = False
        getattr(self, f"_did_{operation}")(*arguments, result)
        return result

    def _fault_now(self, operation: str, arguments: tuple[Any, ...]) -> Fault | None:
        """Count the call, and return its fault, or None."""
        number = len(self.calls)
        self.calls.append((operation, _short(arguments)))
        fault = self._fault
        if fault is None or self._fail_at is None or number < self._fail_at:
            return None
        if number > self._fail_at and not (fault.lasting and fault.fails(operation)):
            return None
        subject = arguments[0]
        path = self._path_of.get(subject, "") if isinstance(subject, int) else subject
        self.failed.append((operation, os.path.basename(path or "")))
        return fault

    def _fail(self, operation: str, arguments: tuple[Any, ...], fault: Fault) -> None:
        self.operations.append((f"{operation} fails ({fault})", _short(arguments)))
        if operation == "fsync":
            self._open[arguments[0]].fsync_failed = True
        if fault.kind == SHORT_WRITE:
            self._half(operation, arguments)
        raise fault.error()

    def _half(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Execute half of a write."""
        if operation not in ("write", "write_at"):
            return
        fd, view, *position = arguments
        half = view[: len(view) // 2]
        getattr(self, f"_{operation}")(fd, half, *position)
        getattr(self, f"_did_{operation}")(fd, half, *position, 0)

    def _write_some(self, fd: int, view: memoryview, position: int | None = None) -> int:
        return super()._write_some(fd, view[: self._share(view)], position)

    def _read_some(self, fd: int, view: memoryview, position: int) -> int:
        return super()._read_some(fd, view[: self._share(view)], position)

    def _share(self, view: memoryview) -> int:
        return (len(view) + 1) // 2 if self._does_half else len(view)

    def _did_create(self, path: str, fd: int) -> None:
        directory, name = self._split(path)
        made = _File(b"", os.fstat(fd).st_mtime_ns, b"", os.fstat(fd).st_mtime_ns)
        self._open[fd] = made
        directory.change(lambda entries: entries.__setitem__(name, made))

    def _did_mkdir(self, path: str, *_: Any) -> None:
        directory, name = self._split(path)
        made = _Dir()
        directory.change(lambda entries: entries.__setitem__(name, made))

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
        if not file.fsync_failed:
            file.durable_content, file.durable_mtime_ns = file.content, file.mtime_ns

    def _did_fsync_dir(self, path: str, _: None) -> None:
        directory = self._dir(path)
        directory.durable = dict(directory.now)
        directory.pending = []

    def _did_rename(self, source: str, target: str, _: None) -> None:
        (directory, old), (other, new) = self._split(source), self._split(target)
        moved = directory.now[old]
        if directory is other:

            def move(entries: dict[str, _Node]) -> None:
                if entries.get(old) is moved:
                    entries[new] = entries.pop(old)

            directory.change(move)
            return
        other.change(lambda entries: entries.__setitem__(new, moved))
        directory.change(lambda entries: entries.get(old) is moved and entries.pop(old))

    def _did_link(self, source: str, target: str, _: None) -> None:
        (directory, old), (other, new) = self._split(source), self._split(target)
        linked = directory.now[old]
        other.change(lambda entries: entries.__setitem__(new, linked))

    def _did_unlink(self, path: str, _: None) -> None:
        directory, name = self._split(path)
        removed = directory.now[name]
        directory.change(lambda entries: entries.get(name) is removed and entries.pop(name))

    _did_rmdir = _did_unlink

    def _did_set_mtime_ns(self, path: str, mtime_ns: int, _: None) -> None:
        directory, name = self._split(path)
        _file(directory.now[name]).mtime_ns = mtime_ns

    def _split(self, path: str) -> tuple[_Dir, str]:
        directory, name = os.path.split(path)
        return self._dir(directory), name

    def _dir(self, path: str) -> _Dir:
        found: _Node = self._tree
        relative = os.path.relpath(path, self.root)
        for part in () if relative == "." else relative.split(os.sep):
            assert isinstance(found, _Dir) and part in found.now, f"{path} is outside of the recorded directories"
            found = found.now[part]
        assert isinstance(found, _Dir), path
        return found

    # States after a stop

    def as_it_is(self) -> Tree:
        """Return the state after a kill of the process."""
        return _flat(self._tree, lambda made: made.now, lambda file: (file.content, file.mtime_ns))

    def power_cut(self) -> Tree:
        """Return the state without unsynced changes."""
        return _flat(
            self._tree, lambda made: made.durable, lambda file: (file.durable_content, file.durable_mtime_ns)
        )

    def partial_power_cut(self, rng: random.Random, *, in_order: bool) -> Tree:
        """Return a state with some of the unsynced changes to each file and directory; with `in_order`, the earliest
        ones of a directory.

        Journaling file systems keep the order of changes to names. Only without this order do tests show whether every
        fsync is in the right place.
        """

        def names(directory: _Dir) -> dict[str, _Node]:
            entries = dict(directory.durable)
            pending = directory.pending
            first, chance = rng.randint(0, len(pending)), rng.random()
            for number, change in enumerate(pending):
                if number < first if in_order else rng.random() < chance:
                    change(entries)
            return entries

        def content(file: _File) -> tuple[bytes, int]:
            if rng.random() < 0.5:
                return file.content, file.mtime_ns
            unsynced = len(file.content) - len(file.durable_content)
            if rng.random() < 0.5 and unsynced > 0:
                return file.content[: len(file.durable_content) + rng.randint(0, unsynced)], file.mtime_ns
            return file.durable_content, file.durable_mtime_ns

        return _flat(self._tree, names, content)

    @contextmanager
    def torn(self, operation: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Apply half of this write within the block."""
        fd, view, *position = arguments
        file = self._open[fd]
        content, mtime_ns = file.content, file.mtime_ns
        getattr(self, f"_did_{operation}")(fd, view[: len(view) // 2], *position, 0)
        yield
        file.content, file.mtime_ns = content, mtime_ns

    def check(self) -> None:
        """Check that the model of the present state equals the real directory."""
        _check(str(self.root), self._tree)


def _check(path: str, model: _Dir) -> None:
    assert set(os.listdir(path)) == set(model.now), path
    for name, node in model.now.items():
        where = f"{path}/{name}"
        if isinstance(node, _Dir):
            _check(where, node)
        else:
            assert read_file(where) == (node.content, node.mtime_ns), where


def _flat(
    directory: _Dir,
    names: Callable[[_Dir], dict[str, _Node]],
    content: Callable[[_File], tuple[bytes, int]],
    prefix: str = "",
) -> Tree:
    found: Tree = {}
    for name, node in names(directory).items():
        if isinstance(node, _Dir):
            found[f"{prefix}{name}/"] = (b"", 0)
            found |= _flat(node, names, content, f"{prefix}{name}/")
        else:
            found[prefix + name] = content(node)
    return found


def _dir_of(tree: Tree) -> _Dir:
    dirs = {"": _Dir()}
    for path, (content, mtime_ns) in tree.items():
        parent, slash, name = path.rstrip("/").rpartition("/")
        node: _Node = _Dir() if path.endswith("/") else _File(content, mtime_ns, content, mtime_ns)
        if isinstance(node, _Dir):
            dirs[path] = node
        directory = dirs[parent + slash]
        directory.now[name] = directory.durable[name] = node
    return dirs[""]


def _file(node: _Node) -> _File:
    assert isinstance(node, _File)
    return node


def _short(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments for output: names instead of paths, sizes instead of contents."""
    return tuple(
        os.path.basename(a) if isinstance(a, str) else len(a) if isinstance(a, memoryview) else a for a in arguments
    )
