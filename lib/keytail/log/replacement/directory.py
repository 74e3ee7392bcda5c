"""Caches the names in a partition directory while segments are replaced: updated with every change of these modules,
and listed again only after other changes.

If the directory were listed for each replacement, the time of a run would grow with the square of the number of
segments.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable

from keytail.errors import Refused
from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import FileStat, FileSystem

_UNFINISHED = ("cleaned", "swap", "deleted")


class Directory:
    """A partition directory and the names in it. During replacements only this object changes names, in one thread.

    Call `refresh` before and `keep` after each replacement; do not use the object after an error. `refresh` raises
    Refused for a file with a Kafka or keytail name that is not regular, or with a `fatal` name (format/names.py).
    """

    def __init__(self, fs: FileSystem, path: str) -> None:
        self.fs = fs
        self.path = path
        self._changed_ns: int | None = None  # the directory's modification time that the names correspond to
        self._there: set[str] = set()
        self._unfinished: dict[str, FileName] = {}
        self._bases: list[int] = []  # base offsets of live `.log` files, ascending

    def refresh(self) -> None:
        """List the directory, unless its modification time shows that nothing has changed it since `keep`."""
        changed_ns = self.fs.stat(self.path).mtime_ns  # before the listing: a change during it counts as a later one
        if changed_ns == self._changed_ns:
            return
        files = named_files(self.fs, self.path)
        refuse_fatal(files, self.path)
        self._there = {file.name for file in files}
        self._unfinished = {file.name: file for file in files if file.kind in _UNFINISHED}
        self._bases = sorted(logs(files, "live"))
        self._changed_ns = changed_ns

    def keep(self) -> None:
        """Declare that the cached names are those in the directory now."""
        self._changed_ns = self.fs.stat(self.path).mtime_ns

    def __contains__(self, name: str) -> bool:
        return name in self._there

    def unfinished(self) -> list[FileName]:
        """Return the files of unfinished replacements, sorted by name."""
        return sorted(self._unfinished.values(), key=lambda file: file.name)

    def bases_between(self, first: int, last: int) -> tuple[int, ...]:
        """Return the base offsets of the existing segments from `first` to `last`, both included."""
        return tuple(self._bases[bisect_left(self._bases, first) : bisect_right(self._bases, last)])

    def base_above(self, base: int) -> int | None:
        """Return the base offset of the first segment above `base`, or None."""
        at = bisect_right(self._bases, base)
        return self._bases[at] if at < len(self._bases) else None

    def make_empty(self, name: str, like: FileStat) -> None:
        self.fs.close(self.fs.create(os.path.join(self.path, name), like))
        self._add(name)

    def rename(self, source: str, target: str) -> None:
        self.fs.rename(os.path.join(self.path, source), os.path.join(self.path, target))
        self._remove(source)
        self._add(target)

    def link(self, source: str, target: str) -> None:
        self.fs.link(os.path.join(self.path, source), os.path.join(self.path, target))
        self._add(target)

    def copy(self, source: str, target: str) -> None:
        """Replace `target` by a copy of the small file `source`, with its mtime. The name is not made durable."""
        origin = os.path.join(self.path, source)
        data, like = self.fs.read_bytes(origin, whole=True), self.fs.stat(origin)
        temporary = os.path.join(self.path, names.scratch_of(target, "copy", "0"))
        fd = self.fs.create(temporary, like)
        try:
            self.fs.write(fd, data)
            self.fs.set_mtime_ns(temporary, like.mtime_ns)
            self.fs.fsync(fd)
        finally:
            self.fs.close(fd)
        self.fs.rename(temporary, os.path.join(self.path, target))
        self._add(target)

    def stat(self, name: str) -> FileStat:
        return self.fs.stat(os.path.join(self.path, name))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; 0 if its name is not cached."""
        return self.stat(name).size_bytes if name in self else 0

    def unlink(self, name: str, unlink: Callable[[str], None] | None = None) -> None:
        """Remove the file by calling `unlink` with its path; by default the file system's `unlink`."""
        (unlink or self.fs.unlink)(os.path.join(self.path, name))
        self._remove(name)

    def fsync(self) -> None:
        self.fs.fsync_dir(self.path)

    def _add(self, name: str) -> None:
        if name in self._there:
            return
        self._there.add(name)
        file = names.parse_file_name(name)
        if file.kind in _UNFINISHED:
            self._unfinished[name] = file
        elif _is_live_log(file) and file.base_offset is not None:
            insort(self._bases, file.base_offset)

    def _remove(self, name: str) -> None:
        if name not in self._there:
            return
        self._there.remove(name)
        self._unfinished.pop(name, None)
        file = names.parse_file_name(name)
        if _is_live_log(file) and file.base_offset is not None:
            del self._bases[bisect_left(self._bases, file.base_offset)]


def _is_live_log(file: FileName) -> bool:
    return file.kind == "live" and file.suffix == names.LOG


def named_files(fs: FileSystem, path: str) -> list[FileName]:
    """Return the parsed names in the directory, sorted. Raises Refused for a Kafka or keytail name of something that is
    not a regular file."""
    found = []
    for entry in sorted(fs.scan(path), key=lambda e: e.name):
        parsed = names.parse_file_name(entry.name)
        if parsed.kind != "other" and not entry.is_regular:
            raise Refused(
                "this is not a regular file",
                path=os.path.join(path, entry.name),
                remedy="Move it away, then run again",
                slug="not-a-regular-file",
            )
        found.append(parsed)
    return found


def refuse_fatal(files: Iterable[FileName], path: str) -> None:
    for file in files:
        if file.kind == "fatal":
            raise Refused(
                "no broker writes a file with this name, and a broker does not start correctly while it exists",
                path=os.path.join(path, file.name),
                remedy="Find out what the file is, and move it out of the log dir",
                slug="invalid-file-name",
            )


def logs(files: Iterable[FileName], kind: str) -> set[int]:
    """Return the base offsets of the `.log` files among `files` whose kind is `kind`."""
    return {f.base_offset for f in files if f.kind == kind and f.suffix == names.LOG and f.base_offset is not None}
