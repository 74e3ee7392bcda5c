"""What is wrong with a partition directory: every batch, every index entry, every name, each with its place.

Reads only, changes nothing, and needs no lock: beside a live broker it tolerates files that vanish or
grow, and says nothing of the active segment's tail. Whatever the bytes are, the answer is findings, not
an exception; only an unreadable directory is one.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from keytail.errors import KeytailError
from keytail.format import names
from keytail.format.compression import decompress
from keytail.inspection.findings import KINDS, Finding
from keytail.kernels import verify as kernels
from keytail.log.fs import FileSystem
from keytail.log.window import Window

_MOST_FINDINGS_A_FILE = 100
_MOST_BLOCK_BYTES = 2**31 - 1
_BEYOND_ALL = 2**63 - 1
_TXN_ENTRY = struct.Struct(">hqqqq")  # version, producer id, first, last, last stable offset
_UNINDEXED_BYTES = 1 << 20
_LEFTOVERS = {"cleaned", "swap", "deleted", "scratch", "fatal"}


@dataclass(frozen=True)
class VerifyCounts:
    """What was looked at."""

    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    index_entries: int = 0


@dataclass(frozen=True)
class VerifyReport:
    """The findings of one partition, in the order of files and positions."""

    findings: tuple[Finding, ...]
    counts: VerifyCounts

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)


@dataclass
class _Inspection:
    """One inspection under way."""

    fs: FileSystem
    path: str
    live: bool
    window: Window
    state: np.ndarray
    sizes: dict[str, int]
    findings: list[Finding] = field(default_factory=list)
    per_file: Counter[str] = field(default_factory=Counter)
    index_entries: int = 0
    bytes_read: int = 0

    def add(
        self,
        kind: str,
        file: str,
        byte_position: int | None = None,
        offset: int | None = None,
        **facts: int | str,
    ) -> None:
        """Note a finding of a kind listed in findings.py; past a number a file, only count."""
        self.per_file[file] += 1
        if self.per_file[file] > _MOST_FINDINGS_A_FILE:
            return
        found = KINDS[kind]
        self.findings.append(
            Finding(
                kind=kind,
                severity=found.severity,
                what=found.what.format(**facts),
                path=f"{self.path}/{file}",
                byte_position=byte_position,
                offset=offset,
                broker=found.broker,
                remedy=found.remedy,
            )
        )

    def read(self, file: str) -> bytes | None:
        """A whole small file; None, with a finding unless it may vanish, where it cannot be read."""
        try:
            return self.fs.read_bytes(f"{self.path}/{file}")
        except OSError as problem:
            if not (self.live and isinstance(problem, FileNotFoundError)):
                self.add("unreadable", file, reason=problem.strerror or str(problem))
            return None


@dataclass
class _Entries:
    """The index entries of one segment, native and absolute, as far as they make sense."""

    offsets: np.ndarray
    positions: np.ndarray
    times: np.ndarray
    time_offsets: np.ndarray


def verify_partition(fs: FileSystem, path: str, *, live: bool = False) -> VerifyReport:
    """Inspect the partition directory `path`; `live`: a broker may be writing to it meanwhile."""
    listing = [entry for entry in fs.scan(path) if not entry.is_dir]
    sizes = {entry.name: entry.size_bytes for entry in listing}
    state = np.zeros(kernels.STATE_SIZE, dtype=np.int64)
    state[kernels.LAST_OFFSET] = -1
    inspection = _Inspection(fs, path, live, Window(fs), state, sizes)
    bases = _check_names(inspection)
    try:
        for base, next_base in zip(bases, [*bases[1:], None], strict=False):
            _check_segment(inspection, base, next_base)
    finally:
        inspection.window.close()
    for file, count in sorted(inspection.per_file.items()):
        if count > _MOST_FINDINGS_A_FILE:
            inspection.per_file[file] = 0
            inspection.add("more", file, count=count - _MOST_FINDINGS_A_FILE)
    counts = VerifyCounts(
        segments=len(bases),
        batches=int(state[kernels.BATCHES]),
        records=int(state[kernels.RECORDS]),
        bytes=inspection.bytes_read,
        index_entries=inspection.index_entries,
    )
    return VerifyReport(tuple(inspection.findings), counts)


def _check_names(inspection: _Inspection) -> list[int]:
    """Base offsets of the segments, ascending; findings about every name that is none of theirs."""
    bases = set()
    indexes = []
    for name in sorted(inspection.sizes):
        parsed = names.parse_file_name(name)
        if parsed.kind in _LEFTOVERS:
            inspection.add(f"leftover-{parsed.kind}", name, offset=parsed.base_offset)
        elif parsed.kind == "live" and parsed.base_offset is not None:
            if parsed.suffix == names.LOG:
                bases.add(parsed.base_offset)
            elif parsed.suffix != names.SNAPSHOT:
                indexes.append(parsed)
    for orphan in indexes:
        if orphan.base_offset not in bases and not inspection.live:
            inspection.add("orphan", orphan.name, offset=orphan.base_offset)
    if not bases:
        inspection.add("no-segment", "")
    return sorted(bases)


def _check_segment(inspection: _Inspection, base: int, next_base: int | None) -> None:
    state, window = inspection.state, inspection.window
    log = names.segment_file(base, names.LOG)
    size_bytes = inspection.sizes[log]
    entries = _read_indexes(inspection, base, next_base is None, size_bytes)
    for at, value in (
        (kernels.FROM, 0),
        (kernels.STAGE, 0),
        (kernels.SEGMENT_BASE, base),
        (kernels.NEXT_BASE, _BEYOND_ALL if next_base is None else next_base),
        (kernels.MAX_TIMESTAMP, -1),
        (kernels.INDEX_AT, 0),
        (kernels.TIME_AT, 0),
    ):
        state[at] = value
    batches_before = int(state[kernels.BATCHES])
    try:
        window.open(f"{inspection.path}/{log}", size_bytes)
        whole = _walk(inspection, log, entries, next_base is None)
    except KeytailError as problem:  # it became shorter: a broker truncates its active segment
        if not inspection.live:
            inspection.add("shrunk", log, problem.byte_position)
        return
    except OSError as problem:
        if not (inspection.live and isinstance(problem, FileNotFoundError)):
            inspection.add("unreadable", log, reason=problem.strerror or str(problem))
        return
    inspection.bytes_read += size_bytes
    if whole:
        batches = int(state[kernels.BATCHES]) - batches_before
        _check_ends(inspection, base, next_base is None, entries, batches)


def _walk(inspection: _Inspection, log: str, entries: _Entries, active: bool) -> bool:
    """Every batch of the window's file; False where the walk had to stop before the end."""
    state, window = inspection.state, inspection.window
    while True:
        state[kernels.TO], state[kernels.IS_ALL] = window.filled, window.is_all
        state[kernels.POSITION] = window.position
        code = kernels.inspect(
            window.bytes, entries.offsets, entries.positions, entries.times, entries.time_offsets, state
        )
        at = int(state[kernels.FROM])
        if code == kernels.DONE:
            return True
        if code == kernels.NEED_MORE:
            window.advance(at, int(state[kernels.WANTED_BYTES]))
            state[kernels.FROM] = 0
        elif code == kernels.NEED_BLOCK:
            _check_block(inspection, log, at)
        elif code == kernels.LEGACY:
            _check_legacy(inspection, log, at)
        elif code in kernels.ENDS_THE_WALK:
            _end_walk(inspection, log, at, code, active)
            return False
        else:
            _add_found(inspection, log, code, at, entries)


_BATCH_KINDS = {
    kernels.CRC: "checksum",
    kernels.ORDER: "offset-order",
    kernels.SEGMENT_RANGE: "offset-range",
    kernels.NEXT_SEGMENT: "overlap",
    kernels.CODEC: "codec",
    kernels.COUNT: "record-count",
    kernels.RECORD: "record",
    kernels.RECORD_OFFSET: "record-offset",
}


def _add_found(inspection: _Inspection, log: str, code: int, at: int, entries: _Entries) -> None:
    """Word what the kernel found at index `at` of the window, or in the entry it has just passed."""
    state = inspection.state
    base = int(state[kernels.SEGMENT_BASE])
    if code in _BATCH_KINDS:
        position = inspection.window.position + at
        inspection.add(_BATCH_KINDS[code], log, position, int(state[kernels.FOUND_OFFSET]))
    elif code in (kernels.INDEX_POSITION, kernels.INDEX_OFFSET):
        i = int(state[kernels.INDEX_AT]) - 1
        kind = "index-position" if code == kernels.INDEX_POSITION else "index-offset"
        file = names.segment_file(base, names.INDEX)
        inspection.add(kind, file, 8 * i, int(entries.offsets[i]), position=int(entries.positions[i]))
    else:
        i = int(state[kernels.TIME_AT]) - 1
        kind = "time-offset" if code == kernels.TIME_OFFSET else "time-entry"
        file = names.segment_file(base, names.TIME_INDEX)
        inspection.add(kind, file, 12 * i, int(entries.time_offsets[i]), timestamp=int(entries.times[i]))


def _end_walk(inspection: _Inspection, log: str, at: int, code: int, active: bool) -> None:
    """The bytes from here on are no batches; a live broker's active segment may end in half of one."""
    window = inspection.window
    position = window.position + at
    left = window.size_bytes - position
    if code == kernels.CUT:
        if not (inspection.live and active):
            inspection.add("cut-active" if active else "cut", log, position, left=left)
    elif code == kernels.MAGIC:
        inspection.add("magic", log, position, magic=int(window.bytes[at + 16]), left=left)
    else:
        (size,) = struct.unpack(">i", window.bytes[at + 8 : at + 12].tobytes())
        zeros = size == 0 and not window.bytes[at : window.filled].any()
        if zeros and inspection.live and active:  # a preallocated file
            return
        inspection.add("zeros" if zeros else "size", log, position, size=size, left=left)


def _check_block(inspection: _Inspection, log: str, at: int) -> None:
    """Open the compressed batch at index `at` and look at its records."""
    window, state = inspection.window, inspection.state
    header = window.bytes[at : at + 61].tobytes()
    (base, length) = struct.unpack_from(">qi", header)
    (last_delta,) = struct.unpack_from(">i", header, 23)
    (count,) = struct.unpack_from(">i", header, 57)
    position = window.position + at
    try:
        data = decompress(
            header[22] & 7, window.bytes[at + 61 : at + 12 + length].data, limit_bytes=_MOST_BLOCK_BYTES
        )
    except (ValueError, MemoryError) as problem:
        inspection.add("decompress", log, position, base, reason=str(problem))
        return
    block = np.frombuffer(data, dtype=np.uint8) if len(data) else np.zeros(0, dtype=np.uint8)
    block.flags.writeable = False
    state[kernels.FOUND_OFFSET] = base
    code = kernels.check_block(block, base, base + last_delta, count, state)
    if code != 0:
        inspection.add(_BATCH_KINDS[code], log, position, int(state[kernels.FOUND_OFFSET]))


def _check_legacy(inspection: _Inspection, log: str, at: int) -> None:
    """Checksum of one message of magic 0 or 1 (CRC-32 behind its own field)."""
    window, state = inspection.window, inspection.state
    header = window.bytes[at : at + 16].tobytes()
    offset, size, crc = struct.unpack(">qiI", header)
    state[kernels.STAGE] = 1
    state[kernels.RECORDS] += 1
    if zlib.crc32(window.bytes[at + 16 : at + 12 + size]) != crc:
        state[kernels.STAGE] = -1
        inspection.add("checksum", log, window.position + at, offset)


def _read_indexes(inspection: _Inspection, base: int, active: bool, log_bytes: int) -> _Entries:
    """The entries of the segment's index files; findings about the files as files."""
    index = _index_file(inspection, base, names.INDEX, 8, active, log_bytes)
    raw = np.frombuffer(index, dtype=">i4").reshape(-1, 2).astype(np.int64)
    raw = raw[: _rising(inspection, names.segment_file(base, names.INDEX), raw, 8, "index-order")]
    if inspection.live and active:  # entries may be newer than the size that was listed
        raw = raw[raw[:, 1] < log_bytes]
    time_index = _index_file(inspection, base, names.TIME_INDEX, 12, active, log_bytes)
    pairs = np.frombuffer(time_index, dtype=[("time", ">i8"), ("offset", ">i4")])
    times = np.column_stack((pairs["time"].astype(np.int64), pairs["offset"].astype(np.int64)))
    times = times[: _rising(inspection, names.segment_file(base, names.TIME_INDEX), times, 12, "time-order")]
    _check_txn_index(inspection, base)
    inspection.index_entries += len(raw) + len(times)
    return _Entries(
        offsets=np.ascontiguousarray(raw[:, 0]) + base,
        positions=np.ascontiguousarray(raw[:, 1]),
        times=np.ascontiguousarray(times[:, 0]),
        time_offsets=np.ascontiguousarray(times[:, 1]) + base,
    )


def _index_file(
    inspection: _Inspection, base: int, suffix: str, entry_bytes: int, active: bool, log_bytes: int
) -> bytes:
    """The file's entries without unused ones; b"" where it is missing."""
    file = names.segment_file(base, suffix)
    time = "time-" if suffix == names.TIME_INDEX else ""
    if file not in inspection.sizes:
        if log_bytes > 0 and not inspection.live:
            inspection.add(f"{time}index-missing", file, offset=base)
        return b""
    data = inspection.read(file)
    if data is None:
        return b""
    rest = len(data) % entry_bytes
    if rest:
        inspection.add("index-size", file, len(data) - rest, size=len(data), entry=entry_bytes)
        data = data[: len(data) - rest]
    used = -(-len(data.rstrip(b"\0")) // entry_bytes) * entry_bytes
    if time and len(data) == entry_bytes:  # timestamp 0 of the first offset can be a real entry
        return data
    if used < len(data) and not (active and (inspection.live or len(data) > entry_bytes)):
        # The file of the active segment is longer than its entries until a clean shutdown.
        kind = f"{time}index-{'zeros' if used == 0 else 'untrimmed'}"
        inspection.add(kind, file, used, count=(len(data) - used) // entry_bytes)
    return data[:used]


def _rising(inspection: _Inspection, file: str, entries: np.ndarray, entry_bytes: int, kind: str) -> int:
    """How many entries come before the first that does not rise in both columns, or has a negative one."""
    bad: np.ndarray = np.asarray((entries < 0).any(axis=1))
    if kind == "time-order":  # the second entry of one timestamp is never written
        bad[1:] |= (entries[1:, 0] <= entries[:-1, 0]) | (entries[1:, 1] <= entries[:-1, 1])
    else:
        bad[1:] |= (entries[1:] <= entries[:-1]).any(axis=1)
    if not bad.any():
        return len(entries)
    first = int(np.argmax(bad))
    inspection.add(kind, file, entry_bytes * first)
    return first


def _check_txn_index(inspection: _Inspection, base: int) -> None:
    file = names.segment_file(base, names.TXN_INDEX)
    if file not in inspection.sizes or (data := inspection.read(file)) is None:
        return
    rest = len(data) % _TXN_ENTRY.size
    if rest:
        inspection.add("index-size", file, len(data) - rest, size=len(data), entry=_TXN_ENTRY.size)
    before = base - 1
    for position in range(0, len(data) - rest, _TXN_ENTRY.size):
        version, _pid, first, last, _stable = _TXN_ENTRY.unpack_from(data, position)
        inspection.index_entries += 1
        if version != 0 or last <= before or first > last:
            inspection.add("txn-entry", file, position, last)
            return
        before = last


def _check_ends(inspection: _Inspection, base: int, active: bool, entries: _Entries, batches: int) -> None:
    """After a walk to the end: entries that no batch has met, and what a closed segment's index needs."""
    state = inspection.state
    if not (inspection.live and active):
        for i in range(int(state[kernels.INDEX_AT]), len(entries.offsets)):
            file = names.segment_file(base, names.INDEX)
            facts = {"position": int(entries.positions[i])}
            inspection.add("index-position", file, 8 * i, int(entries.offsets[i]), **facts)
        for i in range(int(state[kernels.TIME_AT]), len(entries.times)):
            file = names.segment_file(base, names.TIME_INDEX)
            facts = {"timestamp": int(entries.times[i])}
            inspection.add("time-offset", file, 12 * i, int(entries.time_offsets[i]), **facts)
    if active:
        return
    latest = int(state[kernels.MAX_TIMESTAMP])
    file = names.segment_file(base, names.TIME_INDEX)
    if file in inspection.sizes and latest > max(entries.times, default=-1):
        inspection.add("time-incomplete", file, 12 * len(entries.times), timestamp=latest)
    file = names.segment_file(base, names.INDEX)
    log_bytes = inspection.sizes[names.segment_file(base, names.LOG)]
    if file in inspection.sizes and not len(entries.offsets) and batches > 2 and log_bytes > _UNINDEXED_BYTES:
        inspection.add("index-empty", file, 0, size=log_bytes)
