"""The proof before the commit: what was written is read back and held against what it replaces.

Every output batch must be a batch of the source with fewer records, every record of the source that
is gone must be justified by a newer one that is kept (or by an expired tombstone, or because its transaction
was aborted), and the index files must be those that the output's bytes earn. Shares no reader, walker, hash or
view of transactions with the writer; changes nothing, and raises on the first violation with its place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from keytail.clean.proof_keys import Keys
from keytail.clean.proof_legacy import Message, kept_offsets, read_message
from keytail.clean.proof_markers import check_txn_index, collect_markers
from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.format.compression import decompress
from keytail.kernels import proof as kernels
from keytail.kernels import proof_markers as marker_kernels
from keytail.kernels.proof_table import DROPPED, EXPIRED, KEPT
from keytail.log.fs import FileSystem
from keytail.log.window import Window

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replace import CleanFile, GroupOutput, OutputSegment

_MOST_BLOCK_BYTES = 2**31 - 1  # what a reader on the JVM could hold
_LEAST_MEMORY_BYTES = 4 << 20
_NO_LIMIT = 2**62
_NEVER_READ = np.frombuffer(b"\0", dtype=np.uint8)

_SOURCE = {
    kernels.SOURCE_CUT: "a batch is cut off by the end of the file",
    kernels.SOURCE_SIZE: "a batch states an impossible size",
    kernels.SOURCE_MAGIC: "a batch is not of format v2",
    kernels.SOURCE_CRC: "a batch's checksum differs from its bytes",
    kernels.SOURCE_ORDER: "a batch's offsets do not follow those before it",
    kernels.SOURCE_RECORD: "a record cannot be parsed, or its offset does not follow the one before it",
    kernels.SOURCE_COUNT: "a batch's record count is not the number of its records",
}
_LOST = {
    kernels.LOST_LAST_BATCH: "the batch that ends the cleaned range is not in the output",
    kernels.LOST_BEYOND_END: "a record beyond the cleaned range is not in the output",
    kernels.LOST_KEYLESS: "a record without a key is not in the output",
    kernels.LOST_PRODUCER: "the last batch of an active producer is not in the output",
    kernels.LOST_OPEN: "data of a transaction that has not ended is not in the output",
    kernels.LOST_MARKER: "the marker of a transaction that had data is not in the output",
    kernels.LOST_MARKER_EARLY: "a marker was removed before its delete horizon",
}
_OUTPUT = {
    kernels.OUTPUT_CUT: "a batch is cut off by the end of the file",
    kernels.OUTPUT_SIZE: "a batch states an impossible size",
    kernels.OUTPUT_MAGIC: "a batch is not of format v2",
    kernels.OUTPUT_CRC: "a batch's checksum differs from its bytes",
    kernels.OUTPUT_ORDER: "a batch's offsets do not follow those before it",
    kernels.OUTPUT_RANGE: "a batch's offsets do not fit its segment",
    kernels.OUTPUT_UNKNOWN: "no batch of the source has this base offset at this place",
    kernels.OUTPUT_LAST_OFFSET: "a batch's last offset is not the source's",
    kernels.OUTPUT_LEADER_EPOCH: "a batch's leader epoch is not the source's",
    kernels.OUTPUT_PRODUCER: "a batch's producer id, epoch or sequence is not the source's",
    kernels.OUTPUT_ATTRIBUTES: "a batch's attributes are not the source's",
    kernels.OUTPUT_CODEC: "a batch's codec is not the source's",
    kernels.OUTPUT_BASE_TIMESTAMP: "a rebuilt batch's base timestamp is wrong",
    kernels.OUTPUT_HORIZON: "a batch's delete horizon is missing or should not be there",
    kernels.OUTPUT_MAX_TIMESTAMP: "a rebuilt batch's max timestamp is wrong",
    kernels.OUTPUT_COUNT: "a batch's record count is not the number of its records",
    kernels.OUTPUT_EMPTY: "an emptied batch is not the source's header alone",
    kernels.OUTPUT_RECORD: "a record cannot be parsed",
    kernels.OUTPUT_EXTRA_RECORD: "the batch holds a record that the source's does not",
    kernels.OUTPUT_RECORD_DIFFERS: "a record's timestamp, key, value or headers are not the source's",
    kernels.OUTPUT_ABORTED: "a batch holds data of an aborted transaction",
    kernels.OUTPUT_REBUILT_WHOLE: "a batch that lost nothing is not the source's bytes",
}
_INDEX = {
    kernels.INDEX_ENTRY: (names.INDEX, "an offset index entry is not the one that the segment earns"),
    kernels.INDEX_MISSING: (names.INDEX, "an offset index entry is missing"),
    kernels.TIME_ENTRY: (names.TIME_INDEX, "a time index entry is not the one that the segment earns"),
    kernels.TIME_MISSING: (names.TIME_INDEX, "a time index entry is missing"),
}
_REMEDY = "Nothing was replaced; keep the directory and report this, it is a bug in keytail or a failing disk"
_SOURCE_REMEDY = "Nothing was replaced; `keytail verify` lists what is wrong with the partition"


@dataclass(frozen=True)
class ProofReport:
    """What a passed proof looked at."""

    batches_checked: int
    batches_kept: int
    records_checked: int
    records_kept: int
    keys: int
    bytes_read: int


class _Proof:
    """One proof under way: windows, the table of keys, and the state that the kernels share."""

    def __init__(
        self, fs: FileSystem, path: str, segments: Sequence[SegmentFacts], segment_index_bytes: int, memory_bytes: int
    ) -> None:
        self.fs = fs
        self.path = path
        self.segments = segments
        self.segment_index_bytes = segment_index_bytes
        self.memory_bytes = max(memory_bytes, _LEAST_MEMORY_BYTES)
        self.keys = Keys(self.memory_bytes)
        self.markers = np.empty((0, marker_kernels.COLUMNS), dtype=np.int64)
        self.producers = np.empty((3, 0), dtype=np.int64)
        self.waiting: list[tuple[OutputSegment, int]] = []  # outputs still to come, and where each must end
        self.current: _Output | None = None
        self.legacy_horizon_ms = 0
        self.source = Window(fs)
        self.output = Window(fs)
        self.state = np.zeros(kernels.STATE_SIZE, dtype=np.int64)
        self.bytes_read = 0

    def put_keys(self, records: int = 0, key_bytes: int = 0) -> None:
        """Put the keys noted so far into the table; room for the next batch's notes."""
        self.keys.put(int(self.state[kernels.NOTED]), records, key_bytes)
        self.state[kernels.NOTED] = self.state[kernels.NOTED_KEY_BYTES] = 0

    def know_markers(self) -> None:
        """Make the table of markers, once: only a log with transactions needs it."""
        if self.state[kernels.MARKERS_KNOWN]:
            return
        limit_bytes = self.memory_bytes // 2
        found = collect_markers(self.fs, self.path, self.segments, limit_bytes)
        if found is None:
            self.keys.fail_for_memory()
        self.markers = found
        self.keys.take_memory(found.nbytes)
        self.state[kernels.MARKERS_KNOWN] = 1

    def close(self) -> None:
        self.source.close()
        self.output.close()
        self.keys.close()


def prove(
    fs: FileSystem,
    partition_path: str,
    segments: Sequence[SegmentFacts],
    groups: Sequence[GroupOutput],
    *,
    first_dirty_offset: int,
    end_offset: int,
    first_uncleanable_offset: int,
    now_ms: int,
    delete_retention_ms: int,
    index_interval_bytes: int,
    drop_keyless: bool,
    memory_bytes: int,
    log_start_offset: int = 0,
    segment_index_bytes: int = 2**31 - 1,
    active_producers: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> ProofReport:
    """Raises unless `groups` (ascending, on disk as scratch files) may replace the segments they name.

    `segments` are ALL of the partition's, ascending, those above the rewritten ones too: markers of transactions
    may lie there. [`first_dirty_offset`, `end_offset`) was mapped. `active_producers` (sorted ids, last data
    offset of each or -1, epochs) are not checked when None. `memory_bytes` (4 MiB at least) bounds the table of
    keys and that of markers. A source that is corrupt raises CorruptLog.
    """
    _check_groups(partition_path, segments, groups, end_offset)
    proof = _Proof(fs, partition_path, segments, segment_index_bytes, memory_bytes)
    if active_producers is not None:
        proof.producers = np.array(active_producers, dtype=np.int64)
    state = proof.state
    clean = [segment for segment in segments if segment.base_offset < first_dirty_offset]
    if clean:
        proof.legacy_horizon_ms = clean[-1].log_mtime_ns // 1_000_000 - delete_retention_ms
    horizon_ms = now_ms + delete_retention_ms
    for at, value in (
        (kernels.FIRST_DIRTY, first_dirty_offset),
        (kernels.END_OFFSET, end_offset),
        (kernels.FIRST_UNCLEANABLE, first_uncleanable_offset),
        (kernels.NOW_MS, now_ms),
        (kernels.HORIZON_MS, horizon_ms if horizon_ms < 2**63 else -1),
        (kernels.INTERVAL_BYTES, index_interval_bytes),
        (kernels.DROP_KEYLESS, drop_keyless),
        (kernels.LOG_START, log_start_offset),
        (kernels.SOURCE_LAST_OFFSET, -1),
        (kernels.OUTPUT_LAST_OFFSET_SEEN, -1),
        (kernels.OUTPUT_NUMBER, -1),
    ):
        state[at] = value
    by_base = {segment.base_offset: segment for segment in segments}
    ends = _ends(segments, groups)
    try:
        for group, group_ends in zip(groups, ends, strict=True):
            proof.waiting = list(zip(group.segments, group_ends, strict=True))
            _start_output(proof)
            for base in group.source_bases:
                _prove_source(proof, by_base[base])
            while proof.waiting:
                _finish_output(proof)
                _start_output(proof)
            _finish_output(proof)
        proof.put_keys()
        _check_newest(proof, partition_path, segments)
    finally:
        proof.close()
    return ProofReport(
        batches_checked=int(state[kernels.BATCHES_READ]),
        batches_kept=int(state[kernels.BATCHES_KEPT]),
        records_checked=int(state[kernels.RECORDS_READ]),
        records_kept=int(state[kernels.RECORDS_KEPT]),
        keys=proof.keys.used,
        bytes_read=proof.bytes_read,
    )


def _ends(segments: Sequence[SegmentFacts], groups: Sequence[GroupOutput]) -> list[list[int]]:
    """For each output of each group, the base of the output or segment behind it."""
    outputs = [segment.base_offset for group in groups for segment in group.segments]
    last_source = groups[-1].source_bases[-1] if groups else -1
    behind = [segment.base_offset for segment in segments if segment.base_offset > last_source]
    bases = iter([*outputs, behind[0] if behind else _NO_LIMIT][1:])
    return [[next(bases) for _ in group.segments] for group in groups]


def _check_groups(path: str, segments: Sequence[SegmentFacts], groups: Sequence[GroupOutput], end_offset: int) -> None:
    """The groups take the segments below the end, in order, from the first one, each exactly once."""
    expected = [segment.base_offset for segment in segments if segment.base_offset < end_offset]
    covered = [base for group in groups for base in group.source_bases]
    if covered != expected:
        raise KeytailError(f"the groups cover the segments {covered} instead of {expected}", path=path, remedy=_REMEDY)
    needed = {names.LOG, names.INDEX, names.TIME_INDEX}
    following = [segment.base_offset for segment in segments if segment.base_offset >= end_offset]
    before = -1
    for group in groups:
        bases = [segment.base_offset for segment in group.segments]
        if not group.source_bases or not bases or bases[0] != group.source_bases[0]:
            what = f"a group of {group.source_bases} has outputs of the bases {bases}"
            raise KeytailError(what, path=path, remedy=_REMEDY)
        for segment in group.segments:
            base = segment.base_offset
            if base <= before or (following and base >= following[0]):
                raise KeytailError(f"an output has the base {base}", path=path, offset=base, remedy=_REMEDY)
            before = base
            suffixes = sorted(file.suffix for file in segment.files)
            if len(set(suffixes)) < len(suffixes) or not needed <= set(suffixes) <= {*needed, names.TXN_INDEX}:
                what = f"the output of base {base} has the files {suffixes}"
                raise KeytailError(what, path=path, remedy=_REMEDY)


@dataclass(frozen=True)
class _Output:
    """The output segment that is being read, with its index files."""

    base_offset: int
    end_offset: int
    log_bytes: int
    index: np.ndarray
    time_index: np.ndarray
    txn_index: bytes
    paths: dict[str, str]


def _start_output(proof: _Proof) -> None:
    """Open the next output."""
    segment, end_offset = proof.waiting.pop(0)
    files = {file.suffix: file for file in segment.files}
    log = files[names.LOG]
    _open(proof, proof.output, f"{proof.path}/{log.name}", log.size_bytes)
    txn = files.get(names.TXN_INDEX)
    proof.current = output = _Output(
        segment.base_offset,
        end_offset,
        log.size_bytes,
        np.frombuffer(_read_index(proof, files[names.INDEX]), dtype=np.uint8),
        np.frombuffer(_read_index(proof, files[names.TIME_INDEX]), dtype=np.uint8),
        _read_index(proof, txn) if txn is not None else b"",
        {suffix: f"{proof.path}/{file.name}" for suffix, file in files.items()},
    )
    for suffix, data in ((names.INDEX, output.index), (names.TIME_INDEX, output.time_index)):
        if len(data) > proof.segment_index_bytes:
            raise KeytailError(
                f"the index has {len(data)} bytes, more than the {proof.segment_index_bytes} that a broker reads",
                path=output.paths[suffix],
                byte_position=proof.segment_index_bytes,
                remedy=_REMEDY,
            )
    state = proof.state
    state[kernels.OUTPUT_NUMBER] += 1
    for at, value in (
        (kernels.OUTPUT_FROM, 0),
        (kernels.OUTPUT_BASE, segment.base_offset),
        (kernels.NEXT_OUTPUT_BASE, end_offset),
        (kernels.OUTPUT_CHECKED, 0),
        (kernels.SINCE_LAST_ENTRY, 0),
        (kernels.MAX_TIMESTAMP, -1),
        (kernels.MAX_TIMESTAMP_OFFSET, segment.base_offset),
        (kernels.LAST_TIME_ENTRY, -1),
        (kernels.INDEX_AT, 0),
        (kernels.TIME_AT, 0),
    ):
        state[at] = value


def _open(proof: _Proof, window: Window, path: str, size_bytes: int) -> None:
    found = proof.fs.stat(path).size_bytes
    if found != size_bytes:
        what = f"the file has {found} bytes instead of {size_bytes}"
        raise KeytailError(what, path=path, remedy=_REMEDY)
    window.open(path, size_bytes)


def _read_index(proof: _Proof, file: CleanFile) -> bytes:
    path = f"{proof.path}/{file.name}"
    data = proof.fs.read_bytes(path)
    if len(data) != file.size_bytes:
        what = f"the file has {len(data)} bytes instead of {file.size_bytes}"
        raise KeytailError(what, path=path, remedy=_REMEDY)
    return data


def _prove_source(proof: _Proof, segment: SegmentFacts) -> None:
    """Walk a source to its end beside the outputs."""
    source_path = f"{proof.path}/{names.segment_file(segment.base_offset, names.LOG)}"
    _open(proof, proof.source, source_path, segment.log_bytes)
    state, source, output = proof.state, proof.source, proof.output
    state[kernels.SOURCE_FROM] = 0
    state[kernels.SOURCE_LAST_OFFSET] = max(int(state[kernels.SOURCE_LAST_OFFSET]), segment.base_offset - 1)
    state[kernels.SOURCE_BLOCK_BYTES] = state[kernels.OUTPUT_BLOCK_BYTES] = -1
    proof.bytes_read += segment.log_bytes
    source_block = output_block = _NEVER_READ
    while True:
        _show_windows(proof)
        current = proof.current
        assert current is not None
        code = kernels.step(
            source.bytes,
            output.bytes,
            source_block,
            output_block,
            current.index,
            current.time_index,
            proof.keys.notes.pending,
            proof.keys.notes.keys,
            proof.markers,
            proof.producers,
            state,
        )
        if code == kernels.SOURCE_DONE:
            return
        if code == kernels.NEED_SOURCE:
            source.advance(int(state[kernels.SOURCE_FROM]), int(state[kernels.WANTED_BYTES]))
            state[kernels.SOURCE_FROM] = 0
        elif code == kernels.NEED_OUTPUT:
            output.advance(int(state[kernels.OUTPUT_FROM]), int(state[kernels.WANTED_BYTES]))
            state[kernels.OUTPUT_FROM] = 0
        elif code == kernels.NEED_SOURCE_BLOCK:
            source_block = _open_block(source, int(state[kernels.SOURCE_FROM]), CorruptLog, _SOURCE_REMEDY)
            state[kernels.SOURCE_BLOCK_BYTES] = len(source_block)
        elif code == kernels.NEED_OUTPUT_BLOCK:
            output_block = _open_block(output, int(state[kernels.OUTPUT_FROM]), KeytailError, _REMEDY)
            state[kernels.OUTPUT_BLOCK_BYTES] = len(output_block)
        elif code == kernels.NEED_NOTES:
            proof.put_keys(int(state[kernels.WANTED_BYTES]), int(state[kernels.WANTED_KEY_BYTES]))
        elif code == kernels.NEED_MARKERS:
            proof.know_markers()
        elif code == kernels.NEED_NEXT_OUTPUT:
            _finish_output(proof)
            _start_output(proof)
        elif code == kernels.NEED_LEGACY:
            _prove_message(proof, segment)
        else:
            _raise(proof, code)


def _prove_message(proof: _Proof, segment: SegmentFacts) -> None:
    """Prove the source's next message of magic 0 or 1; the output's next batch, if any, is in its window."""
    state, source, window = proof.state, proof.source, proof.output
    p, q = int(state[kernels.SOURCE_FROM]), int(state[kernels.OUTPUT_FROM])
    size = int.from_bytes(source.bytes[p + 8 : p + 12].tobytes(), "big") + 12
    try:
        message = read_message(source.bytes[p : p + size].tobytes())
        if message.first_offset <= state[kernels.SOURCE_LAST_OFFSET]:
            raise ValueError(_SOURCE[kernels.SOURCE_ORDER])
    except ValueError as problem:
        position = source.position + p
        raise CorruptLog(str(problem), path=source.path, byte_position=position, remedy=_SOURCE_REMEDY) from problem
    ends = q == state[kernels.OUTPUT_TO]
    if ends and message.last_offset >= state[kernels.NEXT_OUTPUT_BASE]:
        _finish_output(proof)
        _start_output(proof)
        return
    kept: set[int] = set()
    base = -1 if ends else int.from_bytes(window.bytes[q : q + 8].tobytes(), "big", signed=True)
    if not ends and base <= message.last_offset:
        q_size = int.from_bytes(window.bytes[q + 8 : q + 12].tobytes(), "big") + 12
        try:
            if base < message.first_offset:
                raise ValueError("is none of the source at this place")
            batch = window.bytes[q : q + q_size].tobytes()
            kept = kept_offsets(message, batch, int(state[kernels.HORIZON_MS]))
        except ValueError as problem:
            raise KeytailError(
                f"a batch in the place of a message of magic 0 or 1 {problem}",
                path=window.path,
                byte_position=window.position + q,
                offset=base,
                remedy=_REMEDY,
            ) from problem
        state[kernels.OUTPUT_FROM] += q_size
        state[kernels.OUTPUT_CHECKED] = 0
        state[kernels.BATCHES_KEPT] += 1
    elif message.last_offset + 1 == state[kernels.FIRST_UNCLEANABLE]:
        _lost(proof, kernels.LOST_LAST_BATCH, message.last_offset)
    _note_message(proof, message, kept, segment)
    state[kernels.SOURCE_FROM] += size
    state[kernels.SOURCE_LAST_OFFSET] = message.last_offset
    state[kernels.BATCHES_READ] += 1
    state[kernels.RECORDS_READ] += len(message.records)
    state[kernels.RECORDS_KEPT] += len(kept)


def _note_message(proof: _Proof, message: Message, kept: set[int], segment: SegmentFacts) -> None:
    """What became of each record into the table of keys; raises for one that must not be gone."""
    state = proof.state
    proof.put_keys(len(message.records), sum(len(record.key or b"") for record in message.records))
    notes = proof.keys.notes
    old = segment.log_mtime_ns // 1_000_000 <= proof.legacy_horizon_ms
    noted = key_at = 0
    for record in message.records:
        is_kept, expired = record.offset in kept, old and record.value is None
        if record.offset >= state[kernels.END_OFFSET]:
            if not is_kept:
                _lost(proof, kernels.LOST_BEYOND_END, record.offset)
        elif record.key is None:
            if not is_kept and not state[kernels.DROP_KEYLESS]:
                _lost(proof, kernels.LOST_KEYLESS, record.offset)
        elif record.offset >= state[kernels.FIRST_DIRTY] or not (is_kept or expired):
            became = KEPT if is_kept else EXPIRED if expired else DROPPED
            notes.pending[:, noted] = (key_at, len(record.key), record.offset, became)
            notes.keys[key_at : key_at + len(record.key)] = np.frombuffer(record.key, dtype=np.uint8)
            key_at += len(record.key)
            noted += 1
    state[kernels.NOTED], state[kernels.NOTED_KEY_BYTES] = noted, key_at


def _lost(proof: _Proof, code: int, offset: int) -> NoReturn:
    proof.state[kernels.FAIL_AT] = proof.state[kernels.SOURCE_FROM]
    proof.state[kernels.FAIL_OFFSET] = offset
    _raise(proof, code)


def _show_windows(proof: _Proof) -> None:
    state = proof.state
    state[kernels.SOURCE_TO] = proof.source.filled
    state[kernels.SOURCE_IS_ALL] = proof.source.is_all
    state[kernels.OUTPUT_TO] = proof.output.filled
    state[kernels.OUTPUT_IS_ALL] = proof.output.is_all
    state[kernels.OUTPUT_POSITION] = proof.output.position


def _open_block(window: Window, at: int, kind: type[KeytailError], remedy: str) -> np.ndarray:
    """The decompressed records of the batch at index `at`, read-only."""
    header = window.bytes
    size_bytes = int.from_bytes(header[at + 8 : at + 12].tobytes(), "big") + 12
    codec = int(header[at + 22]) & 7
    try:
        data = decompress(codec, header[at + 61 : at + size_bytes].data, limit_bytes=_MOST_BLOCK_BYTES)
    except ValueError as problem:
        raise kind(
            f"a batch cannot be decompressed: {problem}",
            path=window.path,
            byte_position=window.position + at,
            offset=int.from_bytes(header[at : at + 8].tobytes(), "big", signed=True),
            remedy=remedy,
        ) from problem
    block = np.frombuffer(data, dtype=np.uint8) if len(data) else _NEVER_READ[:0]
    block.flags.writeable = False
    return block


def _finish_output(proof: _Proof) -> None:
    """Nothing is left over in the current output or in its indexes."""
    state, window, output = proof.state, proof.output, proof.current
    assert output is not None
    _show_windows(proof)
    while (code := kernels.end_of_output(window.bytes, state)) == kernels.NEED_OUTPUT:
        window.advance(int(state[kernels.OUTPUT_FROM]), 61)
        state[kernels.OUTPUT_FROM] = 0
        _show_windows(proof)
    if code == 0:
        code = kernels.close_time_index(state, output.time_index)
    if code != 0:
        _raise(proof, code)
    ends = (
        (names.INDEX, output.index, kernels.INDEX_AT),
        (names.TIME_INDEX, output.time_index, kernels.TIME_AT),
    )
    for suffix, data, at in ends:
        if state[at] != len(data):
            raise KeytailError(
                "the index has more bytes than the segment earns",
                path=output.paths[suffix],
                byte_position=int(state[at]),
                remedy=_REMEDY,
            )
    if output.txn_index:
        proof.know_markers()
    check_txn_index(
        output.txn_index,
        output.paths.get(names.TXN_INDEX, output.paths[names.LOG]),
        proof.markers,
        int(state[kernels.OUTPUT_NUMBER]),
        int(state[kernels.LOG_START]),
        _REMEDY,
    )
    proof.bytes_read += output.log_bytes + len(output.index) + len(output.time_index) + len(output.txn_index)


def _raise(proof: _Proof, code: int) -> NoReturn:
    at, offset = int(proof.state[kernels.FAIL_AT]), int(proof.state[kernels.FAIL_OFFSET])
    if code in _INDEX:
        suffix, what = _INDEX[code]
        assert proof.current is not None
        path = proof.current.paths[suffix]
        raise KeytailError(what, path=path, byte_position=at, offset=offset, remedy=_REMEDY)
    kind: type[KeytailError] = KeytailError
    window, remedy = proof.source, _REMEDY
    if code in _OUTPUT:
        window, what = proof.output, _OUTPUT[code]
    elif code in _LOST:
        what = _LOST[code]
    else:
        kind, what, remedy = CorruptLog, _SOURCE[code], _SOURCE_REMEDY
    raise kind(
        what,
        path=window.path,
        byte_position=window.position + at,
        offset=offset if offset >= 0 else None,
        remedy=remedy,
    )


def _check_newest(proof: _Proof, partition_path: str, segments: Sequence[SegmentFacts]) -> None:
    """Each key's newest record is kept, or was a tombstone past its horizon that nothing outlived."""
    offset, outlived = proof.keys.first_unjustified()
    if offset < 0:
        return
    segment = [s for s in segments if s.base_offset <= offset][-1]
    path = f"{partition_path}/{names.segment_file(segment.base_offset, names.LOG)}"
    what = "the newest record of its key is not in the output"
    if outlived:
        what = "a tombstone was removed before an older record of its key"
    raise KeytailError(
        what,
        path=path,
        byte_position=_find_batch(proof.fs, path, segment.log_bytes, offset),
        offset=int(offset),
        remedy=_REMEDY,
    )


def _find_batch(fs: FileSystem, path: str, size_bytes: int, offset: int) -> int:
    """Byte position of the batch that holds `offset`, in a file whose batches have been checked."""
    fd = fs.open_read(path)
    header = bytearray(27)
    position = 0
    try:
        while position < size_bytes:
            fs.read_into(fd, header, position)
            base, length = struct.unpack_from(">qi", header)
            # A message of magic 0 or 1 begins with its last offset.
            last_delta = struct.unpack_from(">i", header, 23)[0] if header[16] == 2 else 0
            if base + last_delta >= offset:
                break
            position += length + 12
    finally:
        fs.close(fd)
    return position
