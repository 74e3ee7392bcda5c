"""The proof before the commit: reads the outputs back and checks them against the sources that they replace.

Every output batch must be a batch of the source with all, some or none of its records. The removal of a record must be
justified (format/CLEANING.md), such as by a later record of its key that is retained, by its own expiry as a tombstone,
or by an aborted transaction. The index files must be those that the output's bytes require. The proof has its own
reader, parser of records, key hash and table of transactions; it shares with the writer the codecs and the code that
divides large blocks into pieces. The proof changes nothing; at the first violation, it raises an error.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keytail.compact.proof.boundaries import Group
from keytail.compact.proof.in_parts import prove_in_parts
from keytail.compact.proof.keys import MIN_MEMORY_BYTES, Keys
from keytail.compact.proof.markers import SOURCE_REMEDY
from keytail.compact.proof.messages import note_present_message, prove_message
from keytail.compact.proof.output import finish_output, open_block, open_checked, start_output
from keytail.compact.proof.pieces import prove_in_pieces
from keytail.compact.proof.state import REMEDY, PartOfProof, Proof, ProofSoFar, ProofSpec
from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.kernels.proof import codes
from keytail.kernels.proof.rest import note_rest
from keytail.kernels.proof.state import IndexFiles
from keytail.kernels.proof.step import step
from keytail.log.fs import FileSystem
from keytail.log.records.pieces import WHOLE_BLOCK_RECORDS

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replacement.replace import GroupOutput

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class ProofReport:
    """The figures of a proof that has passed."""

    batches_checked: int
    batches_kept: int
    records_checked: int
    records_kept: int
    keys: int
    bytes_read: int
    so_far: ProofSoFar | None = None  # the state for the next pass, if there is one


def prove(
    fs: FileSystem, spec: ProofSpec, so_far: ProofSoFar | None = None, part: PartOfProof | None = None
) -> ProofReport:
    """Return the figures of the proof that the groups of `spec` may replace the segments that they name. Raises
    KeytailError if they may not, CorruptLog for a corrupt source.

    If there are several passes, `so_far` is taken from the report of the previous pass. The removal of a record is
    justified by a record that the pass retains, or by a record that is still present in later segments; with a `part`,
    this is checked when the parts are merged. The first pass reads the segments of all passes, so that errors in any of
    them are found before anything is replaced; each later pass reads only its own segments.
    """
    segments = spec.segments
    below_end = [segment for segment in segments if segment.base_offset < spec.end_offset]
    own = segments[slice(*spec.pass_segments)] if spec.pass_segments else below_end
    if spec.erased_keys is not None:
        named = {base for group in spec.groups for base in group.source_bases}
        own = [segment for segment in segments if segment.base_offset in named]
    rest = [segment for segment in below_end if own and own[-1].base_offset < segment.base_offset]
    if part is not None:
        rest = list(part.present)
    elif spec.erased_keys is not None:
        rest = []
    check_groups(spec, own)
    shares = spec.threads > 1 and spec.erased_keys is None
    if shares and spec.groups and so_far is None and part is None and not rest:
        report = _prove_in_threads(fs, spec)
        if report is not None:
            return report
    proof = Proof(fs, spec, so_far, part)
    try:
        _prove_groups(proof)
        if so_far is None:
            last_offset = proof.state.source.last_offset
            for segment in rest:
                _walk_source(proof, segment, is_present=True)
            proof.state.source.last_offset = last_offset
        proof.put_keys()
        if part is None:
            refuse_unjustified(fs, spec.partition_path, segments, *proof.keys.first_unjustified())
        else:
            proof.keys.spill_all()
    finally:
        proof.close()
    totals = proof.state.totals
    return ProofReport(
        batches_checked=int(totals.batches_read),
        batches_kept=int(totals.batches_kept),
        records_checked=int(totals.records_read),
        records_kept=int(totals.records_kept),
        keys=proof.keys.used,
        bytes_read=proof.bytes_read,
        so_far=proof.so_far() if rest and part is None else None,
    )


def find_erased(fs: FileSystem, spec: ProofSpec) -> int:
    """Read all segments of the partition; raise KeytailError at the first record with a key of `spec.erased_keys`.

    Returns the number of bytes read.
    """
    proof = Proof(fs, spec)
    try:
        for segment in spec.segments:
            _walk_source(proof, segment, is_present=True)
    finally:
        proof.close()
    return proof.bytes_read


def _prove_in_threads(fs: FileSystem, spec: ProofSpec) -> ProofReport | None:
    """Return the report of `prove` for a cleaning with a single pass, proven in several threads; None if one thread
    must prove it."""
    keys = Keys(max(spec.memory_bytes, MIN_MEMORY_BYTES), spec.secret)
    keys.expect(spec.expected_keys)
    try:
        sums = prove_in_parts(fs, spec, groups_of(spec), keys, walk)
        if sums is None or keys.first_unjustified()[0] >= 0:
            return None
        batches, batches_kept, records, records_kept = sums
        bytes_read = sum(file.size_bytes for group in spec.groups for out in group.segments for file in out.files)
        bytes_read += sum(segment.log_bytes for group in groups_of(spec) for segment in group.sources)
        return ProofReport(batches, batches_kept, records, records_kept, keys.used, bytes_read)
    finally:
        keys.close()


def groups_of(spec: ProofSpec) -> list[Group]:
    """Return the groups with their sources and outputs, and the offset before which each output must end."""
    by_base = {segment.base_offset: segment for segment in spec.segments}
    found: list[Group] = []
    before = 0
    for group, ends in zip(spec.groups, _ends(spec.segments, spec.groups), strict=True):
        sources = tuple(by_base[base] for base in group.source_bases)
        found.append(Group(sources, tuple(zip(group.segments, ends, strict=True)), before))
        before += len(group.segments)
    return found


def _prove_groups(proof: Proof) -> None:
    for group in groups_of(proof.spec):
        proof.waiting = list(group.outputs)
        start_output(proof)
        for segment in group.sources:
            _walk_source(proof, segment, is_present=False)
        while proof.waiting:
            finish_output(proof)
            start_output(proof)
        finish_output(proof)


def _ends(segments: Sequence[SegmentFacts], groups: Sequence[GroupOutput]) -> list[list[int]]:
    """Return for each output the base offset of the group's next output or, for the last output, of the segment after
    the group's sources."""
    return [
        [*(out.base_offset for out in group.segments[1:]), base_after(segments, group.source_bases[-1])]
        for group in groups
    ]


def base_after(segments: Sequence[SegmentFacts], base_offset: int) -> int:
    """Return the base offset of the segment that follows the segment with `base_offset`; _NO_LIMIT without one."""
    at = bisect_right(segments, base_offset, key=lambda segment: segment.base_offset)
    return segments[at].base_offset if at < len(segments) else _NO_LIMIT


def check_groups(spec: ProofSpec, own: Sequence[SegmentFacts]) -> None:
    """Raise KeytailError unless the groups cover the segments `own`, in order, each exactly once, and each output has a
    possible base offset and the files of a segment."""
    path, segments, groups = spec.partition_path, spec.segments, spec.groups
    expected = [segment.base_offset for segment in own]
    covered = [base for group in groups for base in group.source_bases]
    if covered != expected:
        raise KeytailError(
            f"the groups cover the segments {covered} instead of {expected}",
            path=path,
            remedy=REMEDY,
            slug="invalid-output-segments",
        )
    needed = {names.LOG, names.INDEX, names.TIME_INDEX}
    before = -1
    for group in groups:
        bases = [segment.base_offset for segment in group.segments]
        if not group.source_bases or not bases or bases[0] != group.source_bases[0]:
            what = f"the group of segments {group.source_bases} has the output segments {bases}"
            raise KeytailError(what, path=path, remedy=REMEDY, slug="invalid-output-segments")
        for segment in group.segments:
            base = segment.base_offset
            if base <= before or base >= base_after(segments, group.source_bases[-1]):
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


def _walk_source(proof: Proof, segment: SegmentFacts, *, is_present: bool) -> None:
    """Walk all batches of a source segment and compare them with the outputs.

    If `is_present`, the segment has no output yet: its records are only noted, because they justify removals of earlier
    records. After an erasure, its keys are checked.
    """
    open_source(proof, segment)
    walk(proof, is_present=is_present)


def open_source(proof: Proof, segment: SegmentFacts) -> None:
    """Open a source at its start."""
    path = f"{proof.path}/{names.segment_file(segment.base_offset, names.LOG)}"
    open_checked(proof, proof.source, path, segment.log_bytes)
    proof.start_source(segment)


def walk(proof: Proof, stopped: Callable[[], bool] = lambda: False, *, is_present: bool = False) -> None:
    """Walk the rest of the open source, until its end or until `stopped()` is true."""
    code = codes.PASSED
    while code != codes.SOURCE_DONE and not stopped():
        windows, notes = proof.windows(), proof.keys.notes
        if is_present:
            code = note_rest(windows.source, windows.source_block, notes, proof.markers, proof.state)
        else:
            assert proof.current is not None
            indexes = IndexFiles(proof.current.index, proof.current.time_index)
            tables = proof.markers, proof.producers
            code = step(windows, indexes, notes, *tables, proof.decoders.tools, proof.state)
        _supply(proof, code, is_present)


def _supply(proof: Proof, code: int, is_present: bool) -> None:
    """Provide what a kernel requested by its return code, or raise the error for the violation that the kernel
    found."""
    if code == codes.SOURCE_DONE:
        return
    if code in (codes.NEED_SOURCE, codes.NEED_OUTPUT):
        proof.advance(is_output=code == codes.NEED_OUTPUT)
        return
    state, wanted = proof.state, proof.state.wanted
    if code == codes.NEED_SOURCE_BLOCK:
        block = open_block(proof.source, int(state.source.at), CorruptLog, SOURCE_REMEDY)
        if block is None:
            prove_in_pieces(proof, is_present=is_present)
        else:
            proof.source_block = put_block(block, proof.source_block)
            state.source.block_bytes = len(block)
    elif code == codes.NEED_OUTPUT_BLOCK:
        block = open_block(proof.output, int(state.output.at), KeytailError, REMEDY)
        if block is None:
            prove_in_pieces(proof, is_present=False)
        else:
            proof.output_block = put_block(block, proof.output_block)
            state.output.block_bytes = len(block)
    elif code == codes.NEED_NOTES and wanted.records > WHOLE_BLOCK_RECORDS:
        prove_in_pieces(proof, is_present=is_present)
    elif code == codes.NEED_NOTES:
        proof.put_keys(int(wanted.records))
    elif code == codes.NEED_MARKERS:
        proof.ensure_markers()
    elif code == codes.NEED_NEXT_OUTPUT:
        if not proof.waiting:  # the batch begins above all outputs, or its base offset is impossible
            at = int(state.source.at)
            proof.fail_at_source(codes.SOURCE_ORDER, int.from_bytes(proof.source.bytes[at : at + 8].tobytes(), "big"))
        finish_output(proof)
        start_output(proof)
    elif code == codes.NEED_LEGACY and is_present:
        note_present_message(proof)
    elif code == codes.NEED_LEGACY:
        prove_message(proof)
    else:
        proof.fail(code)


def put_block(block: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return `room`, or a larger array, that begins with the block."""
    if len(room) < len(block):
        room = np.empty(len(block), np.uint8)
    room[: len(block)] = block
    return room


def refuse_unjustified(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], offset: int, older_retained: int
) -> None:
    """Raise KeytailError for the first violation, at `offset` (-1: none), of this rule: the latest record of each key
    is retained, or it was an expired tombstone and no older record is retained.
    """
    if offset < 0:
        return
    segment = [s for s in segments if s.base_offset <= offset][-1]
    path = f"{partition_path}/{names.segment_file(segment.base_offset, names.LOG)}"
    position = _find_batch(fs, path, segment.log_bytes, offset)
    if older_retained:  # Kafka's own rules can cause this in a round that begins inside a segment (DECISIONS.md 17)
        raise KeytailError(
            "a tombstone was removed before an older record of its key",
            path=path,
            byte_position=position,
            offset=int(offset),
            remedy="Nothing was replaced. Run again with --from-log-start. If this error occurs again, keep the "
            "directory and report this: it is a bug in keytail or a failing disk",
            slug="missing-in-output",
        )
    raise KeytailError(
        "the latest record of its key is not in the output",
        path=path,
        byte_position=position,
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
