"""The only module that accesses log dirs: all reads and all changes, except a check of permissions in `log/owner.py`.

The modules of `files/`, which only this module imports, carry out the operations. Every path is resolved to a
descriptor of its directory, without following links below a log dir (`files/paths.py`), and the last name of the path
is used relative to this descriptor. Thus the owner of a log dir cannot redirect an operation of root to another place.
New files and directories get owner and mode of an existing file or directory, and new files are never executable.

Each operation except `file_system_type`, `refuse_unless_like` and `start_writeback` passes through one of two private
hooks: one for operations that change something, and one for all other operations. Thus a subclass can record an
operation, stop before the operation, drop it or make it fail. Errors are the system's own OSError with the path and a
description of the operation. `Refused` is raised only if a new file or directory cannot be given its owner, mode or
labels, which `refuse_unless_like` checks in advance, or if a new directory was replaced or filled before it got them.
The callers decide which operations to perform, and in which order.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from keytail.errors import SymbolicLink, is_denied
from keytail.log import meter
from keytail.log.files import existing, new
from keytail.log.files.attributes import (
    DirEntry,
    DirName,
    FileStat,
    Sizes,
    file_stat,
    owner_and_user,
    scan,
    scan_names,
    scan_sizes,
)
from keytail.log.files.existing import in_directory, of_directory
from keytail.log.files.paths import READABLE_DIRECTORY

T = TypeVar("T")

# Errors of `link`: the file system has no hard links, the file already has the maximum number of links, or the two
# names are on different file systems.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

# Descriptions of the operations, for errors.
_DESCRIPTIONS = {
    "scan": "listing the directory",
    "stat": "reading attributes",
    "exists": "checking whether it exists",
    "unreadable": "checking access to the files",
    "open_read": "opening the file for reading",
    "open_write": "opening the file for writing",
    "map_read": "mapping the file",
    "read_into": "reading the file",
    "read_bytes": "reading the file",
    "fd_stat": "reading attributes",
    "close": "closing the file",
    "free_bytes": "determining the free space",
    "is_read_only": "reading the mount options",
    "create": "creating the file",
    "mkdir": "creating the directory",
    "write": "writing to the file",
    "write_at": "writing to the file",
    "truncate": "truncating the file",
    "fsync": "syncing the file",
    "fsync_dir": "syncing the directory",
    "rename": "renaming",
    "link": "creating a hard link",
    "unlink": "removing the file",
    "rmdir": "removing the directory",
    "set_mtime_ns": "setting the modification time",
}


class FileSystem:
    """The real file system. Paths are strings; descriptors are plain integers."""

    def __init__(self) -> None:
        self._path_of: dict[int, str] = {}

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """Hook for every operation that changes something: call `action`, which performs the operation, and return its
        result."""
        return self._with_error_details(operation, arguments, action)

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """Hook for every operation that changes nothing: call `action`, which performs the operation, and return its
        result."""
        return self._with_error_details(operation, arguments, action)

    def _with_error_details(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """Return the result of `action`. If it fails, add the operation and the path to the error: the system's errors
        have neither the operation nor the path of a descriptor."""
        try:
            return action()
        except OSError as error:
            subject = arguments[0]
            if isinstance(subject, int):
                error.filename = error.filename or self._path_of.get(subject)
            elif not isinstance(error, SymbolicLink):  # SymbolicLink already has the path of the link
                error.filename = subject  # the system received a descriptor and the last name
                if error.filename2 is not None:
                    error.filename2 = arguments[1]
            if error.strerror:
                error.strerror = f"{error.strerror} while {_DESCRIPTIONS[operation]}"
                if is_denied(error):
                    error.strerror += owner_and_user(error.filename)
            raise

    # Reading

    def scan(self, path: str) -> list[DirEntry]:
        """Return the entries of a directory, unsorted, with attributes; files that are removed during the listing are
        omitted."""
        return self._look("scan", (path,), lambda: of_directory(path, scan, READABLE_DIRECTORY))

    def scan_names(self, path: str) -> list[DirName]:
        """Return the names in a directory, unsorted, with file types. Files are not statted if the file system reports
        the type of each name."""
        return self._look("scan", (path,), lambda: of_directory(path, scan_names, READABLE_DIRECTORY))

    def scan_sizes(self, path: str, suffix: str) -> Sizes:
        """Return the names in a directory, with size and modification time only for regular files whose names end with
        `suffix`. Such files are omitted if they are removed during the listing.

        A call takes a quarter of the time of `scan` if most names have other suffixes.
        """
        return self._look(
            "scan", (path,), lambda: of_directory(path, lambda fd: scan_sizes(fd, suffix), READABLE_DIRECTORY)
        )

    def stat(self, path: str) -> FileStat:
        """Return the attributes of a file or directory. Raises SymbolicLink for a link, unless the link leads to a
        directory and may be followed."""
        return self._look("stat", (path,), lambda: existing.stat(path))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, in half the time of `stat`. Raises SymbolicLink for a link."""
        return self._look("stat", (path,), lambda: existing.size(path))

    def exists(self, path: str) -> bool:
        """Return whether the name exists, whatever it refers to. An error that leaves this undecided is raised."""
        return self._look("exists", (path,), lambda: existing.exists(path))

    def unreadable(self, path: str) -> list[str]:
        """Return the names of the regular files in the directory that this process is not allowed to read, sorted.

        No file is opened, and a call takes a third of the time of `scan`.
        """
        return self._look("unreadable", (path,), lambda: of_directory(path, existing.unreadable, READABLE_DIRECTORY))

    def open_read(self, path: str) -> int:
        """Open a regular file for reading and return its descriptor; never blocks on a FIFO.

        Raises SymbolicLink or NotRegular for any other file, and ForeignFile if this process is root and the directory
        belongs to another user, who does not own the file.
        """
        return self._look("open_read", (path,), lambda: self._open_regular(path, existing.READ))

    def open_write(self, path: str) -> int:
        """Open a regular file as `open_read` does, but also for `write_at` and `truncate`; return its descriptor."""
        return self._look("open_write", (path,), lambda: self._open_regular(path, existing.READ_AND_WRITE))

    def map_read(self, fd: int, size_bytes: int) -> mmap.mmap:
        """Return a read-only mapping of the first `size_bytes` (at least 1) of an index file; the mapping remains valid
        when the descriptor is closed.

        Bytes written by `write_at` are visible at once. If another process truncates the file, reading beyond its end
        kills this process, so files that other processes may truncate are read, not mapped.
        """
        return self._look(
            "map_read", (fd, size_bytes), lambda: mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        )

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        """Fill `buffer` (bytes-like, writable) from byte `position`; return the number of bytes, which is less than the
        buffer's size only at the end of the file."""
        view = memoryview(buffer).cast("B")
        return self._look("read_into", (fd, view, position), lambda: self._read_into(fd, view, position))

    def read_at(self, path: str, position: int, length_bytes: int) -> bytes:
        """Return up to `length_bytes` bytes from byte `position`. Intended for a few bytes, such as a header."""
        fd = self.open_read(path)
        try:
            buffer = bytearray(length_bytes)
            return bytes(buffer[: self.read_into(fd, buffer, position)])
        finally:
            self.close(fd)

    def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
        """Return the contents of a file of at most MAX_SMALL_BYTES. `whole`: raise OSError if fewer bytes can be read
        than the file had when it was opened."""
        fd = self.open_read(path)
        try:
            size_bytes = self.fd_size(fd) if whole else 0
            data = self._look("read_bytes", (fd,), lambda: existing.read_all(fd))
            if len(data) < size_bytes:
                raise OSError(errno.EIO, f"Only {len(data)} of {size_bytes} bytes could be read", path)
            return data
        finally:
            self.close(fd)

    def fd_stat(self, fd: int) -> FileStat:
        """Return the attributes of an open file, without extended attributes."""
        return self._look("fd_stat", (fd,), lambda: file_stat(self._path_of.get(fd, ""), os.fstat(fd), ()))

    def fd_size(self, fd: int) -> int:
        """Return the size of an open file in bytes."""
        return self._look("fd_stat", (fd,), lambda: os.fstat(fd).st_size)

    def close(self, fd: int) -> None:
        """Close the descriptor. The descriptor is closed even if an error is raised."""
        path = self._path_of.pop(fd, None)
        self._look("close", (path,), lambda: os.close(fd))

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an unprivileged process may still write on the file system of `path`."""
        facts = self._look("free_bytes", (path,), lambda: of_directory(path, os.statvfs))
        return facts.f_bavail * facts.f_frsize

    def is_read_only(self, path: str) -> bool:
        """Return whether the file system of `path` is mounted read-only."""
        return bool(self._look("is_read_only", (path,), lambda: of_directory(path, os.statvfs)).f_flag & os.ST_RDONLY)

    def file_system_type(self, path: str) -> str:
        """Return the kernel's name for the type of the file system of `path` ("ext4", "nfs4"), or "" if unknown."""
        device, mount_of_it = of_directory(path, lambda fd: (os.fstat(fd).st_dev, self._proc(f"fdinfo/{fd}")))
        number = f"{os.major(device)}:{os.minor(device)}"
        found = re.search(r"^mnt_id:\s*(\d+)$", mount_of_it, re.MULTILINE)
        for line in self._proc("mountinfo").splitlines():
            mount, _, kind = line.partition(" - ")
            mount_id, _, device_number, *_ = mount.split(" ")
            # A subvolume of btrfs has its own device number, which no mount has.
            if device_number == number or (found is not None and mount_id == found[1]):
                return kind.split(" ")[0]
        return ""

    def _proc(self, name: str) -> str:
        """Return the contents of a file of /proc/self; empty if it cannot be read."""
        try:
            return self.read_bytes(f"/proc/self/{name}").decode(errors="surrogateescape")
        except OSError:
            return ""

    # Changing

    def create(self, path: str, like: FileStat | None) -> int:
        """Create a new empty file, open for appending. Raises FileExistsError if the name exists.

        If `like` is given, the file gets its owner, group, security label, and mode and access ACL without execute
        bits. Raises Refused, and leaves no file, if the system does not permit this. In a user's directory, root gives
        a file only to that user: if `like` belongs to another user, only the mode of `like` is used.
        """
        return self._change("create", (path,), lambda: self._create(path, like))

    def mkdir(self, path: str, like: FileStat) -> None:
        """Create a directory with owner, group, mode, access ACL and security label of the directory `like`, with the
        exceptions that `create` makes.

        Raises Refused if the system does not permit this, or if another process replaced the directory, or created a
        file in it, before it got its owner.
        """
        self._change("mkdir", (path,), lambda: in_directory(path, lambda at, name: new.mkdir(path, at, name, like)))

    def open_lock_file(self, path: str, like: FileStat) -> tuple[int, bool]:
        """Return a read-write descriptor of a lock file, and whether this call created the file."""
        try:
            return self.open_write(path), False
        except FileNotFoundError:
            return self.create(path, like), True

    def write(self, fd: int, buffer: Any) -> int:
        """Append all of `buffer` (contiguous, bytes-like) to a file opened by `create`; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write", (fd, view), lambda: self._write(fd, view))

    def write_at(self, fd: int, buffer: Any, position: int) -> int:
        """Write all of `buffer` at byte `position` of a file opened by `open_write`; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write_at", (fd, view, position), lambda: self._write_at(fd, view, position))

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate an open file to `size_bytes`, or extend it with zeros that take no space.

        The next `write` to a file opened by `create` appends at the new end.
        """
        self._change("truncate", (fd, size_bytes), lambda: os.ftruncate(fd, size_bytes))

    def start_writeback(self, fd: int) -> None:
        """Let the system begin to write the file's pages to the disk. `fsync` then waits less, and reports errors."""
        new.start_writeback(fd)

    def fsync(self, fd: int) -> None:
        """Make the contents and the metadata of an open file durable, but not the file's name."""
        self._change("fsync", (fd,), lambda: os.fsync(fd))

    def fsync_dir(self, path: str) -> None:
        """Make the names of a directory durable."""
        self._change("fsync_dir", (path,), lambda: of_directory(path, os.fsync, READABLE_DIRECTORY))

    def rename(self, source: str, target: str) -> None:
        """Rename a file atomically; an existing `target` is replaced."""
        self._change("rename", (source, target), lambda: existing.rename(source, target))

    def link(self, source: str, target: str) -> None:
        """Create a second name of a file, on the same file system. Raises FileExistsError if `target` exists."""
        self._change("link", (source, target), lambda: existing.link(source, target))

    def unlink(self, path: str) -> None:
        self._change("unlink", (path,), lambda: in_directory(path, lambda at, name: os.unlink(name, dir_fd=at)))

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._change("rmdir", (path,), lambda: in_directory(path, lambda at, name: os.rmdir(name, dir_fd=at)))

    def set_mtime_ns(self, path: str, mtime_ns: int) -> None:
        """Set the modification and access time of a regular file, which is opened as `open_read` does."""
        self._change("set_mtime_ns", (path, mtime_ns), lambda: existing.set_mtime_ns(path, mtime_ns))

    def write_file(self, path: str, data: Any, like: FileStat | None) -> None:
        """Create a file with the contents `data`, durable except for its name. If writing fails, remove the file."""
        fd = self.create(path, like)
        try:
            try:
                self.write(fd, data)
                self.fsync(fd)
            finally:
                self.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # only the first error is reported
                self.unlink(path)
            raise

    def put_file(self, path: str, data: Any, like: FileStat | None, temporary: str) -> None:
        """Replace `path` by a file with the contents `data`, which are first durable under the name `temporary`.

        On failure `path` is unchanged and `temporary`, if it was created, is removed. The new name is not made durable.
        """
        self.write_file(temporary, data, like)
        try:
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # only the first error is reported
                self.unlink(temporary)
            raise

    def refuse_unless_like(self, like: FileStat) -> None:
        """Raise Refused if this process cannot create a file with the owner and group of `like`; call before
        writing."""
        new.refuse_unless_like(like)

    def _open_regular(self, path: str, flags: int) -> int:
        fd = existing.open_regular(path, flags)
        self._path_of[fd] = path
        return fd

    def _create(self, path: str, like: FileStat | None) -> int:
        fd = in_directory(path, lambda at, name: new.create(path, at, name, like))
        self._path_of[fd] = path
        return fd

    def _write(self, fd: int, view: memoryview) -> int:
        done = 0
        while done < len(view):
            done += self._write_some(fd, view[done:])
        return done

    def _write_at(self, fd: int, view: memoryview, position: int) -> int:
        done = 0
        while done < len(view):
            done += self._write_some(fd, view[done:], position + done)
        return done

    def _read_into(self, fd: int, view: memoryview, position: int) -> int:
        done = 0
        while done < len(view):
            count = self._read_some(fd, view[done:], position + done)
            if count == 0:
                break
            done += count
        meter.count(done)
        return done

    def _write_some(self, fd: int, view: memoryview, position: int | None = None) -> int:
        """Write with one system call, which may write only a part of `view`, at `position` or by default at the end of
        the file; return the number of bytes written."""
        return os.write(fd, view) if position is None else os.pwrite(fd, view, position)

    def _read_some(self, fd: int, view: memoryview, position: int) -> int:
        """Read with one system call, which may fill only a part of `view`; return the number of bytes read."""
        return os.preadv(fd, [view], position)


LOCAL = FileSystem()
