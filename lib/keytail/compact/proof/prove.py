"""The proof before the commit: reads back what was written and checks it against what it replaces.

Every output batch must be a batch of the source with fewer records, every removed record of the source must be
justified by a later one that is kept (or by an expired tombstone, or because its transaction was aborted), and the
index files must be those that the output's bytes require. Shares no reader, walker, hash or view of transactions with
the writer; changes nothing, and raises on the first violation with its place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keytail.compact.proof.messages import prove_message
from keytail.compact.proof.output import finish_output, open_block, open_checked, start_output
from keytail.compact.proof.pieces import prove_in_pieces
from keytail.compact.proof.rest import note_segment
from keytail.compact.proof.state import REMEDY, SOURCE_REMEDY, PartOfProof, Proof, ProofSoFar
from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.kernels import proof as kernels
from keytail.log.fs import FileSystem
from keytail.log.records.pieces import WHOLE_BLOCK_RECORDS

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replace import GroupOutput

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class ProofReport:
    """What a passed proof checked."""

    batches_checked: int
    batches_kept: int
    records_checked: int
    records_kept: int
    keys: int
    bytes_read: int
    so_far: ProofSoFar | None = None  # for the next round, if there is one


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
    round_of: tuple[int, int] | None = None,
    so_far: ProofSoFar | None = None,
    part: PartOfProof | None = None,
    expected_keys: int = 0,
    removal_limit_offset: int = 2**63 - 1,
    scratch_path: str | None = None,
    keep_magic: bool = False,
    by_file_time: bool = False,
) -> ProofReport:
    """Raises unless `groups` (ascending, on disk as scratch files) may replace the segments that they name.

    `segments` are ALL of the partition's, ascending, also those above the rewritten ones: they may contain markers of
    transactions. [`first_dirty_offset`, `end_offset`) was mapped. `active_producers` (sorted ids, last data offset of
    each or -1, epochs) are not checked if None. `memory_bytes` (at least 4 MiB) limits the table of keys and that of
    markers; `expected_keys` avoids growing the former step by step. A corrupt source raises CorruptLog. At or above
    `removal_limit_offset` no tombstone and no marker may be removed for its age alone. The scratch files are beside the
    sources, or in `scratch_path`. With `keep_magic` the remainder of messages of magic 0 and 1 has that magic. With
    `by_file_time` the rules are those of CLEANING.md 16.

    In rounds, `groups` are those of one round and replace `segments[a:b]`, (a, b) = `round_of`; `so_far` is taken from
    the report of the previous round. What a round removes is justified by what it keeps, or by what is still present
    above it. The first round reads the segments of all the others, so that errors in them are found before anything is
    replaced; each later round reads only its own.
    """
    mine = segments[slice(*round_of)] if round_of else [s for s in segments if s.base_offset < end_offset]
    rest = [s for s in segments if mine and mine[-1].base_offset < s.base_offset < end_offset]
    if part is not None:
        rest = list(part.present)
    _check_groups(partition_path, segments, groups, mine)
    proof = Proof(fs, partition_path, segments, segment_index_bytes, memory_bytes, so_far, part, scratch_path)
    proof.keys.expect(expected_keys)
    if active_producers is not None:
        proof.producers = np.array(active_producers, dtype=np.int64)
    state = proof.state
    clean = [segment for segment in segments if segment.base_offset < first_dirty_offset]
    if clean:
        proof.file_horizon_ms = clean[-1].log_mtime_ns // 1_000_000 - delete_retention_ms
    horizon_ms = now_ms + delete_retention_ms
    has_horizon = horizon_ms < 2**63 and not by_file_time
    for at, value in (
        (kernels.FIRST_DIRTY, first_dirty_offset),
        (kernels.END_OFFSET, end_offset),
        (kernels.FIRST_UNCLEANABLE, first_uncleanable_offset),
        (kernels.NOW_MS, now_ms),
        (kernels.HORIZON_MS, horizon_ms if has_horizon else -1),
        (kernels.INTERVAL_BYTES, index_interval_bytes),
        (kernels.DROP_KEYLESS, drop_keyless),
        (kernels.LOG_START, log_start_offset),
        (kernels.REMOVAL_LIMIT, removal_limit_offset),
        (kernels.KEEP_MAGIC, keep_magic),
        (kernels.BY_FILE_TIME, by_file_time),
    ):
        state[at] = value
    if so_far is None:
        state[[kernels.SOURCE_LAST_OFFSET, kernels.OUTPUT_LAST_OFFSET_SEEN, kernels.OUTPUT_NUMBER]] = -1
    by_base = {segment.base_offset: segment for segment in segments}
    ends = _ends(segments, groups)
    try:
        for group, group_ends in zip(groups, ends, strict=True):
            proof.waiting = list(zip(group.segments, group_ends, strict=True))
            start_output(proof)
            for base in group.source_bases:
                _prove_source(proof, by_base[base])
            while proof.waiting:
                finish_output(proof)
                start_output(proof)
            finish_output(proof)
        if so_far is None:
            last_offset = state[kernels.SOURCE_LAST_OFFSET]
            for segment in rest:
                note_segment(proof, segment)
            state[kernels.SOURCE_LAST_OFFSET] = last_offset
        proof.put_keys()
        if part is None:
            refuse_unjustified(fs, partition_path, segments, *proof.keys.first_unjustified())
        else:
            proof.keys.spill_all()
    finally:
        proof.close()
    return ProofReport(
        batches_checked=int(state[kernels.BATCHES_READ]),
        batches_kept=int(state[kernels.BATCHES_KEPT]),
        records_checked=int(state[kernels.RECORDS_READ]),
        records_kept=int(state[kernels.RECORDS_KEPT]),
        keys=proof.keys.used,
        bytes_read=proof.bytes_read,
        so_far=proof.so_far() if rest and part is None else None,
    )


def _ends(segments: Sequence[SegmentFacts], groups: Sequence[GroupOutput]) -> list[list[int]]:
    """Return for each output of each group the base of the next output or segment."""
    outputs = [segment.base_offset for group in groups for segment in group.segments]
    last_source = groups[-1].source_bases[-1] if groups else -1
    behind = [segment.base_offset for segment in segments if segment.base_offset > last_source]
    bases = iter([*outputs, behind[0] if behind else _NO_LIMIT][1:])
    return [[next(bases) for _ in group.segments] for group in groups]


def _check_groups(
    path: str, segments: Sequence[SegmentFacts], groups: Sequence[GroupOutput], mine: Sequence[SegmentFacts]
) -> None:
    """Check that the groups cover `mine` of the segments, in order, each exactly once."""
    expected = [segment.base_offset for segment in mine]
    covered = [base for group in groups for base in group.source_bases]
    if covered != expected:
        raise KeytailError(
            f"the groups cover the segments {covered} instead of {expected}",
            path=path,
            remedy=REMEDY,
            slug="invalid-output-segments",
        )
    needed = {names.LOG, names.INDEX, names.TIME_INDEX}
    following = [segment.base_offset for segment in segments if mine and segment.base_offset > expected[-1]]
    before = -1
    for group in groups:
        bases = [segment.base_offset for segment in group.segments]
        if not group.source_bases or not bases or bases[0] != group.source_bases[0]:
            what = f"the group of segments {group.source_bases} has the output segments {bases}"
            raise KeytailError(what, path=path, remedy=REMEDY, slug="invalid-output-segments")
        for segment in group.segments:
            base = segment.base_offset
            if base <= before or (following and base >= following[0]):
                raise KeytailError(
                    f"an output segment has the wrong base offset {base}",
                    path=path,
                    offset=base,
                    remedy=REMEDY,
                    slug="invalid-output-segments",
                )
            before = base
            suffixes = sorted(file.suffix for file in segment.files)
            if len(set(suffixes)) < len(suffixes) or not needed <= set(suffixes) <= {*needed, names.TXN_INDEX}:
                what = f"the output segment {base} has the files {suffixes}"
                raise KeytailError(what, path=path, remedy=REMEDY, slug="invalid-output-segments")


def _prove_source(proof: Proof, segment: SegmentFacts) -> None:
    """Walk a source to its end beside the outputs."""
    source_path = f"{proof.path}/{names.segment_file(segment.base_offset, names.LOG)}"
    open_checked(proof, proof.source, source_path, segment.log_bytes)
    state, source, output = proof.state, proof.source, proof.output
    state[kernels.SOURCE_FROM] = 0
    state[kernels.FILE_IS_OLD] = segment.log_mtime_ns // 1_000_000 <= proof.file_horizon_ms
    state[kernels.SOURCE_LAST_OFFSET] = max(int(state[kernels.SOURCE_LAST_OFFSET]), segment.base_offset - 1)
    state[kernels.SOURCE_BLOCK_BYTES] = state[kernels.OUTPUT_BLOCK_BYTES] = -1
    proof.bytes_read += segment.log_bytes
    while True:
        proof.show_windows()
        current = proof.current
        assert current is not None
        code = kernels.step(
            source.bytes,
            output.bytes,
            proof.source_block,
            proof.output_block,
            current.index,
            current.time_index,
            proof.keys.notes.pending,
            proof.keys.notes.keys,
            proof.markers,
            proof.producers,
            proof.decoders.tools,
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
            block = open_block(source, int(state[kernels.SOURCE_FROM]), CorruptLog, SOURCE_REMEDY)
            if block is None:
                prove_in_pieces(proof)
                continue
            proof.source_block = _put(block, proof.source_block)
            state[kernels.SOURCE_BLOCK_BYTES] = len(block)
        elif code == kernels.NEED_OUTPUT_BLOCK:
            block = open_block(output, int(state[kernels.OUTPUT_FROM]), KeytailError, REMEDY)
            if block is None:
                prove_in_pieces(proof)
                continue
            proof.output_block = _put(block, proof.output_block)
            state[kernels.OUTPUT_BLOCK_BYTES] = len(block)
        elif code == kernels.NEED_NOTES and state[kernels.WANTED_BYTES] > WHOLE_BLOCK_RECORDS:
            prove_in_pieces(proof)
        elif code == kernels.NEED_NOTES:
            proof.put_keys(int(state[kernels.WANTED_BYTES]), int(state[kernels.WANTED_KEY_BYTES]))
        elif code == kernels.NEED_MARKERS:
            proof.know_markers()
        elif code == kernels.NEED_NEXT_OUTPUT:
            if not proof.waiting:  # its offsets are those of segments after all outputs, or of no log
                at = int(state[kernels.SOURCE_FROM])
                proof.lost(kernels.SOURCE_ORDER, int.from_bytes(source.bytes[at : at + 8].tobytes(), "big"))
            finish_output(proof)
            start_output(proof)
        elif code == kernels.NEED_LEGACY:
            prove_message(proof)
        else:
            proof.fail(code)


def _put(block: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return `room`, or a larger array, that begins with the block."""
    if len(room) < len(block):
        room = np.empty(len(block), np.uint8)
    room[: len(block)] = block
    return room


def refuse_unjustified(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], offset: int, outlived: int
) -> None:
    """Raise unless each key's latest record is kept, or was a tombstone past its horizon that no older record outlived.

    `offset` is that of the first violation, -1 if there is none.
    """
    if offset < 0:
        return
    segment = [s for s in segments if s.base_offset <= offset][-1]
    path = f"{partition_path}/{names.segment_file(segment.base_offset, names.LOG)}"
    what = "the latest record of its key is not in the output"
    if outlived:
        what = "a tombstone was removed before an older record of its key"
    raise KeytailError(
        what,
        path=path,
        byte_position=_find_batch(fs, path, segment.log_bytes, offset),
        offset=int(offset),
        remedy=REMEDY,
        slug="missing-in-output",
    )


def _find_batch(fs: FileSystem, path: str, size_bytes: int, offset: int) -> int:
    """Return the byte position of the batch that contains `offset`, in a file whose batches have been checked."""
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
