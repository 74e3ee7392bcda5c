"""Kafka's log loader in plain Python: the log that a broker loads from a directory after a clean shutdown.

`load` is the loader of 3.0 and later, and `load_before_3` that of 2.4 to 2.8. Both work on a copy of the names and
bytes in memory, pass by pass, and share no code with keytail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.reference.batches import Rec, all_records, decode_log

INDEX_SUFFIXES = (".index", ".timeindex", ".txnindex")
SEGMENT_SUFFIXES = (".log", *INDEX_SUFFIXES)
PRESIZED_INDEX_BYTES = 800


class BrokerDoesNotStart(Exception):
    """The loader raises an exception."""


@dataclass(frozen=True)
class LoadedSegment:
    """A loaded segment. `index` and `time_index` are None if the broker rebuilds them from the log."""

    log: bytes
    index: bytes | None
    time_index: bytes | None
    txn_index: bytes | None


@dataclass(frozen=True)
class Loaded:
    segments: dict[int, LoadedSegment]
    snapshots: tuple[int, ...]

    def records(self) -> list[Rec]:
        return [
            rec
            for _, segment in sorted(self.segments.items())
            for rec in all_records(decode_log(segment.log))
        ]


def load(partition_dir: Path) -> Loaded:
    """Load a partition directory. Raises BrokerDoesNotStart if the loader of a broker would raise an exception."""
    return _load(_files(partition_dir))


def _load(files: dict[str, bytes]) -> Loaded:
    _drop_unfinished(files)
    _make_room_for_swaps(files)
    for name in [name for name in files if name.endswith(".swap")]:
        files[name.removesuffix(".swap")] = files.pop(name)
    return _open_segments(files)


def load_alike(partition_dir: Path) -> Loaded:
    """Call `load`, and check that brokers before 3.0 load the same logs.

    Raises AssertionError if such a broker loads other logs, or leaves a `.swap` file, which a later version would
    rename. Snapshots are excepted, because such a broker always leaves their `.swap` files.
    """
    files = _files(partition_dir)
    loaded = _load(dict(files))
    logs = {base: segment.log for base, segment in loaded.segments.items()}
    for order, is_2_4 in ((list.sort, False), (list.reverse, False), (list.reverse, True)):
        found, left = _load_before_3(dict(files), order, is_2_4=is_2_4)
        assert {base: segment.log for base, segment in found.segments.items()} == logs
        assert [name for name in left if not name.endswith(".snapshot.swap")] == []
    return loaded


def _files(partition_dir: Path) -> dict[str, bytes]:
    with os.scandir(partition_dir) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    return {name: (partition_dir / name).read_bytes() for name in names}


def load_before_3(
    partition_dir: Path, order: Callable[[list[str]], object] = list.sort, *, is_2_4: bool = False
) -> tuple[Loaded, list[str]]:
    """Return what a broker before 3.0 loads, and the names of the `.swap` files that it leaves.

    `order` sorts the `.log.swap` files, whose order is that of a hash set. With `is_2_4`, an empty `.log.swap` file
    removes the segment that contains its base offset.
    """
    return _load_before_3(_files(partition_dir), order, is_2_4=is_2_4)


def _load_before_3(
    files: dict[str, bytes], order: Callable[[list[str]], object], *, is_2_4: bool
) -> tuple[Loaded, list[str]]:
    cleaned = [name for name in files if name.endswith(".cleaned")]
    lowest = min((_number(name) for name in cleaned), default=2**63)
    swaps = [name for name in files if name.endswith(".log.swap")]
    for name in list(files):
        if name.endswith((".deleted", ".cleaned")):
            del files[name]
        elif name.endswith(tuple(f"{suffix}.swap" for suffix in SEGMENT_SUFFIXES)):
            for suffix in INDEX_SUFFIXES:
                files.pop(f"{_number(name):020d}{suffix}", None)
    for name in [name for name in swaps if _number(name) >= lowest]:
        swaps.remove(name)
        for suffix in SEGMENT_SUFFIXES:
            files.pop(f"{_number(name):020d}{suffix}.swap", None)
    order(swaps)
    for name in swaps:
        _replace_overlapped(files, _number(name), empty_overlaps=is_2_4)
    return _open_segments({n: data for n, data in files.items() if not n.endswith(".swap")}), [
        name for name in files if name.endswith(".swap")
    ]


def _replace_overlapped(files: dict[str, bytes], base: int, *, empty_overlaps: bool) -> None:
    """Put a `.log.swap` file in the place of the segments that it overlaps; its indexes are rebuilt."""
    log = files.pop(f"{base:020d}.log.swap")
    end = _next_offset(base, log)
    for other in [_number(name) for name in files if name.endswith(".log")]:
        overlaps = other < end and _next_offset(other, files[f"{other:020d}.log"]) > base
        overlaps &= base < end or empty_overlaps
        if overlaps or other == base:
            for suffix in SEGMENT_SUFFIXES:
                files.pop(f"{other:020d}{suffix}", None)
    for suffix in INDEX_SUFFIXES:
        files.pop(f"{base:020d}{suffix}.swap", None)
    files[f"{base:020d}.log"] = log


def _next_offset(base: int, log: bytes) -> int:
    batches = decode_log(log)
    return batches[-1].last_offset + 1 if batches else base


def _drop_unfinished(files: dict[str, bytes]) -> None:
    """Pass 1: delete `.deleted` and `.cleaned` files, and the swap files from the lowest `.cleaned` number on."""
    for name in list(files):
        if name.endswith(".deleted") and not name.endswith(".checkpoint.deleted"):
            del files[name]
    cleaned = [name for name in files if name.endswith(".cleaned")]
    lowest = min((_number(name) for name in cleaned), default=None)
    for name in list(files):
        if name.endswith(".swap"):
            number = _number(name)  # a broker parses the name even without a `.cleaned` file
            if lowest is not None and number >= lowest:
                del files[name]
    for name in cleaned:
        del files[name]


def _make_room_for_swaps(files: dict[str, bytes]) -> None:
    """Pass 2: delete the files, of any type, whose numbers are in the range of offsets of the swap files."""
    low, high = None, None
    for name in [name for name in files if name.endswith(".log.swap")]:
        base = _number(name)
        after = _next_offset(base, files[name])
        low = base if low is None else min(low, base)
        high = after if high is None else max(high, after)
        files.setdefault(name.replace(".log.swap", ".index.swap"), bytes(PRESIZED_INDEX_BYTES))
    if low is None or high is None:
        return
    for name in list(files):
        if not name.endswith(".swap") and _has_number(name) and low <= _number(name) < high:
            del files[name]


def _open_segments(files: dict[str, bytes]) -> Loaded:
    """Pass 4: open the segments."""
    bases = {_number(name): name for name in files if name.endswith(".log")}
    for name in files:
        if name.endswith((*SEGMENT_SUFFIXES, ".snapshot")):
            base = _number(name)  # a broker raises an exception for a stem that is not a number
            if not name.startswith(f"{base:020d}."):
                raise BrokerDoesNotStart(f"opens another file than {name}")
    segments = {}
    for base in sorted(bases):
        found = {suffix: files.get(f"{base:020d}{suffix}") for suffix in SEGMENT_SUFFIXES}
        rebuilt = found[".index"] is None
        segments[base] = LoadedSegment(
            log=found[".log"] or b"",
            index=found[".index"],
            time_index=None if rebuilt else found[".timeindex"] or b"",
            txn_index=None if rebuilt else found[".txnindex"],
        )
    snapshots = tuple(sorted(_number(name) for name in files if name.endswith(".snapshot")))
    return Loaded(segments, snapshots)


def _has_number(name: str) -> bool:
    return name.split(".", 1)[0].lstrip("+-").isdecimal()


def _number(name: str) -> int:
    if not _has_number(name):
        raise BrokerDoesNotStart(f"NumberFormatException for {name}")
    return int(name.split(".", 1)[0])
