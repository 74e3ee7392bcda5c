"""The one module that touches log dirs: every read, and every operation that changes something.

Each operation passes one of two private hooks, of those that change something and of those that do not, so that a
subclass can record it, stop before it, drop it or let it fail. Errors are the system's own OSError with the path
in them, and in words what was being done; only a file that cannot be given its owner is `Refused`. Which operations
to do, and in which order, is left to the callers.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import mmap
import os
import pwd
import stat as stat_bits
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from keytail.errors import Refused
from keytail.log.meter import METER

T = TypeVar("T")

ACCESS_ACL = "system.posix_acl_access"
SECURITY_LABELS = ("security.selinux", "security.SMACK64")
KEPT_ATTRIBUTES = (ACCESS_ACL, *SECURITY_LABELS)

# Of a file that is read whole. An index of 2^31 bytes of log, an entry each 100 bytes, has half of that.
MOST_SMALL_BYTES = 1 << 29

_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_EXECUTE = 1

# In words, for errors.
_DOING = {
    "scan": "listing it",
    "stat": "looking at it",
    "exists": "looking for it",
    "open_read": "opening it for reading",
    "open_write": "opening it for writing",
    "map_read": "mapping it",
    "read_into": "reading it",
    "read_bytes": "reading it",
    "fd_stat": "looking at it",
    "close": "closing it",
    "free_bytes": "asking for its free space",
    "is_read_only": "asking how it is mounted",
    "create": "creating it",
    "mkdir": "making it",
    "write": "writing to it",
    "write_at": "writing to it",
    "truncate": "cutting it",
    "fsync": "syncing it",
    "fsync_dir": "syncing the directory",
    "rename": "renaming it",
    "link": "linking it",
    "unlink": "removing it",
    "rmdir": "removing it",
    "set_mtime_ns": "setting its time",
}

# A file system without extended attributes, or one that hides them from us, has none for our purpose.
_NO_ATTRIBUTES = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODATA, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name of a directory, as lstat sees it (a symlink is neither regular nor a directory)."""

    name: str
    is_dir: bool
    size_bytes: int
    mtime_ns: int
    inode: int
    is_regular: bool
    is_symlink: bool = False
    uid: int = -1
    gid: int = -1
    mode: int = 0


class DirName(NamedTuple):
    """One name of a directory and what it is of, as lstat sees it."""

    name: str
    is_dir: bool
    is_symlink: bool


@dataclass(frozen=True, slots=True)
class FileStat:
    """What a path leads to, with all that a file made in its place has to take over."""

    path: str
    size_bytes: int
    mtime_ns: int
    uid: int
    gid: int
    mode: int
    inode: int
    device: int
    is_dir: bool
    is_regular: bool
    attributes: tuple[tuple[str, bytes], ...] = ()
    links: int = 1  # names that the file has


@dataclass(frozen=True, slots=True)
class Sizes:
    """Names of a directory, unsorted: regular files with size in bytes and modification time in ns, regular files of
    which neither was asked for, and all else."""

    sized: list[tuple[str, int, int]]
    regular: list[str]
    others: list[str]


class FileSystem:
    """The real file system. Paths are strings; descriptors are plain integers."""

    def __init__(self) -> None:
        self._path_of: dict[int, str] = {}

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """The hook that every mutating operation passes; `action` is what really does it."""
        return self._told(operation, arguments, action)

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """The hook of operations that change nothing."""
        return self._told(operation, arguments, action)

    def _told(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], T]) -> T:
        """The system's errors do not say what was being done, nor of a descriptor which file it is; ours do."""
        try:
            return action()
        except OSError as error:
            subject = arguments[0]
            if error.filename is None:
                error.filename = self._path_of.get(subject) if isinstance(subject, int) else subject
            if error.strerror:
                error.strerror = f"{error.strerror} while {_DOING[operation]}"
            raise

    # Reading

    def scan(self, path: str) -> list[DirEntry]:
        """The names in a directory, unsorted; names that vanish meanwhile are left out."""
        return self._look("scan", (path,), lambda: _scan(path))

    def scan_names(self, path: str) -> list[DirName]:
        """The names in a directory, unsorted. No file is looked at, where the file system tells what a name is of."""
        return self._look("scan", (path,), lambda: _scan_names(path))

    def scan_sizes(self, path: str, suffix: str) -> Sizes:
        """The names in a directory, with size and modification time of regular files that end with `suffix` only.

        A fourth of the cost of `scan` where most names are of other files. Names that vanish meanwhile are left out.
        """
        return self._look("scan", (path,), lambda: _scan_sizes(path, suffix))

    def stat(self, path: str) -> FileStat:
        """Follows symlinks."""
        return self._look("stat", (path,), lambda: _file_stat(path, os.stat(path), _attributes(path)))

    def size(self, path: str) -> int:
        """Bytes of what the path leads to, and no more of it: a fourth of the cost of `stat`."""
        return self._look("stat", (path,), lambda: os.stat(path).st_size)

    def exists(self, path: str) -> bool:
        """Whether there is such a name, whatever it leads to. An error that says neither yes nor no is raised."""
        return self._look("exists", (path,), lambda: _exists(path))

    def open_read(self, path: str) -> int:
        """A descriptor of a regular file; never blocks on a FIFO."""
        return self._look("open_read", (path,), lambda: self._open_regular(path, os.O_RDONLY))

    def open_write(self, path: str) -> int:
        """A descriptor of a regular file that exists, for `write_at` and `truncate`; reads as well."""
        return self._look("open_write", (path,), lambda: self._open_regular(path, os.O_RDWR))

    def map_read(self, fd: int, size_bytes: int) -> mmap.mmap:
        """A read-only view of the first `size_bytes` (at least 1) of an index file; it outlives the descriptor.

        What `write_at` writes is seen at once. Whoever else cuts the file kills a process that looks behind its
        end, so files that another process may cut are read, not mapped.
        """
        return self._look(
            "map_read", (fd, size_bytes), lambda: mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        )

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        """Fills `buffer` (bytes-like, writable) from byte `position`; fewer bytes only at the end of file."""
        view = memoryview(buffer).cast("B")
        return self._look("read_into", (fd, view, position), lambda: self._read_into(fd, view, position))

    def read_at(self, path: str, position: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` bytes from byte `position`, for the few bytes of a tail or a header."""
        fd = self.open_read(path)
        try:
            buffer = bytearray(length_bytes)
            return bytes(buffer[: self.read_into(fd, buffer, position)])
        finally:
            self.close(fd)

    def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
        """A whole small file. `whole`: an OSError where it ends before the size that it had when it was opened."""
        fd = self.open_read(path)
        try:
            size_bytes = self.fd_size(fd) if whole else 0
            data = self._look("read_bytes", (fd,), lambda: _read_all(fd))
            if len(data) < size_bytes:
                raise OSError(errno.EIO, f"Of {size_bytes} bytes only {len(data)} could be read", path)
            return data
        finally:
            self.close(fd)

    def fd_stat(self, fd: int) -> FileStat:
        """Like `stat`, of an open descriptor (without extended attributes)."""
        return self._look("fd_stat", (fd,), lambda: _file_stat(self._path_of.get(fd, ""), os.fstat(fd), ()))

    def fd_size(self, fd: int) -> int:
        """Like `size`, of an open descriptor."""
        return self._look("fd_stat", (fd,), lambda: os.fstat(fd).st_size)

    def close(self, fd: int) -> None:
        """The descriptor is gone afterwards, whatever is raised."""
        path = self._path_of.pop(fd, None)
        self._look("close", (path,), lambda: os.close(fd))

    def free_bytes(self, path: str) -> int:
        """What an unprivileged process may still write on the file system of `path`."""
        facts = self._look("free_bytes", (path,), lambda: os.statvfs(path))
        return facts.f_bavail * facts.f_frsize

    def is_read_only(self, path: str) -> bool:
        """Whether the file system of `path` is mounted so."""
        return bool(self._look("is_read_only", (path,), lambda: os.statvfs(path)).f_flag & os.ST_RDONLY)

    def file_system_type(self, path: str) -> str:
        """What the kernel calls the file system that holds `path` ("ext4", "nfs4"); "" where it does not tell."""
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = self.read_bytes("/proc/self/mountinfo").decode(errors="surrogateescape")
        except OSError:
            return ""
        for line in mounts.splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2] == number:
                return kind.split(" ")[0]
        return ""

    # Changing

    def create(self, path: str, like: FileStat | None) -> int:
        """A new empty file, open for appending; FileExistsError when the name is taken.

        It takes owner, group, mode, access ACL and security label of `like` (of a directory: without the
        execute bits); Refused, with nothing left behind, when that is not allowed.
        """
        return self._change("create", (path,), lambda: self._create(path, like))

    def mkdir(self, path: str, like: FileStat) -> None:
        """A new directory with owner, group, mode, access ACL and security label of the directory `like`."""
        self._change("mkdir", (path,), lambda: _mkdir(path, like))

    def open_lock_file(self, path: str, like: FileStat) -> tuple[int, bool]:
        """A read-write descriptor of a lock file, and whether this call made the file."""
        try:
            fd = self._look("open_write", (path,), lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return self.create(path, like), True
        self._path_of[fd] = path
        return fd, False

    def write(self, fd: int, buffer: Any) -> int:
        """Appends all of `buffer` (contiguous, bytes-like); the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write", (fd, view), lambda: self._write(fd, view))

    def write_at(self, fd: int, buffer: Any, position: int) -> int:
        """Puts all of `buffer` at byte `position` of a file of `open_write`; the number of bytes."""
        view = memoryview(buffer).cast("B")
        return self._change("write_at", (fd, view, position), lambda: self._write_at(fd, view, position))

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cuts an open file back to `size_bytes`, or lengthens it with zeros that take no space.

        What `write` writes next goes to the new end.
        """
        self._change("truncate", (fd, size_bytes), lambda: os.ftruncate(fd, size_bytes))

    def fsync(self, fd: int) -> None:
        """Makes contents and metadata of an open file durable (not its name)."""
        self._change("fsync", (fd,), lambda: os.fsync(fd))

    def fsync_dir(self, path: str) -> None:
        """Makes the names of a directory durable."""
        self._change("fsync_dir", (path,), lambda: _fsync_dir(path))

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`."""
        self._change("rename", (source, target), lambda: os.replace(source, target))

    def link(self, source: str, target: str) -> None:
        """A second name of a file, on the same file system; FileExistsError when the name is taken."""
        self._change("link", (source, target), lambda: os.link(source, target, follow_symlinks=False))

    def unlink(self, path: str) -> None:
        self._change("unlink", (path,), lambda: os.unlink(path))

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self._change("rmdir", (path,), lambda: os.rmdir(path))

    def set_mtime_ns(self, path: str, mtime_ns: int) -> None:
        self._change("set_mtime_ns", (path, mtime_ns), lambda: os.utime(path, ns=(mtime_ns, mtime_ns)))

    def write_file(self, path: str, data: Any, like: FileStat | None) -> None:
        """A new file with these contents, durable but for its name. Where that fails the file goes again."""
        fd = self.create(path, like)
        try:
            try:
                self.write(fd, data)
                self.fsync(fd)
            finally:
                self.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to be told
                self.unlink(path)
            raise

    def put_file(self, path: str, data: Any, like: FileStat | None, temporary: str) -> None:
        """Puts a file with these contents in the place of `path`: durable as `temporary` first, then renamed.

        Where that fails `path` is as it was and `temporary` is gone. The name is not durable yet.
        """
        self.write_file(temporary, data, like)
        try:
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    def refuse_unless_like(self, like: FileStat) -> None:
        """Refused when this process cannot make a file with owner and group of `like`: ask before writing."""
        user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
        if user == 0 or (user == like.uid and like.gid in groups):
            return
        raise Refused(
            f"this process runs as {_user_name(user)}, but the files belong to {_owner(like)}",
            path=like.path,
            remedy=f"Run as {_user_name(like.uid)} or root",
        )

    def _open_regular(self, path: str, mode: int) -> int:
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat_bits.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "Not a regular file", path)
        except BaseException:
            os.close(fd)
            raise
        self._path_of[fd] = path
        return fd

    def _create(self, path: str, like: FileStat | None) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600 if like else 0o666)
        try:
            if like is not None:
                _make_like(fd, path, like)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
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
        METER.read_bytes += done
        return done

    def _write_some(self, fd: int, view: memoryview, position: int | None = None) -> int:
        """One call of the system, which may write less; without a position it appends."""
        return os.write(fd, view) if position is None else os.pwrite(fd, view, position)

    def _read_some(self, fd: int, view: memoryview, position: int) -> int:
        """One call of the system, which may read less."""
        return os.preadv(fd, [view], position)


LOCAL = FileSystem()


def _scan(path: str) -> list[DirEntry]:
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append(_dir_entry(entry.name, entry.stat(follow_symlinks=False)))
    return found


def _scan_names(path: str) -> list[DirName]:
    with os.scandir(path) as entries:
        return [DirName(e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries]


def _scan_sizes(path: str, suffix: str) -> Sizes:
    """By a descriptor: the kernel then need not follow the path for each file, nor Python make one."""
    sized: list[tuple[str, int, int]] = []
    regular: list[str] = []
    others: list[str] = []
    length = len(suffix)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                if not entry.is_file(follow_symlinks=False):
                    others.append(name)
                elif name[-length:] == suffix:
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    sized.append((name, facts.st_size, facts.st_mtime_ns))
                else:
                    regular.append(name)
    finally:
        os.close(fd)
    return Sizes(sized, regular, others)


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read_all(fd: int) -> bytes:
    """OSError for a file that is no small one: a sparse file has any size and takes no room but our memory."""
    chunks: list[bytes] = []
    size_bytes = os.fstat(fd).st_size
    while size_bytes <= MOST_SMALL_BYTES and (chunk := os.read(fd, 1 << 20)):
        chunks.append(chunk)
        size_bytes = max(size_bytes, len(chunks) << 20)
    if size_bytes > MOST_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"More than {MOST_SMALL_BYTES} bytes, which no such file has")
    return b"".join(chunks)


def _dir_entry(name: str, facts: os.stat_result) -> DirEntry:
    return DirEntry(
        name=name,
        is_dir=stat_bits.S_ISDIR(facts.st_mode),
        size_bytes=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        inode=facts.st_ino,
        is_regular=stat_bits.S_ISREG(facts.st_mode),
        is_symlink=stat_bits.S_ISLNK(facts.st_mode),
        uid=facts.st_uid,
        gid=facts.st_gid,
        mode=stat_bits.S_IMODE(facts.st_mode),
    )


def _file_stat(path: str, facts: os.stat_result, attributes: tuple[tuple[str, bytes], ...]) -> FileStat:
    return FileStat(
        path=path,
        size_bytes=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        uid=facts.st_uid,
        gid=facts.st_gid,
        mode=stat_bits.S_IMODE(facts.st_mode),
        inode=facts.st_ino,
        device=facts.st_dev,
        is_dir=stat_bits.S_ISDIR(facts.st_mode),
        is_regular=stat_bits.S_ISREG(facts.st_mode),
        attributes=attributes,
        links=facts.st_nlink,
    )


def _attributes(target: str | int) -> tuple[tuple[str, bytes], ...]:
    """ACL and security label of a path or descriptor, those that there are."""
    try:
        names = os.listxattr(target)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return ()
        raise
    return tuple((name, os.getxattr(target, name)) for name in KEPT_ATTRIBUTES if name in names)


def _fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def _mkdir(path: str, like: FileStat) -> None:
    os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _make_like(fd, path, like)
    except BaseException:
        os.rmdir(path)
        raise
    finally:
        os.close(fd)


def _make_like(fd: int, path: str, like: FileStat) -> None:
    """Owner first: a change of owner clears mode bits. ACL before mode: both write the group bits, alike."""
    try:
        now = os.fstat(fd)
        if (now.st_uid, now.st_gid) != (like.uid, like.gid):
            os.fchown(fd, like.uid, like.gid)
        wanted = dict(like.attributes)
        of_dir = stat_bits.S_ISDIR(now.st_mode)
        if like.is_dir and not of_dir and ACCESS_ACL in wanted:
            wanted[ACCESS_ACL] = _without_execute(wanted[ACCESS_ACL])
        present = dict(_attributes(fd))
        for name in present.keys() - wanted.keys():
            if name == ACCESS_ACL:  # a directory's default ACL gave it; a label only ever gets replaced
                os.removexattr(fd, name)
        for name, value in wanted.items():
            if present.get(name) != value:
                os.setxattr(fd, name, value)
        os.fchmod(fd, like.mode & 0o666 if like.is_dir and not of_dir else like.mode)
    except OSError as error:
        raise Refused(
            f"cannot give a new file the owner, mode and labels of {like.path}: {error.strerror}",
            path=path,
            remedy=f"Run as {_user_name(like.uid)} (the files belong to {_owner(like)}) or root",
        ) from error


def _without_execute(acl: bytes) -> bytes:
    """The kernel's form of an ACL: a version, then entries of tag, permissions and id."""
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
