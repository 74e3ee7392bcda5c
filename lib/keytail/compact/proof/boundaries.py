"""Finds where a proof can be divided into parts: places in a source, and the state of the walk at each place.

A place follows a batch that the offset index of the source names. The corresponding place in the output, and the state
of the output's indexes at that place, follow from the last entries of these indexes before the place and a few headers
after those entries. Nothing is checked in this module: if a state is wrong, the whole pass is proven by one walk
instead (in_parts.py).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keytail.compact.proof.state import Proof, ProofSpec
from keytail.format import names
from keytail.format.index import parse_offset_index, parse_time_index
from keytail.kernels import batch_header as v2
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import OutputSegment

_READ_BYTES = 8 << 10
# Maximum number of batches read after an index entry; with the default settings, there are at most 70
_MAX_WALKED = 1000
_HEADER = struct.Struct(">qiibihiqq")  # base offset ... maximum timestamp


@dataclass(frozen=True)
class Group:
    """One group of a proof: its sources, its outputs with the offset before which each must end, and the number of
    outputs of earlier groups.
    """

    sources: tuple[SegmentFacts, ...]
    outputs: tuple[tuple[OutputSegment, int], ...]
    outputs_before: int


class IndexState(NamedTuple):
    """The fields of `INDEXES` (kernels/proof/state.py)."""

    index_at: int = 0
    time_at: int = 0
    since_last_entry: int = 0
    max_timestamp: int = -1
    max_timestamp_offset: int = 0
    last_time_entry: int = -1

    def after(self, batch: _Batch, interval_bytes: int) -> IndexState:
        """Return the state after an output batch and the index entries that are due for it (format/INDEX.md)."""
        now = self
        if batch.max_timestamp_ms > now.max_timestamp:
            now = now._replace(max_timestamp=batch.max_timestamp_ms, max_timestamp_offset=batch.last_offset)
        if now.since_last_entry > interval_bytes:
            now = now._replace(index_at=now.index_at + 8, since_last_entry=0)
            if now.max_timestamp > now.last_time_entry:
                now = now._replace(time_at=now.time_at + 12, last_time_entry=now.max_timestamp)
        return now._replace(since_last_entry=now.since_last_entry + batch.size_bytes)


@dataclass(frozen=True)
class Boundary:
    """The state of a walk over a group. For the source: its number, the byte position in it, and the last offset
    passed. For the output: the same, whether its next batch is already checked, and the state of its indexes.
    """

    source: int
    source_position: int
    source_last_offset: int
    output: int
    output_position: int
    output_last_offset: int
    is_checked: bool
    indexes: IndexState

    @classmethod
    def of(cls, proof: Proof, source: int, outputs_before: int) -> Boundary:
        """Return the state that the walk of `proof` has reached in the source with index `source` of a group."""
        state = proof.state
        indexes = IndexState(*(int(state.indexes[name]) for name in IndexState._fields))
        return cls(
            source,
            proof.source.position + int(state.source.at),
            int(state.source.last_offset),
            int(state.output.number) - outputs_before,
            proof.output.position + int(state.output.at),
            max(int(state.output.last_offset), int(state.output.base_offset) - 1),
            bool(state.output.is_checked),
            indexes,
        )

    def set_in(self, proof: Proof) -> None:
        """Set the state of a walk whose files are open at the positions of this boundary."""
        source, output, indexes = proof.state.source, proof.state.output, proof.state.indexes
        source.last_offset = self.source_last_offset
        output.last_offset, output.is_checked = self.output_last_offset, self.is_checked
        for name, value in self.indexes._asdict().items():
            setattr(indexes, name, value)


@dataclass(frozen=True)
class _Batch:
    position: int
    base_offset: int
    size_bytes: int
    last_offset: int
    max_timestamp_ms: int


class _NoBoundary(Exception):
    """There is no boundary near a place."""


def boundaries_of(fs: FileSystem, spec: ProofSpec, group: Group, part_bytes: int) -> list[Boundary]:
    """Return the boundaries that are found, in the order of the log, about `part_bytes` of sources apart."""
    found: list[Boundary] = []
    due, before = part_bytes, 0
    for number, segment in enumerate(group.sources):
        end = before + segment.log_bytes
        if due < end:
            entries = _positions(fs, spec, segment)
            while due < end:
                at = int(np.searchsorted(entries, due - before))
                if at == len(entries):
                    break
                with contextlib.suppress(_NoBoundary, OSError, struct.error):
                    found.append(_boundary(fs, spec, group, number, int(entries[at])))
                due = max(due, before + int(entries[at])) + part_bytes
        before = end
    return found


def _positions(fs: FileSystem, spec: ProofSpec, segment: SegmentFacts) -> np.ndarray:
    """Return the positions in the offset index of a source (int64), up to the first position that does not ascend."""
    if not segment.index_bytes:
        return np.empty(0, np.int64)
    path = os.path.join(spec.partition_path, names.segment_file(segment.base_offset, names.INDEX))
    with contextlib.suppress(OSError):
        positions = parse_offset_index(fs.read_bytes(path))["position"].astype(np.int64)
        rises = np.diff(positions, prepend=-1) > 0
        return positions if rises.all() else positions[: int(np.argmin(rises))]
    return np.empty(0, np.int64)


def _boundary(fs: FileSystem, spec: ProofSpec, group: Group, number: int, position: int) -> Boundary:
    """Return the boundary after the batch at `position` of a source. Raises _NoBoundary if none is found."""
    segment = group.sources[number]
    path = os.path.join(spec.partition_path, names.segment_file(segment.base_offset, names.LOG))
    [before, following] = _first(_batches(fs, path, segment.log_bytes, position), 2)
    which = [
        k
        for k, (output, end) in enumerate(group.outputs)
        if output.base_offset <= before.base_offset and following.base_offset < end
    ]
    if not which:
        raise _NoBoundary
    output, _ = group.outputs[which[-1]]
    directory = spec.scratch_path or spec.partition_path
    files = {file.suffix: file for file in output.files}
    paths = {suffix: os.path.join(directory, file.name) for suffix, file in files.items()}
    state, start = _entry_before(fs, paths, output.base_offset, before.last_offset)
    last_offset, is_kept = output.base_offset - 1, False
    size_bytes = files[names.LOG].size_bytes
    at, next_batch = start, None
    for batch in _batches(fs, paths[names.LOG], size_bytes, start) if start < size_bytes else ():
        if batch.base_offset > before.base_offset:
            next_batch = batch
            break
        if batch.position > start or not state.index_at:
            state = state.after(batch, spec.index_interval_bytes)
        else:
            state = state._replace(since_last_entry=batch.size_bytes)
        at, last_offset = batch.position + batch.size_bytes, batch.last_offset
        is_kept = batch.base_offset == before.base_offset
    if next_batch is None and at < size_bytes:
        raise _NoBoundary
    is_checked = not is_kept and next_batch is not None
    if is_checked and next_batch is not None:
        state, last_offset = state.after(next_batch, spec.index_interval_bytes), next_batch.last_offset
    position = following.position
    return Boundary(number, position, before.last_offset, which[-1], at, last_offset, is_checked, state)


def _entry_before(
    fs: FileSystem, paths: dict[str, str], base_offset: int, offset: int
) -> tuple[IndexState, int]:
    """Return the state after the last entry of an output at or below an offset, without the size of the entry's batch,
    and the position of that batch. Without such an entry, return the state and the position of the start.
    """
    offsets = parse_offset_index(fs.read_bytes(paths[names.INDEX]))
    n = int(np.searchsorted(offsets["relative_offset"], offset - base_offset, side="right"))
    if n == 0:
        return IndexState(max_timestamp_offset=base_offset), 0
    times = parse_time_index(fs.read_bytes(paths[names.TIME_INDEX]))
    k = int(np.searchsorted(times["relative_offset"], offsets["relative_offset"][n - 1], side="right"))
    newest, of_newest = -1, base_offset
    if k:
        newest, of_newest = int(times["timestamp_ms"][k - 1]), base_offset + int(times["relative_offset"][k - 1])
    return IndexState(8 * n, 12 * k, 0, newest, of_newest, newest), int(offsets["position"][n - 1])


def _batches(fs: FileSystem, path: str, size_bytes: int, position: int) -> Iterator[_Batch]:
    """Yield the headers of the batches of version 2 from `position` on. Raises _NoBoundary after too many batches, and
    at a batch of another version."""
    buffer, filled, begin = np.empty(_READ_BYTES, np.uint8), 0, position
    fd = fs.open_read(path)
    try:
        for _ in range(_MAX_WALKED):
            if position + v2.HEADER_BYTES > size_bytes:
                return
            if position + v2.HEADER_BYTES > begin + filled:
                begin, filled = position, min(_READ_BYTES, size_bytes - position)
                fs.read_into(fd, buffer[:filled], position)
            base, length, _, magic, _, _, delta, _, newest = _HEADER.unpack_from(buffer.data, position - begin)
            if magic != 2 or length < 0 or delta < 0:
                raise _NoBoundary
            yield _Batch(position, base, length + v2.LENGTH_PREFIX_BYTES, base + delta, newest)
            position += length + v2.LENGTH_PREFIX_BYTES
    finally:
        fs.close(fd)
    raise _NoBoundary


def _first(batches: Iterator[_Batch], n: int) -> list[_Batch]:
    found = [batch for _, batch in zip(range(n), batches, strict=False)]
    if len(found) < n:
        raise _NoBoundary
    return found
