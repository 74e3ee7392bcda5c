"""Directories as values: states that are not written to a disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

# Content and modification time by path, parents first. The path of a directory ends in a slash, and has (b"", 0).
Tree = dict[str, tuple[bytes, int]]


def read_tree(root: Path) -> Tree:
    found: Tree = {}
    _read(str(root), "", found)
    return found


def write_tree(tree: Mapping[str, tuple[bytes, int]], root: Path) -> None:
    """Create `root` with files of these times and default permissions."""
    os.makedirs(root)
    for name, (content, mtime_ns) in tree.items():
        path = f"{root}/{name}"
        if name.endswith("/"):
            os.mkdir(path)
            continue
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            written = os.write(fd, content)
            assert written == len(content)
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)


def remove_tree(root: Path) -> None:
    """Remove a directory, without the protection of `shutil.rmtree` against races with other processes."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                os.unlink(entry.path)
    os.rmdir(root)


def digest_of_tree(tree: Mapping[str, tuple[bytes, int]], *, times_of: str = "") -> str:
    """Return a digest of names and contents, and of the times of files whose names end in `times_of`."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        content, mtime_ns = tree[name]
        time = mtime_ns if times_of and name.endswith(times_of) else 0
        digest.update(f"{name}\0{time}\0".encode() + digest_of_content(content))
    return digest.hexdigest()


@lru_cache(maxsize=1 << 14)
def digest_of_content(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _read(directory: str, prefix: str, found: Tree) -> None:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                found[f"{prefix}{entry.name}/"] = (b"", 0)
                _read(entry.path, f"{prefix}{entry.name}/", found)
            else:
                found[prefix + entry.name] = read_file(entry.path)


def read_file(path: str) -> tuple[bytes, int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        stat = os.fstat(fd)
        content = os.read(fd, stat.st_size)
        assert len(content) == stat.st_size
        return content, stat.st_mtime_ns
    finally:
        os.close(fd)
