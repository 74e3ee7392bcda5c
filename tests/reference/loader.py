"""Kafka's log loader in plain Python: what a broker that starts after a clean shutdown makes of a directory.

Works on a copy of the names and bytes in memory, pass by pass, and shares no code with keytail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.reference.batches import Rec, all_records, decode_log

SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex")
PRESIZED_INDEX_BYTES = 800


class BrokerDoesNotStart(Exception):
    """The loader throws."""


@dataclass(frozen=True)
class LoadedSegment:
    """`index` and `time_index` are None where the broker rebuilds them from the log."""

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
    """Raises BrokerDoesNotStart."""
    files = {path.name: path.read_bytes() for path in sorted(partition_dir.iterdir()) if path.is_file()}
    _drop_unfinished(files)
    _make_room_for_swaps(files)
    for name in [name for name in files if name.endswith(".swap")]:
        files[name.removesuffix(".swap")] = files.pop(name)
    return _open_segments(files)


def _drop_unfinished(files: dict[str, bytes]) -> None:
    """Pass 1."""
    for name in list(files):
        if name.endswith(".deleted") and not name.endswith(".checkpoint.deleted"):
            del files[name]
    cleaned = [name for name in files if name.endswith(".cleaned")]
    lowest = min((_number(name) for name in cleaned), default=None)
    for name in list(files):
        if name.endswith(".swap"):
            number = _number(name)  # parsed whether or not there is a `.cleaned`
            if lowest is not None and number >= lowest:
                del files[name]
    for name in cleaned:
        del files[name]


def _make_room_for_swaps(files: dict[str, bytes]) -> None:
    """Pass 2: by number, whatever the file is."""
    low, high = None, None
    for name in [name for name in files if name.endswith(".log.swap")]:
        base = _number(name)
        batches = decode_log(files[name])
        after = batches[-1].last_offset + 1 if batches else base
        low = base if low is None else min(low, base)
        high = after if high is None else max(high, after)
        files.setdefault(name.replace(".log.swap", ".index.swap"), bytes(PRESIZED_INDEX_BYTES))
    if low is None or high is None:
        return
    for name in list(files):
        if not name.endswith(".swap") and _has_number(name) and low <= _number(name) < high:
            del files[name]


def _open_segments(files: dict[str, bytes]) -> Loaded:
    """Pass 4."""
    bases = {_number(name): name for name in files if name.endswith(".log")}
    for name in files:
        if name.endswith((*SEGMENT_SUFFIXES, ".snapshot")):
            base = _number(name)  # raises for a stem that is no number
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
