"""The one module that touches log dirs: every read, and every operation that changes something.

Every path is resolved to a descriptor of its directory, without following links below a log dir (`paths.py`), and its
last name is then used relative to that. So whoever owns a log dir cannot redirect an operation of root to another
place. What is created gets the owner of its directory, and never a mode with more than read and write.

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
import re
import stat as stat_bits
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from keytail.acting_user import current, is_another
from keytail.errors import WRITTEN_TO, ForeignFile, NotRegular, Refused, SymbolicLink
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
from keytail.log.meter import METER
from keytail.log.paths import DIRECTORY, READABLE_DIRECTORY, open_directory, split, symbolic_link

T = TypeVar("T")

# Of a file that is read whole. An index of 2^31 bytes of log, an entry each 100 bytes, has half of that.
MOST_SMALL_BYTES = 1 << 29

# Of `link`: the file system has no hard links, or no more of this file; or it joins several, and has none between them.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

# Without O_NONBLOCK the opening of a FIFO waits for the other end.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_READ_AND_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW

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
            if isinstance(subject, int):
                error.filename = error.filename or self._path_of.get(subject)
            elif not isinstance(error, SymbolicLink):  # which says where the link is
                error.filename = subject  # the system was given a descriptor and the last name
                if error.filename2 is not None:
                    error.filename2 = arguments[1]
            if error.strerror:
                error.strerror = f"{error.strerror} while {_DOING[operation]}"
            raise

    # Reading

    def scan(self, path: str) -> list[DirEntry]:
        """The names in a directory, unsorted; names that vanish meanwhile are left out."""
        return self._look("scan", (path,), lambda: _of_directory(path, scan, READABLE_DIRECTORY))

    def scan_names(self, path: str) -> list[DirName]:
        """The names in a directory, unsorted. No file is looked at, where the file system tells what a name is of."""
        return self._look("scan", (path,), lambda: _of_directory(path, scan_names, READABLE_DIRECTORY))

    def scan_sizes(self, path: str, suffix: str) -> Sizes:
        """The names in a directory, with size and modification time of regular files that end with `suffix` only.

        A fourth of the cost of `scan` where most names are of other files. Names that vanish meanwhile are left out.
        """
        return self._look(
            "scan", (path,), lambda: _of_directory(path, lambda fd: scan_sizes(fd, suffix), READABLE_DIRECTORY)
        )

    def stat(self, path: str) -> FileStat:
        """Facts of a file or directory; SymbolicLink for a link, unless to a directory and to be followed."""
        return self._look("stat", (path,), lambda: _in_directory(path, lambda at, name: _stat(path, at, name)))

    def size(self, path: str) -> int:
        """Bytes of a file, and no more of it: half of the cost of `stat`. SymbolicLink for a link."""
        return self._look("stat", (path,), lambda: _size(path))

    def exists(self, path: str) -> bool:
        """Whether there is such a name, whatever it leads to. An error that says neither yes nor no is raised."""
        return self._look("exists", (path,), lambda: _exists(path))

    def open_read(self, path: str) -> int:
        """A descriptor of a regular file; never blocks on a FIFO.

        SymbolicLink and NotRegular for anything else, ForeignFile where root would read another user's file for the
        owner of the directory.
        """
        return self._look("open_read", (path,), lambda: self._open_regular(path, _READ))

    def open_write(self, path: str) -> int:
        """A descriptor of a regular file that exists, for `write_at` and `truncate`; reads as well."""
        return self._look("open_write", (path,), lambda: self._open_regular(path, _READ_AND_WRITE))

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
        return self._look("fd_stat", (fd,), lambda: file_stat(self._path_of.get(fd, ""), os.fstat(fd), ()))

    def fd_size(self, fd: int) -> int:
        """Like `size`, of an open descriptor."""
        return self._look("fd_stat", (fd,), lambda: os.fstat(fd).st_size)

    def close(self, fd: int) -> None:
        """The descriptor is gone afterwards, whatever is raised."""
        path = self._path_of.pop(fd, None)
        self._look("close", (path,), lambda: os.close(fd))

    def free_bytes(self, path: str) -> int:
        """What an unprivileged process may still write on the file system of `path`."""
        facts = self._look("free_bytes", (path,), lambda: _of_directory(path, os.statvfs))
        return facts.f_bavail * facts.f_frsize

    def is_read_only(self, path: str) -> bool:
        """Whether the file system of `path` is mounted so."""
        return bool(self._look("is_read_only", (path,), lambda: _of_directory(path, os.statvfs)).f_flag & os.ST_RDONLY)

    def file_system_type(self, path: str) -> str:
        """What the kernel calls the file system that holds `path` ("ext4", "nfs4"); "" where it does not tell."""
        device, mount_of_it = _of_directory(path, lambda fd: (os.fstat(fd).st_dev, self._proc(f"fdinfo/{fd}")))
        number = f"{os.major(device)}:{os.minor(device)}"
        found = re.search(r"^mnt_id:\s*(\d+)$", mount_of_it, re.MULTILINE)
        for line in self._proc("mountinfo").splitlines():
            mount, _, kind = line.partition(" - ")
            mount_id, _, device_number, *_ = mount.split(" ")
            # A subvolume of btrfs has a device number of its own, which no mount has.
            if device_number == number or (found is not None and mount_id == found[1]):
                return kind.split(" ")[0]
        return ""

    def _proc(self, name: str) -> str:
        """What the kernel says of this process; empty where it does not."""
        try:
            return self.read_bytes(f"/proc/self/{name}").decode(errors="surrogateescape")
        except OSError:
            return ""

    # Changing

    def create(self, path: str, like: FileStat | None) -> int:
        """A new empty file, open for appending; FileExistsError when the name is taken.

        It takes owner, group, mode and access ACL (both without execute bits) and security label of `like`; Refused,
        with nothing left behind, when that is not allowed. In a user's directory root gives a file to that user
        only: of a `like` of another user the mode is taken, and nothing else.
        """
        return self._change("create", (path,), lambda: self._create(path, like))

    def mkdir(self, path: str, like: FileStat) -> None:
        """A new directory with owner, group, mode, access ACL and security label of the directory `like`.

        Refused where, before it had its owner, something else took its name.
        """
        self._change("mkdir", (path,), lambda: _in_directory(path, lambda at, name: _mkdir(path, at, name, like)))

    def open_lock_file(self, path: str, like: FileStat) -> tuple[int, bool]:
        """A read-write descriptor of a lock file, and whether this call made the file."""
        try:
            return self.open_write(path), False
        except FileNotFoundError:
            return self.create(path, like), True

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
        self._change("fsync_dir", (path,), lambda: _of_directory(path, os.fsync, READABLE_DIRECTORY))

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`."""
        self._change("rename", (source, target), lambda: _rename(source, target))

    def link(self, source: str, target: str) -> None:
        """A second name of a file, on the same file system; FileExistsError when the name is taken."""
        self._change("link", (source, target), lambda: _link(source, target))

    def unlink(self, path: str) -> None:
        self._change("unlink", (path,), lambda: _in_directory(path, lambda at, name: os.unlink(name, dir_fd=at)))

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self._change("rmdir", (path,), lambda: _in_directory(path, lambda at, name: os.rmdir(name, dir_fd=at)))

    def set_mtime_ns(self, path: str, mtime_ns: int) -> None:
        """Of a regular file, as `open_read` opens it."""
        self._change("set_mtime_ns", (path, mtime_ns), lambda: _set_mtime_ns(path, mtime_ns))

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
        directory = like.path if like.is_dir else split(like.path)[0]
        if is_another() and like.uid == 0 and os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            return
        if is_another():
            raise Refused(
                f"started as root, keytail works as {current()}, but the files belong to {_owner(like)}",
                path=like.path,
                remedy="Give the files to the owner of the log dir and to a group of that user (chown)",
            )
        raise Refused(
            f"this process runs as {_user_name(user)}, but the files belong to {_owner(like)}",
            path=like.path,
            remedy=f"Run as {_user_name(like.uid)} or root",
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
        METER.read_bytes += done
        return done

    def _write_some(self, fd: int, view: memoryview, position: int | None = None) -> int:
        """One call of the system, which may write less; without a position it appends."""
        return os.write(fd, view) if position is None else os.pwrite(fd, view, position)

    def _read_some(self, fd: int, view: memoryview, position: int) -> int:
        """One call of the system, which may read less."""
        return os.preadv(fd, [view], position)


LOCAL = FileSystem()


def _in_directory(path: str, act: Callable[[int, str], T]) -> T:
    """What `act` gives of a descriptor of the directory in which the path's last name is, and that name."""
    directory, name = split(path)
    at = open_directory(directory)
    try:
        return act(at, name)
    finally:
        os.close(at)


def _of_directory(path: str, act: Callable[[int], T], flags: int = DIRECTORY) -> T:
    """What `act` gives of a descriptor of this directory."""
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
    """Through /proc, since a descriptor that is good for extended attributes needs the right to read."""
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
                raise ForeignFile(errno.EPERM, "The file belongs to another user than its directory", path)
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
    """OSError for a file that is no small one: a sparse file has any size and takes no room but our memory."""
    chunks: list[bytes] = []
    size_bytes = os.fstat(fd).st_size
    while size_bytes <= MOST_SMALL_BYTES and (chunk := os.read(fd, 1 << 20)):
        chunks.append(chunk)
        size_bytes = max(size_bytes, len(chunks) << 20)
    if size_bytes > MOST_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"More than {MOST_SMALL_BYTES} bytes, which no such file has")
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
    """Root gives what it creates in a user's directory to that user, never to a third one or with a third one's labels.

    In a directory of root only root can have put the file that `like` is of. A process that root started and that works
    as another user makes all files for that user, also beside files of root's.
    """
    if is_another() and like.uid == 0:
        return replace(like, uid=os.geteuid(), gid=os.getegid(), attributes=())
    if os.geteuid() != 0 or directory.st_uid in (0, like.uid):
        return like
    return replace(like, uid=directory.st_uid, gid=directory.st_gid, attributes=())


def _mkdir(path: str, at: int, name: str, like: FileStat) -> None:
    """Whoever owns the directory can put another one in the place of the new one: only an empty one of ours is given
    away."""
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
    return Refused("a new directory was exchanged for something else", path=path, remedy=WRITTEN_TO)


def _make_like(fd: int, path: str, like: FileStat) -> None:
    """Owner first: a change of owner clears mode bits. ACL before mode: both write the group bits, alike."""
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
            if name == ACCESS_ACL:  # a directory's default ACL gave it; a label only ever gets replaced
                os.removexattr(fd, name)
        for name, value in wanted.items():
            if present.get(name) != value:
                os.setxattr(fd, name, value)
        os.fchmod(fd, like.mode & (0o777 if of_dir else 0o666))
    except OSError as error:
        raise Refused(
            f"cannot give a new file the owner, mode and labels of {like.path}: {error.strerror}",
            path=path,
            remedy=f"Run as {_user_name(like.uid)} (the files belong to {_owner(like)}) or root. Started as root, "
            "keytail works as the owner of the log dir: the files must belong to that user and a group of it",
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
