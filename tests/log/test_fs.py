"""The file system: complete reads and writes, errors with paths, and new files with the attributes of the replaced
ones.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keytail.errors import Refused, SymbolicLink
from keytail.log import fs as module
from keytail.log.files.attributes import ACCESS_ACL
from keytail.log.fs import LOCAL, FileStat, FileSystem

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def test_scan_returns_the_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    found = {entry.name: entry for entry in LOCAL.scan(str(tmp_path))}
    assert [(e.is_dir, e.is_regular, e.is_symlink) for _, e in sorted(found.items())] == [
        (True, False, False),
        (False, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert found["file"].size_bytes == 3
    assert found["file"].mtime_ns == os.stat(tmp_path / "file").st_mtime_ns


def test_reads_fill_the_buffer_or_end_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    fd = LOCAL.open_read(str(path))
    buffer = np.zeros(40, np.uint8)
    assert LOCAL.read_into(fd, buffer, 10) == 40
    assert bytes(buffer) == bytes(range(10, 50))
    assert LOCAL.read_into(fd, buffer, 90) == 10
    assert LOCAL.read_into(fd, buffer, 100) == 0
    assert LOCAL.read_into(fd, np.zeros(0, np.uint8), 0) == 0
    assert LOCAL.fd_stat(fd).size_bytes == 100
    LOCAL.close(fd)
    assert LOCAL.read_at(str(path), 98, 10) == b"bc"
    assert LOCAL.read_bytes(str(path)) == bytes(range(100))


def test_short_system_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:7]))
    path = str(tmp_path / "file")
    fd = LOCAL.create(path, None)
    assert LOCAL.write(fd, np.arange(25, dtype=np.uint32)) == 100
    LOCAL.close(fd)
    fd, buffer = LOCAL.open_read(path), bytearray(100)
    assert LOCAL.read_into(fd, buffer, 0) == 100
    LOCAL.close(fd)
    assert bytes(buffer) == np.arange(25, dtype=np.uint32).tobytes()


def test_a_name_whose_lookup_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert LOCAL.exists(str(tmp_path / "file"))
    assert not LOCAL.exists(str(tmp_path / "none"))
    assert not LOCAL.exists(str(tmp_path / "file" / "none"))

    def broken(name: str, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", name)

    monkeypatch.setattr(os, "stat", broken)
    with pytest.raises(OSError, match="Input/output error while checking whether it exists"):
        LOCAL.exists(str(tmp_path / "none"))


def test_scan_names_returns_directories_and_links_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "directory").mkdir()
    (tmp_path / "to-directory").symlink_to("directory")
    (tmp_path / "to-nowhere").symlink_to("nowhere")
    assert sorted(LOCAL.scan_names(str(tmp_path))) == [
        ("directory", True, False), ("file", False, False), ("to-directory", False, True), ("to-nowhere", False, True),
    ]  # fmt: skip
    assert LOCAL.size(str(tmp_path / "file")) == 1
    with pytest.raises(SymbolicLink, match="while reading attributes"):
        LOCAL.size(str(tmp_path / "to-nowhere"))


def test_a_file_that_is_truncated_while_it_is_read_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    read = os.read

    def cut(fd: int, count: int) -> bytes:
        os.truncate(path, 60)
        return read(fd, count)

    assert LOCAL.read_bytes(str(path), whole=True) == bytes(100)
    monkeypatch.setattr(os, "read", cut)
    with pytest.raises(OSError, match="Only 60 of 100 bytes could be read"):
        LOCAL.read_bytes(str(path), whole=True)
    assert LOCAL.read_bytes(str(path)) == bytes(60)


@pytest.mark.parametrize("failing", ["create", "write", "fsync", "rename"])
def test_a_file_is_replaced_completely_or_unchanged(failing: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    class Failing(FileSystem):
        def _change(self, operation, arguments, action):
            def fail():
                raise OSError(errno.ENOSPC, "No space left on device")

            return super()._change(operation, arguments, fail if operation == failing else action)

    with pytest.raises(OSError, match="No space left on device while"):
        Failing().put_file(str(tmp_path / "file"), b"new", None, str(tmp_path / "file.tmp"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
    LOCAL.put_file(str(tmp_path / "file"), b"new", None, str(tmp_path / "file.tmp"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize("interrupted", ["write", "fsync", "rename"])
def test_a_signal_leaves_no_temporary_file(interrupted: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    class Interrupted(FileSystem):
        def _change(self, operation, arguments, action):
            if operation == interrupted:
                raise KeyboardInterrupt
            return super()._change(operation, arguments, action)

    with pytest.raises(KeyboardInterrupt):
        Interrupted().put_file(str(tmp_path / "file"), b"new", None, str(tmp_path / "file.tmp"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_fifo_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="Not a regular file") as caught:
        LOCAL.open_read(str(tmp_path / "fifo"))
    assert caught.value.filename == str(tmp_path / "fifo")


def test_errors_of_descriptors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    fd = LOCAL.create(str(tmp_path / "file"), None)
    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "fsync", full)
    for act in (
        lambda: LOCAL.write(fd, b"x"),
        lambda: LOCAL.fsync(fd),
        lambda: LOCAL.fsync_dir(str(tmp_path)),
    ):
        with pytest.raises(OSError, match=str(tmp_path)):
            act()
    LOCAL.close(fd)


def test_every_operation_has_a_text_for_its_errors() -> None:
    operations = re.findall(r"self\._(?:look|change)\(\s*\"(\w+)\"", Path(module.__file__).read_text())
    assert set(operations) == set(module._DESCRIPTIONS)


def test_create_refuses_an_existing_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError, match="file"):
        LOCAL.create(str(tmp_path / "file"), None)
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o660, 0o444])
def test_a_new_file_has_the_mode_of_the_old_file(mode: int, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch()
    old.chmod(mode)
    umask = os.umask(0o077)
    try:
        LOCAL.write_file(str(tmp_path / "new"), b"data", LOCAL.stat(str(old)))
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == mode
    assert (tmp_path / "new").read_bytes() == b"data"


def test_a_file_with_the_attributes_of_a_directory_is_not_executable(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(tmp_path)))
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o640


@root_only
def test_a_new_file_has_the_owner_of_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch()
    os.chown(old, 1234, 4321)
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(old)))
    made = (tmp_path / "new").stat()
    assert (made.st_uid, made.st_gid) == (1234, 4321)


def _acl(*entries: tuple[int, int, int]) -> bytes:
    """Encode an ACL in the format of the kernel: tag, permissions, id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


USER_OBJ, USER, GROUP_OBJ, MASK, OTHER, NOBODY = 1, 2, 4, 16, 32, 0xFFFFFFFF
SHARED = _acl(
    (USER_OBJ, 6, NOBODY), (USER, 6, 1234), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 0, NOBODY)
)


def _set_acl(path: Path, value: bytes, name: str = ACCESS_ACL) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            pytest.skip(f"the file system of {path} does not support ACLs")
        raise


def test_a_new_file_has_the_acl_of_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch()
    _set_acl(old, SHARED)
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(old)))
    assert os.getxattr(tmp_path / "new", ACCESS_ACL) == SHARED
    assert (tmp_path / "new").stat().st_mode == old.stat().st_mode


def test_a_directorys_default_acl_is_not_added(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch()
    _set_acl(tmp_path, SHARED, "system.posix_acl_default")
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(old)))
    assert ACCESS_ACL not in os.listxattr(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == old.stat().st_mode


def test_the_acl_of_a_directory_is_copied_without_execute(tmp_path: Path) -> None:
    entries = (
        (USER_OBJ, 7, NOBODY),
        (USER, 7, 1234),
        (GROUP_OBJ, 5, NOBODY),
        (MASK, 7, NOBODY),
        (OTHER, 1, NOBODY),
    )
    _set_acl(tmp_path, _acl(*entries))
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(tmp_path)))
    wanted = _acl(*((tag, bits & 6, user) for tag, bits, user in entries))
    assert os.getxattr(tmp_path / "new", ACCESS_ACL) == wanted


@root_only
def test_another_user_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    (log_dir / "old").touch()
    os.chown(log_dir / "old", 1234, 4321)
    log_dir.chmod(0o777)
    script = f"""
import os
from keytail.log.fs import LOCAL
from keytail.errors import Refused
like = LOCAL.stat({str(log_dir / "old")!r})
os.chdir({str(log_dir)!r})  # the directories above may be closed to others
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for act in (lambda: LOCAL.refuse_unless_like(like), lambda: LOCAL.create("new", like)):
    try:
        act()
    except Refused as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert len(lines) == 2, ran.stderr
    assert all("Run as user id 1234" in line for line in lines)
    assert os.listdir(log_dir) == ["old"]


def test_refuse_unless_like_accepts_the_owner_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    like = FileStat("/x", 0, 0, 77, 78, 0o644, 1, 1, False, True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    LOCAL.refuse_unless_like(like)
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    monkeypatch.setattr(os, "getgroups", lambda: [78])
    LOCAL.refuse_unless_like(like)
    monkeypatch.setattr(os, "getgroups", lambda: [79])
    monkeypatch.setattr(os, "getegid", lambda: 79)
    with pytest.raises(Refused, match=r"user id 77, which is not in the group id 78 .*chgrp"):
        LOCAL.refuse_unless_like(like)


def test_writing_continues_at_the_end_of_a_truncated_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    fd = LOCAL.create(path, None)
    LOCAL.write(fd, b"abcdef")
    LOCAL.truncate(fd, 2)
    LOCAL.write(fd, b"xy")
    LOCAL.close(fd)
    assert LOCAL.read_bytes(path) == b"abxy"
    fd = LOCAL.open_read(path)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        LOCAL.truncate(fd, 0)
    assert caught.value.filename == path
    LOCAL.close(fd)


def test_bytes_are_written_at_their_position_and_visible_in_a_memory_map(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abcdef")
    fd = LOCAL.open_write(str(path))
    view = LOCAL.map_read(fd, 6)
    assert LOCAL.write_at(fd, np.frombuffer(b"XY", np.uint8), 2) == 2
    assert view[:] == b"abXYef"
    with pytest.raises(TypeError):
        view[0] = 1  # type: ignore[index]
    LOCAL.truncate(fd, 8)
    LOCAL.close(fd)
    assert view[2:4] == b"XY"
    assert path.read_bytes() == b"abXYef\0\0"
    with pytest.raises(OSError, match="Not a regular file"):
        LOCAL.open_write("/dev/null")
    assert not (tmp_path / "b").exists()
    with pytest.raises(FileNotFoundError):
        LOCAL.open_write(str(tmp_path / "b"))


def test_every_change_passes_the_hook(tmp_path: Path) -> None:
    seen = []

    class Watched(FileSystem):
        def _change(self, operation, arguments, action):
            seen.append(operation)
            return action()

    fs, path = Watched(), str(tmp_path / "a")
    fs.write_file(path, b"x", None)
    fs.set_mtime_ns(path, 10**18)
    fd = fs.create(path + "c", None)
    fs.truncate(fd, 0)
    fs.close(fd)
    fd = fs.open_write(path + "c")
    fs.write_at(fd, b"y", 0)
    fs.close(fd)
    fs.unlink(path + "c")
    fs.rename(path, path + "b")
    fs.fsync_dir(str(tmp_path))
    fs.unlink(path + "b")
    fs.close(fs.open_lock_file(path, fs.stat(str(tmp_path)))[0])
    assert seen == [
        *("create", "write", "fsync", "set_mtime_ns"),
        *("create", "truncate", "write_at", "unlink"),
        *("rename", "fsync_dir", "unlink", "create"),
    ]


def test_the_type_of_a_subvolume_is_that_of_its_mount(tmp_path: Path) -> None:
    """A subvolume of btrfs has its own device number, so its type is found only by its mount id."""

    class Mounted(FileSystem):
        def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
            if path == "/proc/self/mountinfo":
                return b"7 1 0:9999 / / rw - nfs4 host:/ rw\n71 1 0:9998 /sub /data rw shared:1 - btrfs /dev/sda rw\n"
            assert path.startswith("/proc/self/fdinfo/")
            return b"pos:\t0\nflags:\t012000000\nmnt_id:\t71\nino:\t256\n"

    assert Mounted().file_system_type(str(tmp_path)) == "btrfs"


def test_the_type_of_a_file_system_is_the_name_that_the_kernel_uses(tmp_path: Path) -> None:
    assert LOCAL.file_system_type("/proc") == "proc"
    reported = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=True)
    if reported.stdout.strip() == "tmpfs":
        assert LOCAL.file_system_type("/dev/shm") == "tmpfs"
    assert LOCAL.file_system_type(str(tmp_path)) not in ("proc", "")
    assert LOCAL.free_bytes(str(tmp_path)) > 0
