"""The only module that accesses log dirs: it contains every read, and every operation that changes something.

Every path is resolved to a descriptor of its directory, without following links below a log dir (`paths.py`), and its
last name is then used relative to that. So the owner of a log dir cannot redirect an operation of root to another
place. New files and directories get the owner of their directory, and never a mode with more than read and write.

Each operation passes through one of two private hooks, one for operations that change something and one for the
others, so that a subclass can record it, stop before it, drop it or make it fail. Errors are the system's own OSError
with the path and a description of the operation; only a file that cannot be given its owner raises `Refused`. The
callers decide which operations to perform, and in which order.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import mmap
import os
import pwd
import re
import stat as stat_bits
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from keytail.acting_user import current, is_another
from keytail.errors import WRITTEN_TO, ForeignFile, NotRegular, Refused, SymbolicLink
from keytail.log import meter
from keytail.log.file_facts import (
    ACCESS_ACL,
    DirEntry,
    DirName,
    FileStat,
    Sizes,
    attributes_of,
    file_stat,
    scan,
    scan_names,
    scan_sizes,
)
from keytail.log.paths import DIRECTORY, READABLE_DIRECTORY, open_directory, split, symbolic_link

T = TypeVar("T")

# Limit for a file that is read whole. The index of a log of 2^31 bytes, with an entry each 100 bytes, has half of it.
MOST_SMALL_BYTES = 1 << 29

# Errors of `link`: the file system has no hard links, or no more for this file, or both names are on different ones.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

# Without O_NONBLOCK, opening a FIFO waits for the other end.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_READ_AND_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW

_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_EXECUTE = 1

# Descriptions for errors.
_DOING = {
    "scan": "listing the directory",
    "stat": "reading attributes",
    "exists": "checking whether it exists",
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
        """Hook of every operation that changes something; `action` performs it."""
        return self._told(operation, arguments, action)

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """Hook of operations that change nothing."""
        return self._told(operation, arguments, action)

    def _told(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """Perform `action` and complete its error: the system's errors contain neither the operation nor the path of
        a descriptor."""
        try:
            return action()
        except OSError as error:
            subject = arguments[0]
            if isinstance(subject, int):
                error.filename = error.filename or self._path_of.get(subject)
            elif not isinstance(error, SymbolicLink):  # which already has the path of the link
                error.filename = subject  # the system received a descriptor and the last name
                if error.filename2 is not None:
                    error.filename2 = arguments[1]
            if error.strerror:
                error.strerror = f"{error.strerror} while {_DOING[operation]}"
            raise

    # Reading

    def scan(self, path: str) -> list[DirEntry]:
        """List a directory, unsorted; names that vanish meanwhile are omitted."""
        return self._look("scan", (path,), lambda: _of_directory(path, scan, READABLE_DIRECTORY))

    def scan_names(self, path: str) -> list[DirName]:
        """List the names in a directory, unsorted. Does not stat files if the file system reports the type of each
        name."""
        return self._look("scan", (path,), lambda: _of_directory(path, scan_names, READABLE_DIRECTORY))

    def scan_sizes(self, path: str, suffix: str) -> Sizes:
        """List a directory, with size and modification time only for regular files that end with `suffix`.

        Costs a fourth of `scan` if most names have other suffixes. Names that vanish meanwhile are omitted.
        """
        return self._look(
            "scan", (path,), lambda: _of_directory(path, lambda fd: scan_sizes(fd, suffix), READABLE_DIRECTORY)
        )

    def stat(self, path: str) -> FileStat:
        """Return the attributes of a file or directory; SymbolicLink for a link, unless it leads to a directory and
        may be followed."""
        return self._look("stat", (path,), lambda: _in_directory(path, lambda at, name: _stat(path, at, name)))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, at half of the cost of `stat`. SymbolicLink for a link."""
        return self._look("stat", (path,), lambda: _size(path))

    def exists(self, path: str) -> bool:
        """Whether the name exists, whatever it refers to. Raises any error that leaves this undecided."""
        return self._look("exists", (path,), lambda: _exists(path))

    def open_read(self, path: str) -> int:
        """Open a regular file for reading and return its descriptor; never blocks on a FIFO.

        Raises SymbolicLink or NotRegular for anything else, ForeignFile if root would read another user's file for
        the owner of the directory.
        """
        return self._look("open_read", (path,), lambda: self._open_regular(path, _READ))

    def open_write(self, path: str) -> int:
        """Open an existing regular file for `write_at` and `truncate`, and for reading; return its descriptor."""
        return self._look("open_write", (path,), lambda: self._open_regular(path, _READ_AND_WRITE))

    def map_read(self, fd: int, size_bytes: int) -> mmap.mmap:
        """Return a read-only mapping of the first `size_bytes` (at least 1) of an index file; it outlives the
        descriptor.

        Bytes written by `write_at` are visible at once. If another process truncates the file, reading beyond its end
        kills this process, so files that others may truncate are read, not mapped.
        """
        return self._look(
            "map_read", (fd, size_bytes), lambda: mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        )

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        """Fill `buffer` (bytes-like, writable) from byte `position`; returns fewer bytes only at the end of file."""
        view = memoryview(buffer).cast("B")
        return self._look("read_into", (fd, view, position), lambda: self._read_into(fd, view, position))

    def read_at(self, path: str, position: int, length_bytes: int) -> bytes:
        """Return up to `length_bytes` bytes from byte `position`; meant for a few bytes such as a header."""
        fd = self.open_read(path)
        try:
            buffer = bytearray(length_bytes)
            return bytes(buffer[: self.read_into(fd, buffer, position)])
        finally:
            self.close(fd)

    def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
        """Read a whole small file. `whole`: raise OSError if it ends before the size that it had when it was opened."""
        fd = self.open_read(path)
        try:
            size_bytes = self.fd_size(fd) if whole else 0
            data = self._look("read_bytes", (fd,), lambda: _read_all(fd))
            if len(data) < size_bytes:
                raise OSError(errno.EIO, f"Only {len(data)} of {size_bytes} bytes could be read", path)
            return data
        finally:
            self.close(fd)

    def fd_stat(self, fd: int) -> FileStat:
        """Like `stat` for an open descriptor, without extended attributes."""
        return self._look("fd_stat", (fd,), lambda: file_stat(self._path_of.get(fd, ""), os.fstat(fd), ()))

    def fd_size(self, fd: int) -> int:
        """Like `size` for an open descriptor."""
        return self._look("fd_stat", (fd,), lambda: os.fstat(fd).st_size)

    def close(self, fd: int) -> None:
        """Close the descriptor; it is closed even if an error is raised."""
        path = self._path_of.pop(fd, None)
        self._look("close", (path,), lambda: os.close(fd))

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an unprivileged process may still write on the file system of `path`."""
        facts = self._look("free_bytes", (path,), lambda: _of_directory(path, os.statvfs))
        return facts.f_bavail * facts.f_frsize

    def is_read_only(self, path: str) -> bool:
        """Whether the file system of `path` is mounted read-only."""
        return bool(self._look("is_read_only", (path,), lambda: _of_directory(path, os.statvfs)).f_flag & os.ST_RDONLY)

    def file_system_type(self, path: str) -> str:
        """Return the kernel's name of the file system that contains `path` ("ext4", "nfs4"); "" if it does not report
        it."""
        device, mount_of_it = _of_directory(path, lambda fd: (os.fstat(fd).st_dev, self._proc(f"fdinfo/{fd}")))
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
        """Return a file of /proc/self; empty if it cannot be read."""
        try:
            return self.read_bytes(f"/proc/self/{name}").decode(errors="surrogateescape")
        except OSError:
            return ""

    # Changing

    def create(self, path: str, like: FileStat | None) -> int:
        """Create a new empty file, open for appending; FileExistsError if the name exists.

        The file gets owner, group, mode and access ACL (both without execute bits) and security label of `like`;
        Refused, with nothing left behind, if that is not permitted. In a user's directory, root gives a file only to
        that user: if `like` belongs to another user, only its mode is used.
        """
        return self._change("create", (path,), lambda: self._create(path, like))

    def mkdir(self, path: str, like: FileStat) -> None:
        """Create a directory with owner, group, mode, access ACL and security label of the directory `like`.

        Raises Refused if something else took its name before it got its owner.
        """
        self._change("mkdir", (path,), lambda: _in_directory(path, lambda at, name: _mkdir(path, at, name, like)))

    def open_lock_file(self, path: str, like: FileStat) -> tuple[int, bool]:
        """Return a read-write descriptor of a lock file, and whether this call created the file."""
        try:
            return self.open_write(path), False
        except FileNotFoundError:
            return self.create(path, like), True

    def write(self, fd: int, buffer: Any) -> int:
        """Append all of `buffer` (contiguous, bytes-like); return the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write", (fd, view), lambda: self._write(fd, view))

    def write_at(self, fd: int, buffer: Any, position: int) -> int:
        """Write all of `buffer` at byte `position` of a file opened by `open_write`; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write_at", (fd, view, position), lambda: self._write_at(fd, view, position))

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate an open file to `size_bytes`, or extend it with zeros that take no space.

        The next `write` appends at the new end.
        """
        self._change("truncate", (fd, size_bytes), lambda: os.ftruncate(fd, size_bytes))

    def fsync(self, fd: int) -> None:
        """Make contents and metadata of an open file durable (not its name)."""
        self._change("fsync", (fd,), lambda: os.fsync(fd))

    def fsync_dir(self, path: str) -> None:
        """Make the names of a directory durable."""
        self._change("fsync_dir", (path,), lambda: _of_directory(path, os.fsync, READABLE_DIRECTORY))

    def rename(self, source: str, target: str) -> None:
        """Rename atomically; replaces `target`."""
        self._change("rename", (source, target), lambda: _rename(source, target))

    def link(self, source: str, target: str) -> None:
        """Create a second name of a file, on the same file system; FileExistsError if the name exists."""
        self._change("link", (source, target), lambda: _link(source, target))

    def unlink(self, path: str) -> None:
        self._change("unlink", (path,), lambda: _in_directory(path, lambda at, name: os.unlink(name, dir_fd=at)))

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._change("rmdir", (path,), lambda: _in_directory(path, lambda at, name: os.rmdir(name, dir_fd=at)))

    def set_mtime_ns(self, path: str, mtime_ns: int) -> None:
        """Set the modification time of a regular file, opened as by `open_read`."""
        self._change("set_mtime_ns", (path, mtime_ns), lambda: _set_mtime_ns(path, mtime_ns))

    def write_file(self, path: str, data: Any, like: FileStat | None) -> None:
        """Create a file with these contents, durable except for its name. On failure the file is removed."""
        fd = self.create(path, like)
        try:
            try:
                self.write(fd, data)
                self.fsync(fd)
            finally:
                self.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self.unlink(path)
            raise

    def put_file(self, path: str, data: Any, like: FileStat | None, temporary: str) -> None:
        """Replace `path` by a file with these contents: durable as `temporary` first, then renamed.

        On failure `path` is unchanged and `temporary` is removed. The name is not durable yet.
        """
        self.write_file(temporary, data, like)
        try:
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    def refuse_unless_like(self, like: FileStat) -> None:
        """Raise Refused if this process cannot create a file with owner and group of `like`. Call it before writing."""
        user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
        if user == 0 or (user == like.uid and like.gid in groups):
            return
        directory = like.path if like.is_dir else split(like.path)[0]
        if is_another() and like.uid == 0 and os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            return
        if is_another():
            raise Refused(
                f"keytail was started as root and works as {current()}, but the files belong to {_owner(like)}",
                path=like.path,
                remedy="Change the owner of the files to the owner of the log dir and a group of that user (chown)",
                slug="files-of-another-user",
            )
        raise Refused(
            f"this process runs as {_user_name(user)}, but the files belong to {_owner(like)}",
            path=like.path,
            remedy=f"Run as {_user_name(like.uid)} or root",
            slug="files-of-another-user",
        )

    def _open_regular(self, path: str, flags: int) -> int:
        fd = _open_regular(path, flags)
        self._path_of[fd] = path
        return fd

    def _create(self, path: str, like: FileStat | None) -> int:
        fd = _in_directory(path, lambda at, name: _create(path, at, name, like))
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
        """Make one system call, which may write less; without a position it appends."""
        return os.write(fd, view) if position is None else os.pwrite(fd, view, position)

    def _read_some(self, fd: int, view: memoryview, position: int) -> int:
        """Make one system call, which may read less."""
        return os.preadv(fd, [view], position)


LOCAL = FileSystem()


def _in_directory(path: str, act: Callable[[int, str], T]) -> T:
    """Return the result of `act` for a descriptor of the directory of the path's last name, and that name."""
    directory, name = split(path)
    at = open_directory(directory)
    try:
        return act(at, name)
    finally:
        os.close(at)


def _of_directory(path: str, act: Callable[[int], T], flags: int = DIRECTORY) -> T:
    """Return the result of `act` for a descriptor of this directory."""
    fd = open_directory(path, flags)
    try:
        return act(fd)
    finally:
        os.close(fd)


def _exists(path: str) -> bool:
    try:
        _in_directory(path, lambda at, name: os.stat(name, dir_fd=at, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _stat(path: str, at: int, name: str) -> FileStat:
    """Stat through /proc: a descriptor that supports extended attributes would need read permission."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        facts = os.fstat(fd)
        if not stat_bits.S_ISLNK(facts.st_mode):
            return file_stat(path, facts, attributes_of(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)
    try:
        return _of_directory(path, lambda fd: file_stat(path, os.fstat(fd), attributes_of(f"/proc/self/fd/{fd}")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise symbolic_link(path) from error


def _size(path: str) -> int:
    directory, name = split(path)
    at = open_directory(directory)
    try:
        facts = os.stat(name, dir_fd=at, follow_symlinks=False)
    finally:
        os.close(at)
    if stat_bits.S_ISLNK(facts.st_mode):
        raise symbolic_link(path)
    return facts.st_size


def _open_regular(path: str, flags: int) -> int:
    directory, name = split(path)
    at = open_directory(directory)
    try:
        fd = os.open(name, flags, dir_fd=at)
        try:
            facts = os.fstat(fd)
            if not stat_bits.S_ISREG(facts.st_mode):
                raise _not_regular(path)
            if os.geteuid() == 0 and os.fstat(at).st_uid not in (0, facts.st_uid):
                raise ForeignFile(errno.EPERM, "File and directory have different owners", path)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise symbolic_link(path) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket; a directory to be written to
            raise _not_regular(path) from error
        raise
    finally:
        os.close(at)


def _not_regular(path: str) -> NotRegular:
    return NotRegular(errno.EINVAL, "Not a regular file", path)


def _set_mtime_ns(path: str, mtime_ns: int) -> None:
    fd = _open_regular(path, _READ)
    try:
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def _rename(source: str, target: str) -> None:
    _in_directory(source, lambda at, name: _in_directory(
        target, lambda to, new_name: os.replace(name, new_name, src_dir_fd=at, dst_dir_fd=to)))  # fmt: skip


def _link(source: str, target: str) -> None:
    _in_directory(source, lambda at, name: _in_directory(
        target, lambda to, new_name: os.link(
            name, new_name, src_dir_fd=at, dst_dir_fd=to, follow_symlinks=False)))  # fmt: skip


def _read_all(fd: int) -> bytes:
    """Read to the end. Raise OSError for a file that is too large: a sparse file can have any size without using disk
    space, but would fill memory."""
    chunks: list[bytes] = []
    size_bytes = os.fstat(fd).st_size
    while size_bytes <= MOST_SMALL_BYTES and (chunk := os.read(fd, 1 << 20)):
        chunks.append(chunk)
        size_bytes = max(size_bytes, len(chunks) << 20)
    if size_bytes > MOST_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"File is larger than {MOST_SMALL_BYTES} bytes, the maximum for a file of this kind")
    return b"".join(chunks)


def _create(path: str, at: int, name: str, like: FileStat | None) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600 if like else 0o666, dir_fd=at)
    try:
        if like is not None:
            _make_like(fd, path, _for_directory(like, os.fstat(at)))
    except BaseException:
        os.close(fd)
        os.unlink(name, dir_fd=at)
        raise
    return fd


def _for_directory(like: FileStat, directory: os.stat_result) -> FileStat:
    """Root gives files that it creates in a user's directory to that user, never to a third one or with a third one's
    labels.

    In a directory of root, only root can have created the file of `like`. A process that root started and that works
    as another user creates all files for that user, even next to files of root.
    """
    if is_another() and like.uid == 0:
        return replace(like, uid=os.geteuid(), gid=os.getegid(), attributes=())
    if os.geteuid() != 0 or directory.st_uid in (0, like.uid):
        return like
    return replace(like, uid=directory.st_uid, gid=directory.st_gid, attributes=())


def _mkdir(path: str, at: int, name: str, like: FileStat) -> None:
    """Create the directory. Its parent's owner can exchange it, so only an empty directory of this process's user is
    given away."""
    os.mkdir(name, 0o700, dir_fd=at)
    try:
        fd = os.open(name, READABLE_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _exchanged(path) from error
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
            raise _exchanged(path)
        try:
            _make_like(fd, path, _for_directory(like, os.fstat(at)))
        except BaseException:
            os.rmdir(name, dir_fd=at)
            raise
    finally:
        os.close(fd)


def _exchanged(path: str) -> Refused:
    return Refused(
        "a new directory was replaced by something else", path=path, remedy=WRITTEN_TO, slug="directory-replaced"
    )


def _make_like(fd: int, path: str, like: FileStat) -> None:
    """Apply owner, attributes and mode of `like`. Owner first: changing it clears mode bits. ACL before mode: both
    set the group bits, to the same value."""
    try:
        now = os.fstat(fd)
        if (now.st_uid, now.st_gid) != (like.uid, like.gid):
            os.fchown(fd, like.uid, like.gid)
        wanted = dict(like.attributes)
        of_dir = stat_bits.S_ISDIR(now.st_mode)
        if not of_dir and ACCESS_ACL in wanted:
            wanted[ACCESS_ACL] = _without_execute(wanted[ACCESS_ACL])
        present = dict(attributes_of(fd))
        for name in present.keys() - wanted.keys():
            if name == ACCESS_ACL:  # inherited from a directory's default ACL; a label is only ever replaced
                os.removexattr(fd, name)
        for name, value in wanted.items():
            if present.get(name) != value:
                os.setxattr(fd, name, value)
        os.fchmod(fd, like.mode & (0o777 if of_dir else 0o666))
    except OSError as error:
        raise Refused(
            f"cannot give a new file the owner, mode and labels of {like.path}: {error.strerror}",
            path=path,
            remedy=f"Run as {_user_name(like.uid)} (the files belong to {_owner(like)}) or root. If started as root, "
            "keytail works as the owner of the log dir: the files must belong to that user and one of its groups",
            slug="cannot-set-file-attributes",
        ) from error


def _without_execute(acl: bytes) -> bytes:
    """Remove the execute bits of an ACL in the kernel's form: a version, then entries of tag, permissions and id."""
    entries = _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER.size :])
    kept = [_ACL_ENTRY.pack(tag, bits & ~_ACL_EXECUTE, who) for tag, bits, who in entries]
    return acl[: _ACL_HEADER.size] + b"".join(kept)


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user id {uid}"


def _owner(like: FileStat) -> str:
    try:
        group = f"group {grp.getgrgid(like.gid).gr_name}"
    except KeyError:
        group = f"group id {like.gid}"
    return f"{_user_name(like.uid)}, {group}"
