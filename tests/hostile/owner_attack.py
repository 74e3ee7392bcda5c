"""Attacks by the owner of a log dir on a keytail process that root has started.

The attacker is a process of that user. It creates links, replaces files and directories by links and back (by atomic
exchange), edits manifests of backups and records of preparations, and replaces new files.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = 52_001
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 0x40000  # CLONE_NEWNS, MS_REC, MS_PRIVATE
_IN_ACCESS, _IN_OPEN, _IN_CLOEXEC, _IN_NONBLOCK = 0x1, 0x20, 0o2000000, 0o4000

# Names that keytail or a broker creates in a log dir or a partition directory, or looks for there.
NAMES = (
    ".lock", "cleaner-offset-checkpoint", "cleaner-offset-checkpoint.tmp", "recovery-point-offset-checkpoint",
    "replication-offset-checkpoint.tmp", "log-start-offset-checkpoint", "log-start-offset-checkpoint.tmp",
    "meta.properties", ".kafka_cleanshutdown",
)  # fmt: skip
OF_PARTITION = (
    "00000000000000000000.log.swap", "00000000000000000000.log.clean", "00000000000000000000.log.cleaned",
    "00000000000000000000.log.deleted", "00000000000000000000.index", "00000000000000000000.timeindex",
    "00000000000000000000.txnindex", "leader-epoch-checkpoint", "leader-epoch-checkpoint.tmp", "partition.metadata",
    "00000000000000000150.snapshot",
)  # fmt: skip


@contextmanager
def invisible_to_others(folder: Path) -> Iterator[None]:
    """Mount an empty tmpfs on `folder`, which only this thread and the processes that it starts can see: a process that
    reads all files of the machine would be recorded by `Watch`. Only root may call this. The working directory remains.
    """
    here, outer = os.getcwd(), os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.unshare(_NEW_MOUNTS))
        try:
            _check(_LIBC.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None))
            _check(_LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"mode=755"))
            yield
        finally:
            _check(_LIBC.setns(outer, _NEW_MOUNTS))
            os.chdir(here)
    finally:
        os.close(outer)


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def exchange(item: Path, other: Path) -> None:
    """Exchange two names atomically. Raises OSError if one of them does not exist."""
    if _LIBC.renameat2(_HERE, os.fsencode(item), _HERE, os.fsencode(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(item))


class Attacker:
    """A forked process of `OWNER` that attacks until it is ended."""

    def __init__(self, seed: str, log_dir: Path, backups: Path, outside: list[Path]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setgroups([])
                os.setresgid(OWNER, OWNER, OWNER)
                os.setresuid(OWNER, OWNER, OWNER)
                attack(random.Random(seed), log_dir, backups, outside)
            finally:
                os._exit(1)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def attack(rng: random.Random, log_dir: Path, backups: Path, outside: list[Path]) -> None:
    moves: list[Callable[[], None]] = [
        lambda: _swap_directory(rng, log_dir, outside),
        lambda: _swap_file(rng, log_dir, outside),
        lambda: _plant(rng, log_dir, outside),
        lambda: _replace_a_new_file(rng, log_dir, outside),
        lambda: _edit_manifest(rng, sorted(backups.rglob("manifest.json"))),
        lambda: _edit_manifest(rng, sorted(log_dir.glob("*/*.prepared.*"))),
    ]
    while True:
        with suppress(OSError, ValueError, IndexError):
            rng.choice(moves)()


def _partitions(log_dir: Path) -> list[Path]:
    return [path for path in sorted(log_dir.glob("*-[0-9]")) if not path.is_symlink()]


def _swap_directory(rng: random.Random, log_dir: Path, outside: list[Path]) -> None:
    partition = rng.choice(_partitions(log_dir))
    _swap(rng, partition, log_dir / f"{partition.name}.away", rng.choice(outside) / partition.name)


def _swap_file(rng: random.Random, log_dir: Path, outside: list[Path]) -> None:
    folder = rng.choice([log_dir, *_partitions(log_dir)])
    file = rng.choice([path for path in folder.iterdir() if path.is_file() and not path.is_symlink()])
    _swap(rng, file, folder / "away", rng.choice(outside) / rng.choice(["secret", f"{folder.name}/{file.name}"]))


def _swap(rng: random.Random, path: Path, link: Path, aim: Path) -> None:
    """Alternate `path` between itself and a link to `aim`."""
    link.symlink_to(aim)
    try:
        for _ in range(rng.randrange(200)):
            exchange(path, link)
            exchange(path, link)
    finally:
        link.unlink()


def _plant(rng: random.Random, log_dir: Path, outside: list[Path]) -> None:
    """Temporarily create a link with a name that keytail may create or open."""
    inside = rng.random() < 0.6
    folder = rng.choice(_partitions(log_dir)) if inside else log_dir
    planted = folder / rng.choice(OF_PARTITION if inside else NAMES)
    aim = rng.choice(outside) / rng.choice(["secret", "new-file", "setuid"])
    if planted.is_file() and not planted.is_symlink():
        away = folder / "kept-away"
        planted.rename(away)
        planted.symlink_to(aim)
        for _ in range(rng.randrange(2000)):
            os.stat(folder)
        away.replace(planted)
        return
    planted.symlink_to(aim)
    for _ in range(rng.randrange(2000)):
        os.stat(folder)
    planted.unlink()


def _replace_a_new_file(rng: random.Random, log_dir: Path, outside: list[Path]) -> None:
    """Replace a new file or directory immediately with a link."""
    folder = rng.choice([log_dir, *_partitions(log_dir)])
    before = set(os.listdir(folder))
    for _ in range(rng.randrange(3000)):
        new = [name for name in os.listdir(folder) if name not in before]
        if new:
            link = folder / "away"
            link.symlink_to(rng.choice(outside) / rng.choice(["secret", "setuid", ""]))
            try:
                exchange(folder / new[0], link)
                for _ in range(rng.randrange(100)):
                    os.stat(folder)
                exchange(folder / new[0], link)
            finally:
                link.unlink()
            return


def _edit_manifest(rng: random.Random, manifests: list[Path]) -> None:
    """Give all files to root, with the set-user-ID bit and writable for everyone, or change their paths."""
    path = rng.choice(manifests)
    text = path.read_text()
    data = json.loads(text)

    def edit(value: object) -> object:
        if isinstance(value, dict):
            return {key: _edited(rng, key, edit(item)) for key, item in value.items()}
        return [edit(item) for item in value] if isinstance(value, list) else value

    path.write_text(json.dumps(edit(data)))


def _edited(rng: random.Random, key: str, value: object) -> object:
    if key in ("uid", "gid", "owner", "group"):
        return 0
    if key == "mode":
        return 0o6777
    if key in ("name", "path") and rng.random() < 0.1:
        return "../../outside/secret"
    return value


class Watch:
    """Records every open and read, by any process, of files below some directories (inotify)."""

    def __init__(self, folders: list[Path]) -> None:
        self._fd = _LIBC.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        self._paths = {}
        for folder in folders:
            for path in [folder, *folder.rglob("*")]:
                watched = _LIBC.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN | _IN_ACCESS)
                assert watched >= 0, os.strerror(ctypes.get_errno())
                self._paths[watched] = path

    def seen(self) -> list[str]:
        """Return the files that were opened or read since the watch was created."""
        found = []
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                at = 0
                while at < len(data):
                    watched, mask, _, length = struct.unpack_from("iIII", data, at)
                    name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                    at += 16 + length
                    found.append(f"{'read' if mask & _IN_ACCESS else 'open'} {self._paths.get(watched)}/{name}")
        return found

    def close(self) -> None:
        os.close(self._fd)
