"""Operations on existing files and directories, for `log/fs.py`."""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Callable
from typing import TypeVar

from keytail.errors import ForeignFile, NotRegular
from keytail.log.files.attributes import FileStat, attributes_of, file_stat
from keytail.log.files.paths import DIRECTORY, open_directory, split, symbolic_link

T = TypeVar("T")

# Limit for a file that is read as a whole. The index of a log of 2^31 bytes with an entry every 100 bytes is less than
# half as large as this limit.
MAX_SMALL_BYTES = 1 << 29

# Without O_NONBLOCK, opening a FIFO waits for the other end.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
READ_AND_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def in_directory(path: str, act: Callable[[int, str], T]) -> T:
    """Call `act` with a descriptor of the directory that contains `path`, and the last name of `path`; return the
    result of `act`."""
    directory, name = split(path)
    at = open_directory(directory)
    try:
        return act(at, name)
    finally:
        os.close(at)


def of_directory(path: str, act: Callable[[int], T], flags: int = DIRECTORY) -> T:
    """Call `act` with a descriptor of the directory `path`; return the result of `act`."""
    fd = open_directory(path, flags)
    try:
        return act(fd)
    finally:
        os.close(fd)


def exists(path: str) -> bool:
    try:
        in_directory(path, lambda at, name: os.stat(name, dir_fd=at, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def stat(path: str) -> FileStat:
    return in_directory(path, lambda at, name: _stat(path, at, name))


def _stat(path: str, at: int, name: str) -> FileStat:
    """Return the attributes of `path`, extended attributes through /proc: a descriptor that can be asked for these
    directly needs read permission."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        facts = os.fstat(fd)
        if not stat_bits.S_ISLNK(facts.st_mode):
            return file_stat(path, facts, attributes_of(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)
    try:
        return of_directory(path, lambda fd: file_stat(path, os.fstat(fd), attributes_of(f"/proc/self/fd/{fd}")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise symbolic_link(path) from error


def size(path: str) -> int:
    directory, name = split(path)
    at = open_directory(directory)
    try:
        facts = os.stat(name, dir_fd=at, follow_symlinks=False)
    finally:
        os.close(at)
    if stat_bits.S_ISLNK(facts.st_mode):
        raise symbolic_link(path)
    return facts.st_size


def unreadable(fd: int) -> list[str]:
    """Return the names of the regular files in the open directory that may not be read, sorted."""
    with os.scandir(fd) as entries:
        closed = [entry for entry in entries if not os.access(entry.name, os.R_OK, dir_fd=fd, effective_ids=True)]
        # A name that has just been removed, or a dangling link, is also not accessible, but is not reported.
        return sorted(entry.name for entry in closed if entry.is_file(follow_symlinks=False) and _is_there(fd, entry))


def _is_there(fd: int, entry: os.DirEntry[str]) -> bool:
    try:
        os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_regular(path: str, flags: int) -> int:
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
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, or a directory opened for writing
            raise _not_regular(path) from error
        raise
    finally:
        os.close(at)


def _not_regular(path: str) -> NotRegular:
    return NotRegular(errno.EINVAL, "Not a regular file", path)


def set_mtime_ns(path: str, mtime_ns: int) -> None:
    fd = open_regular(path, READ)
    try:
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def _in_two_directories(source: str, target: str, act: Callable[[int, str, int, str], T]) -> T:
    """Call `act` with a descriptor of the directory and the last name of each path; return the result of `act`. A
    directory that contains both paths is opened once."""
    (directory, name), (new_directory, new_name) = split(source), split(target)
    if directory == new_directory:
        return in_directory(source, lambda at, _: act(at, name, at, new_name))
    return in_directory(source, lambda at, _: in_directory(target, lambda to, _: act(at, name, to, new_name)))


def rename(source: str, target: str) -> None:
    _in_two_directories(
        source, target, lambda at, name, to, new_name: os.replace(name, new_name, src_dir_fd=at, dst_dir_fd=to)
    )


def link(source: str, target: str) -> None:
    _in_two_directories(
        source,
        target,
        lambda at, name, to, new_name: os.link(
            name, new_name, src_dir_fd=at, dst_dir_fd=to, follow_symlinks=False
        ),
    )


def read_all(fd: int) -> bytes:
    """Return the whole contents of an open file. Raises OSError if the file has more than MAX_SMALL_BYTES: a sparse
    file needs no disk space, but could fill the memory."""
    portions: list[bytes] = []
    size_bytes = os.fstat(fd).st_size
    while size_bytes <= MAX_SMALL_BYTES and (portion := os.read(fd, 1 << 20)):
        portions.append(portion)
        size_bytes = max(size_bytes, len(portions) << 20)
    if size_bytes > MAX_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"File is larger than {MAX_SMALL_BYTES} bytes, the maximum for a file of this kind")
    return b"".join(portions)
