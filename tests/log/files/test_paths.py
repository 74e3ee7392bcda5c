"""Links and owners: the owner of a log dir can neither redirect root's operations nor use them to obtain or give away
files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keytail.errors import KeytailError, Refused
from keytail.log.fs import LOCAL, FileStat
from keytail.log.log_dirs import survey_log_dirs

OWNER, OTHER = 52_011, 52_012
SECRET = "root:$6$secret:19000"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture(params=["openat2", "name by name"], autouse=True)
def _with_and_without_openat2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as on Linux 5.6 or later, which has openat2, and as on an older kernel."""
    if request.param == "name by name":

        def missing(*_: object) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

        monkeypatch.setattr("keytail.log.files.paths._system_call", missing)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Create a log dir with one partition and one checkpoint, and a directory `outside` with files of the same names.
    """
    for home, text in ((tmp_path / "logs", "inside"), (tmp_path / "outside", SECRET)):
        (home / "t-0").mkdir(parents=True)
        (home / "t-0" / "file").write_text(text)
        (home / "meta.properties").write_text("version=1\nnode.id=1\n")
        (home / "cleaner-offset-checkpoint").write_text("0\n0\n" if text == "inside" else SECRET)
    return tmp_path / "logs"


def give(path: Path, uid: int = OWNER) -> None:
    for item in [path, *path.rglob("*")]:
        os.chown(item, uid, uid, follow_symlinks=False)


def everything(path: Path) -> dict[str, tuple[object, ...]]:
    found = {str(item): item.lstat() for item in [path, *path.rglob("*")]}
    return {
        name: (
            facts.st_ino,
            facts.st_mode,
            facts.st_uid,
            facts.st_gid,
            facts.st_mtime_ns,
            facts.st_size,
            facts.st_nlink,
        )
        for name, facts in found.items()
    }


def as_file(path: str) -> list[Callable[[], object]]:
    """Return all operations that open a file or read its status."""
    like = FileStat(path, 0, 0, OWNER, OWNER, 0o755, 1, 1, True, False)
    return [
        lambda: LOCAL.read_bytes(path),
        lambda: LOCAL.read_at(path, 0, 5),
        lambda: LOCAL.close(LOCAL.open_write(path)),
        lambda: LOCAL.open_lock_file(path, like),
        lambda: LOCAL.set_mtime_ns(path, 1),
        lambda: LOCAL.stat(path),
        lambda: LOCAL.size(path),
    ]


def as_directory(path: str) -> list[Callable[[], object]]:
    """Return all operations on a directory, and on a name in it."""
    file, new = f"{path}/file", f"{path}/new"
    like = FileStat(path, 0, 0, OWNER, OWNER, 0o755, 1, 1, True, False)
    return [
        *as_file(file)[:3],
        *as_file(file)[4:],
        lambda: LOCAL.scan(path),
        lambda: LOCAL.scan_names(path),
        lambda: LOCAL.scan_sizes(path, "file"),
        lambda: LOCAL.fsync_dir(path),
        lambda: LOCAL.free_bytes(path),
        lambda: LOCAL.is_read_only(path),
        lambda: LOCAL.file_system_type(path),
        lambda: LOCAL.exists(file),
        lambda: LOCAL.write_file(new, b"x", like),
        lambda: LOCAL.link(file, new),
        lambda: LOCAL.rename(file, new),
        lambda: LOCAL.unlink(file),
        lambda: LOCAL.mkdir(new, like),
        lambda: LOCAL.rmdir(new),
    ]


@pytest.mark.parametrize("target", ["../../outside/t-0/file", "nowhere", "/dev/zero"])
def test_a_link_in_the_place_of_a_file_is_not_followed(target: str, log_dir: Path) -> None:
    before = everything(log_dir.parent / "outside")
    link = log_dir / "t-0" / "link"
    link.symlink_to(target)
    for act in as_file(str(link)):
        with pytest.raises(OSError, match="Symbolic link not followed") as caught:
            act()
        assert caught.value.filename == str(link)
    assert LOCAL.exists(str(link))
    assert everything(log_dir.parent / "outside") == before


def test_a_partition_directory_that_is_a_link_is_not_followed(log_dir: Path) -> None:
    outside = log_dir.parent / "outside"
    before = everything(outside)
    (log_dir / "t-1").symlink_to(outside / "t-0")
    for act in as_directory(str(log_dir / "t-1")):
        with pytest.raises(OSError, match="Symbolic link not followed") as caught:
            act()
        assert caught.value.filename == str(log_dir / "t-1")
    assert everything(outside) == before


@pytest.mark.parametrize("relative", [False, True])
def test_a_log_dir_is_reached_through_links(relative: bool, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = log_dir.parent
    (above / "disk-1").symlink_to("logs" if relative else log_dir)
    (above / "data").symlink_to(f"../{above.name}/." if relative else above)
    path = str(above / "data" / "disk-1")
    if relative:
        monkeypatch.chdir(above)
        path = "data//disk-1"
    assert sorted(entry.name for entry in LOCAL.scan(path)) == ["cleaner-offset-checkpoint", "meta.properties", "t-0"]
    assert LOCAL.stat(path).is_dir
    assert LOCAL.read_bytes(f"{path}/t-0/file") == b"inside"
    LOCAL.write_file(f"{path}/t-0/new", b"x", LOCAL.stat(f"{path}/t-0"))
    LOCAL.rename(f"{path}/t-0/new", f"{path}/t-0/newer")
    assert (log_dir / "t-0" / "newer").read_bytes() == b"x"
    assert LOCAL.stat("/").is_dir
    assert not LOCAL.exists(f"{path}/t-0/file/x")


def test_broken_and_circular_links_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name, number in (("a", errno.ELOOP), ("gone", errno.ENOENT), ("file", errno.ENOTDIR), ("no", errno.ENOENT)):
        with pytest.raises(OSError, match="while listing the directory") as caught:
            LOCAL.scan(str(tmp_path / name))
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / name))
    with pytest.raises(ValueError, match="null"):
        LOCAL.scan(f"{tmp_path}\0x")
    with pytest.raises(FileNotFoundError):
        LOCAL.open_read("")


def test_no_descriptor_is_left_open(log_dir: Path) -> None:
    (log_dir / "t-1").symlink_to(log_dir.parent / "outside" / "t-0")
    (log_dir.parent / "link").symlink_to(log_dir)
    before = os.listdir("/proc/self/fd")
    for path in (log_dir / "t-0", log_dir / "t-1", log_dir / "none", log_dir.parent / "link"):
        for act in as_directory(str(path)):
            with contextlib.suppress(OSError, KeytailError):
                act()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_a_name_that_is_not_a_regular_file_is_an_error_with_a_remedy(kind: str, log_dir: Path) -> None:
    path = log_dir / "recovery-point-offset-checkpoint"
    if kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o644)
    else:
        {"fifo": os.mkfifo, "directory": os.mkdir}[kind](path)
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    problem = facts.problems[-1]
    assert f"Not a regular file while opening the file for reading ({path})" in problem
    assert problem.endswith("move it elsewhere, then run again [not-a-regular-file]")


@pytest.mark.parametrize("link_type", ["symlink", pytest.param("hard link", marks=root_only)])
def test_a_foreign_file_in_the_place_of_a_checkpoint_is_not_quoted(link_type: str, log_dir: Path) -> None:
    checkpoint, secret = log_dir / "cleaner-offset-checkpoint", log_dir.parent / "outside" / "t-0" / "file"
    checkpoint.unlink()
    if link_type == "symlink":
        checkpoint.symlink_to(secret)
    else:
        give(log_dir)
        os.link(secret, checkpoint)
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    [problem] = facts.problems
    assert str(checkpoint) in problem
    assert "then run again" in problem.lower()
    assert "secret" not in problem


@root_only
def test_root_does_not_open_a_file_of_another_user_in_a_users_directory(log_dir: Path) -> None:
    give(log_dir)
    linked = log_dir / "t-0" / "linked"
    os.link(log_dir.parent / "outside" / "t-0" / "file", linked)
    before = linked.stat()
    for act in as_file(str(linked))[:5]:
        with pytest.raises(OSError, match="File and directory have different owners") as caught:
            act()
        assert caught.value.filename == str(linked)
    assert linked.stat().st_mtime_ns == before.st_mtime_ns
    os.chown(linked, OWNER, OWNER)
    assert LOCAL.read_bytes(str(linked)) == SECRET.encode()


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """Create a directory that other users can enter; they cannot enter pytest's own directories."""
    with tempfile.TemporaryDirectory(prefix="keytail-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@root_only
@pytest.mark.parametrize(
    ("of_link", "of_directory", "user", "is_followed"),
    [
        (0, 0, 0, True),
        (OWNER, OWNER, 0, False),
        (0, OWNER, 0, False),  # the owner of the directory may have moved the link there
        (OWNER, 0, 0, False),
        (OWNER, OWNER, OWNER, True),
        (0, 0, OWNER, True),
        (OWNER, OWNER, OTHER, True),
        (OWNER, 0, OTHER, False),  # Linux follows the same rule in /tmp
    ],
)
def test_only_links_of_trusted_owners_are_followed(
    of_link: int, of_directory: int, user: int, is_followed: bool, open_dir: Path
) -> None:
    home, logs = open_dir / "home", open_dir / "logs"
    home.mkdir()
    logs.mkdir()
    (logs / "meta.properties").touch()
    (home / "link").symlink_to(logs)
    os.chown(home / "link", of_link, of_link, follow_symlinks=False)
    os.chown(home, of_directory, of_directory)
    with acting_as(user):
        if is_followed:
            assert [entry.name for entry in LOCAL.scan(str(home / "link"))] == ["meta.properties"]
        else:
            with pytest.raises(OSError, match="Symbolic link not followed"):
                LOCAL.scan(str(home / "link"))


@pytest.mark.parametrize("mode", [0o6755, 0o4711, 0o1777, 0o2775])
def test_new_files_and_directories_have_no_special_bits(mode: int, tmp_path: Path) -> None:
    old, directory = tmp_path / "old", tmp_path / "directory"
    old.touch()
    directory.mkdir()
    for item in (old, directory):
        item.chmod(mode)
    LOCAL.write_file(str(tmp_path / "new"), b"", LOCAL.stat(str(old)))
    LOCAL.mkdir(str(tmp_path / "made"), LOCAL.stat(str(directory)))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode & 0o666
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == mode & 0o777


@root_only
@pytest.mark.parametrize("of_like", [0, OTHER])
def test_root_gives_a_file_only_to_the_owner_of_its_directory(of_like: int, log_dir: Path) -> None:
    give(log_dir)
    like = FileStat("x", 0, 0, of_like, of_like, 0o640, 1, 1, False, True, (("security.SMACK64", b"other"),))
    new = log_dir / "t-0" / "new"
    LOCAL.write_file(str(new), b"", like)
    assert (new.stat().st_uid, new.stat().st_gid, stat.S_IMODE(new.stat().st_mode)) == (OWNER, OWNER, 0o640)


@root_only
@pytest.mark.parametrize("instead", ["link", "full", "another user's", "file", "nothing"])
def test_a_directory_that_is_exchanged_during_its_creation_keeps_its_owner(
    instead: str, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(log_dir)
    outside, new, full = log_dir.parent / "outside", log_dir / "new", log_dir / "full"
    (full / "inside").mkdir(parents=True)
    before = everything(outside)
    mkdir = os.mkdir

    def exchanged(name: str, mode: int = 0o777, **where: int) -> None:
        mkdir(name, mode, **where)
        new.rename(log_dir / "away")
        if instead == "link":
            new.symlink_to(outside)
        elif instead == "full":
            full.rename(new)
        elif instead == "another user's":
            mkdir(new, 0o700)
            os.chown(new, OTHER, OTHER)
        elif instead == "file":
            new.touch()

    monkeypatch.setattr(os, "mkdir", exchanged)
    with pytest.raises(Refused, match=r"\[directory-replaced\]"):
        LOCAL.mkdir(str(new), LOCAL.stat(str(log_dir)))
    assert everything(outside) == before
    assert OWNER not in (item.stat().st_uid for item in (log_dir / "away", new, full) if item.exists())


class Exchanging:
    """Exchanges two names repeatedly, in a thread, as the owner of a log dir could at any time."""

    def __init__(self, item: Path, other: Path) -> None:
        self._names = os.fsencode(item), os.fsencode(other)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def _run(self) -> None:
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        while not self._is_over.is_set():
            assert exchange(-100, self._names[0], -100, self._names[1], 2) == 0, os.strerror(ctypes.get_errno())
            self.count += 1

    def __enter__(self) -> Exchanging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.long
@root_only
@pytest.mark.parametrize("which", ["partition directory", "directory above", "file"])
def test_nothing_outside_is_changed_or_read_while_names_are_exchanged(which: str, log_dir: Path) -> None:
    """The owner of a log dir repeatedly exchanges one of its names with a link to a file of the same name outside."""
    outside, link = log_dir.parent / "outside", log_dir / "link"
    real = path = log_dir / "t-0"
    target = outside / "t-0"
    if which == "directory above":
        real, target = log_dir / "home", outside
        real.mkdir()
        path = path.rename(real / "t-0")
    elif which == "file":
        real, link, target = path / "file", path / "link", target / "file"
    give(log_dir)
    link.symlink_to(target)
    os.chown(link, OWNER, OWNER, follow_symlinks=False)
    before = everything(outside)
    inodes = {facts[0] for facts in before.values()}
    like = FileStat("x", 0, 0, OWNER, OWNER, 0o755, 1, 1, True, False)
    file, new, made = (f"{path}/{name}" for name in ("file", "new", "made"))
    acts: list[Callable[[], object]] = [
        lambda: LOCAL.read_bytes(file),
        lambda: LOCAL.stat(file),
        lambda: LOCAL.set_mtime_ns(file, 10**18),
        lambda: LOCAL.close(LOCAL.open_write(file)),
        lambda: LOCAL.open_lock_file(file, like),
    ]
    if which != "file":
        acts += [
            lambda: LOCAL.stat(str(path)),
            lambda: LOCAL.scan(str(path)),
            lambda: LOCAL.write_file(new, b"inside", like),
            lambda: LOCAL.rename(new, file),
            lambda: LOCAL.mkdir(made, like),
            lambda: LOCAL.rmdir(made),
            lambda: LOCAL.link(file, made),
            lambda: LOCAL.unlink(made),
        ]
    done = refused = 0
    with Exchanging(real, link) as attack:
        while min(done, refused) < 500 and done + refused < 2_000_000:
            for act in acts:
                try:
                    found = act()
                except OSError as error:
                    refused += "Symbolic link" in str(error)
                    continue
                done += 1
                entries = found if isinstance(found, list) else [found]
                assert not inodes & {getattr(entry, "inode", None) for entry in entries}
                assert not isinstance(found, bytes) or found == b"inside"
                if isinstance(found, tuple):
                    LOCAL.close(found[0])
    assert everything(outside) == before
    assert min(done, refused) >= 500, (done, refused, attack.count)
