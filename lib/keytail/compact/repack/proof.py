"""Proves a repack before its commit: reads the outputs back and compares them with the sources (REPACK.md).

The outputs of a source must have exactly its records, in the same order, each with the same offset, timestamp, key,
value and headers. The header of a new batch must satisfy the rules for all source batches that it replaces. Index files
must have the content that the output requires. The proof uses another reader and another parser than the writer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np

from keytail.compact.proof.markers import SOURCE_REMEDY, collect_markers, walk_headers
from keytail.compact.proof.output import finish_log, open_block, open_checked, start_output
from keytail.compact.proof.prove import check_groups, put_block
from keytail.compact.proof.state import REMEDY, Proof, ProofSpec
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.kernels.proof import codes
from keytail.kernels.proof import repack as kernels
from keytail.kernels.proof.key_hash import SECRET_BYTES
from keytail.kernels.proof.markers import COLUMNS, CURSOR_SIZE, LAST_OFFSET
from keytail.kernels.proof.state import IndexFiles
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import GroupOutput, OutputSegment

KEPT_BATCHES = 5  # number of batches of each producer that a broker keeps in memory, to recognise duplicates
_MAX_MARKERS_BYTES = 128 << 20
_TXN_ENTRY = np.dtype([("version", ">i2"), ("producer", ">i8"), ("first", ">i8"), ("last", ">i8"), ("stable", ">i8")])

_WRONG = {
    kernels.LOST_BATCH: "a batch is not in the output",
    kernels.LOST_RECORD: "a record is not in the output",
    kernels.OUTPUT_CHANGED: "a batch differs from its source batch, which must not be changed",
    kernels.OUTPUT_MERGED: "a batch has the records of several source batches, although merging is disabled",
    kernels.OUTPUT_LARGE: "a batch is larger than allowed",
}


@dataclass(frozen=True)
class RepackSpec:
    """The input of a proof, which shows that the scratch files of `groups` may replace the segments that they name.

    `max_block_bytes` limits the uncompressed records of a merged batch (-1: merging is disabled), `max_batch_bytes` the
    size of a rebuilt batch. `codec` is the codec of all rebuilt batches; if it is None, each has the codec of its
    sources. `producer_ids` (int64, sorted) are the ids of the producers whose last batches must not be changed.
    `forgotten_ids` (int64, sorted) are the ids that merged batches may lose: such a producer may have no batch after
    `expired_before_ms`, and its transactions must have been committed below `end_offset`. In later passes, `proven` is
    taken from the report of the first pass.
    """

    partition_path: str
    segments: Sequence[SegmentFacts]  # all segments of the partition, ascending
    groups: Sequence[GroupOutput]  # in ascending order, each with one source
    log_end_offset: int
    max_block_bytes: int
    max_batch_bytes: int
    codec: int | None
    producer_ids: np.ndarray
    index_interval_bytes: int
    segment_index_bytes: int
    scratch_path: str
    forgotten_ids: np.ndarray
    expired_before_ms: int | None
    end_offset: int
    proven: ProvenProducers | None = None


@dataclass(frozen=True)
class ProvenProducers:
    """Facts about producers that the proof has found. `kept` are the base offsets (int64, sorted) of batches that must
    not be changed. `markers` are all markers of the log (kernels/proof/markers.py), or empty if no producers are
    forgotten."""

    kept: np.ndarray
    markers: np.ndarray


@dataclass(frozen=True)
class RepackReport:
    """The report of a proof that has passed: the numbers of source batches, output batches and compared records.
    `producers` is an input of the next pass.
    """

    source_batches: int
    output_batches: int
    records: int
    producers: ProvenProducers


def prove_repack(fs: FileSystem, spec: RepackSpec) -> RepackReport:
    """Prove that the groups may replace their sources, and return the report. Raises KeytailError if the proof fails,
    and CorruptLog for a corrupt source."""
    by_base = {segment.base_offset: segment for segment in spec.segments}
    named = [by_base.get(base) for group in spec.groups for base in group.source_bases]
    own = [segment for segment in named if segment is not None]
    proof = _RepackProof(fs, spec)
    try:
        if len(own) < len(named) or any(len(group.source_bases) != 1 for group in spec.groups):
            raise _invalid(spec, "a group does not have exactly one source segment")
        check_groups(proof.spec, own)
        bases = [segment.base_offset for segment in spec.segments]
        next_base = dict(pairwise([*bases, max(spec.log_end_offset, bases[-1] + 1)]))
        producers = _producers(fs, spec) if spec.proven is None else spec.proven
        proof.of_producers = kernels.Producers(producers.kept, spec.forgotten_ids, producers.markers)
        for group, source in zip(spec.groups, own, strict=True):
            proof.prove_group(group, source, next_base[source.base_offset])
    finally:
        proof.close()
    totals = proof.state.totals
    return RepackReport(int(totals.batches_read), int(totals.batches_kept), int(totals.records_read), producers)


def _invalid(spec: RepackSpec, what: str) -> KeytailError:
    return KeytailError(what, path=spec.partition_path, remedy=REMEDY, slug="invalid-output-segments")


def _producers(fs: FileSystem, spec: RepackSpec) -> ProvenProducers:
    """Return the last batches of the live producers and the markers, from the headers of the log.

    Raises KeytailError if a forgotten producer is live or has a batch that is too new; Refused for too many markers.
    """
    ids, forgotten = np.array(spec.producer_ids, np.int64), np.array(spec.forgotten_ids, np.int64)
    markers = np.empty((0, COLUMNS), np.int64)
    if not len(ids) and not len(forgotten):
        return ProvenProducers(np.empty(0, np.int64), markers)
    latest = np.full((len(ids), KEPT_BATCHES), -1, np.int64)
    newest_ms = np.full(len(forgotten), np.iinfo(np.int64).min)
    cursor = np.zeros(CURSOR_SIZE, np.int64)
    cursor[LAST_OFFSET] = -1
    walk_headers(
        fs, spec.partition_path, spec.segments, cursor,
        lambda data: int(kernels.note_producers(data, cursor, ids, latest, forgotten, newest_ms)),
    )  # fmt: skip
    if len(forgotten):
        live = np.isin(forgotten, ids)
        live |= True if spec.expired_before_ms is None else newest_ms > spec.expired_before_ms
        if live.any():
            raise _invalid(spec, f"producer id {forgotten[live.argmax()]} has not expired")
        found = collect_markers(fs, spec.partition_path, spec.segments, _MAX_MARKERS_BYTES)
        if found is None:
            raise Refused(
                f"the transaction markers of the log take more than {_MAX_MARKERS_BYTES >> 20} MiB of memory",
                path=spec.partition_path,
                remedy="Run without --forget-producers",
                slug="too-many-transactions",
            )
        markers = found
    return ProvenProducers(np.sort(latest[latest >= 0]), markers)


def read_txn_index(fs: FileSystem, path: str, segment: SegmentFacts) -> bytes:
    """Return the transaction index of a source. Raises KeytailError if the file's size differs from the planned one."""
    data = fs.read_bytes(path)
    if len(data) != segment.txn_index_bytes:
        raise KeytailError(
            f"the file has {len(data)} bytes; it had {segment.txn_index_bytes} bytes when the run was planned",
            path=path,
            remedy="Another process writes to this directory: stop it, then run again",
            slug="file-size-differs",
        )
    return data


class _RepackProof(Proof):
    """The state of one proof of a repack, which uses the windows and the messages of a compaction's proof."""

    def __init__(self, fs: FileSystem, spec: RepackSpec) -> None:
        self.repack = spec
        super().__init__(
            fs,
            ProofSpec(
                spec.partition_path,
                spec.segments,
                spec.groups,
                first_dirty_offset=0,
                end_offset=spec.log_end_offset,
                first_uncleanable_offset=spec.log_end_offset,
                now_ms=0,
                delete_retention_ms=0,
                index_interval_bytes=spec.index_interval_bytes,
                drop_keyless=False,
                memory_bytes=0,
                secret=bytes(SECRET_BYTES),
                segment_index_bytes=spec.segment_index_bytes,
                scratch_path=spec.scratch_path,
                keep_magic=True,
            ),
        )
        self.run = np.zeros(kernels.RUN, np.int64)
        self.run[kernels.MAX_BLOCK_BYTES] = spec.max_block_bytes
        self.run[kernels.MAX_BATCH_BYTES] = spec.max_batch_bytes
        self.run[kernels.CODEC] = -1 if spec.codec is None else spec.codec
        self.run[kernels.END_OFFSET] = spec.end_offset
        no_ids = np.empty(0, np.int64)
        self.of_producers = kernels.Producers(no_ids, no_ids, np.empty((0, COLUMNS), np.int64))

    def prove_group(self, group: GroupOutput, source: SegmentFacts, next_base: int) -> None:
        """Prove the outputs of one source segment, whose offsets are below `next_base`."""
        bases = [output.base_offset for output in group.segments]
        if bases[-1] >= next_base:
            raise _invalid(self.repack, f"an output segment has the wrong base offset {bases[-1]}")
        self.waiting = list(zip(group.segments, [*bases[1:], next_base], strict=True))
        self.state.output.last_offset = source.base_offset - 1
        start_output(self)
        path = f"{self.path}/{names.segment_file(source.base_offset, names.LOG)}"
        open_checked(self, self.source, path, source.log_bytes)
        self.start_source(source)
        txn_index = []
        while True:
            windows = self.windows()
            assert self.current is not None
            indexes = IndexFiles(self.current.index, self.current.time_index)
            code = kernels.step(windows, indexes, self.of_producers, self.decoders.tools, self.state, self.run)
            if code == codes.SOURCE_DONE:
                break
            if code == codes.NEED_NEXT_OUTPUT and self.waiting:
                txn_index.append(finish_log(self).txn_index)
                start_output(self)
            else:
                self._supply(code)
        txn_index.append(finish_log(self).txn_index)
        if self.waiting:
            raise _invalid(self.repack, f"an output segment has no batches: {self.waiting[0][0].base_offset}")
        self._check_txn_index(source, group.segments, txn_index, next_base)

    def _supply(self, code: int) -> None:
        """Provide the data that the kernel's return code requests, or raise the error that this code means."""
        if code in (codes.NEED_SOURCE, codes.NEED_OUTPUT):
            self.advance(is_output=code == codes.NEED_OUTPUT)
        elif code == codes.NEED_SOURCE_BLOCK:
            at = int(self.state.source.at)
            block = open_block(self.source, at, CorruptLog, SOURCE_REMEDY)
            if block is None:
                self.state.failure.at = self.state.output.at
                self.fail(kernels.OUTPUT_CHANGED)  # a source batch that is too large to be rebuilt
            self.source_block = put_block(block, self.source_block)
            self.state.source.block_bytes = len(block)
        elif code == codes.NEED_OUTPUT_BLOCK:
            block = open_block(self.output, int(self.state.output.at), KeytailError, REMEDY)
            if block is None:
                self.state.failure.at = self.state.output.at
                self.fail(kernels.OUTPUT_LARGE)
            self.output_block = put_block(block, self.output_block)
            self.state.output.block_bytes = len(block)
        elif code == codes.NEED_NEXT_OUTPUT:  # the batch is above the last output
            at = int(self.state.source.at)
            self.fail_at_source(codes.SOURCE_ORDER, int.from_bytes(self.source.bytes[at : at + 8].tobytes(), "big"))
        else:
            self.fail(code)

    def fail(self, code: int) -> NoReturn:
        if code not in _WRONG:
            super().fail(code)
        is_output = code >= kernels.FIRST_OF_OUTPUT
        window = self.output if is_output else self.source
        raise KeytailError(
            _WRONG[code],
            path=window.path,
            byte_position=window.position + int(self.state.failure.at),
            offset=int(self.state.failure.offset),
            remedy=REMEDY,
            slug="invalid-output-batch" if is_output else "missing-in-output",
        )

    def _check_txn_index(
        self, source: SegmentFacts, outputs: Sequence[OutputSegment], found: Sequence[bytes], next_base: int
    ) -> None:
        """Raise KeytailError unless the transaction indexes of the outputs together have the entries of the source,
        each in the output that contains the entry's last offset."""
        path = os.path.join(self.path, names.segment_file(source.base_offset, names.TXN_INDEX))
        before = b"" if source.txn_index_bytes is None else read_txn_index(self.fs, path, source)
        bases = [output.base_offset for output in outputs]
        is_same = b"".join(found) == before
        for data, base, end in zip(found, bases, [*bases[1:], next_base], strict=True):
            if is_same and len(outputs) > 1:
                is_same = len(data) % _TXN_ENTRY.itemsize == 0
                is_same = is_same and all(base <= entry["last"] < end for entry in np.frombuffer(data, _TXN_ENTRY))
        if not is_same:
            raise KeytailError(
                "the transaction indexes of the outputs differ from the transaction index of their source",
                path=f"{self.scratch_path}/{outputs[0].files[0].name}",
                offset=source.base_offset,
                remedy=REMEDY,
                slug="invalid-output-index",
            )
