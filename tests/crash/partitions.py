"""Small partition directories with replacements that are ready to be committed, and checks of the states of a commit.
The outputs are given: these tests check which bytes a broker finds, not which records are retained.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.indexing import index_files
from tests.reference.loader import Loaded, LoadedSegment, load, load_before_3

INTERVAL_BYTES = 50  # less than a batch, so that every batch except the first has an index entry
PARTITION = "orders-0"
SCRATCH = ".r1.a1.clean"
NO_PRODUCERS = bytes.fromhex("0001 48674bc7 00000000")  # a producer snapshot without entries


@dataclass(frozen=True)
class Group:
    """Some sources and their retained offsets. `txn_index` is that of the last output, None if it has none. `continued`
    are the base offsets of the outputs after the first; each output has the retained offsets from its base offset on.
    """

    source_bases: tuple[int, ...]
    kept: tuple[int, ...]
    txn_index: bytes | None = None
    continued: tuple[int, ...] = ()

    @property
    def base(self) -> int:
        return self.source_bases[0]

    @property
    def outputs(self) -> dict[int, bytes]:
        """Return the logs of the outputs by base offset."""
        bases = (self.base, *self.continued)
        return {
            low: log_of([o for o in self.kept if low <= o < high])
            for low, high in zip(bases, (*self.continued, 2**62), strict=True)
        }

    def txn_index_of(self, base: int) -> bytes | None:
        return self.txn_index if base == max(self.outputs) else None

    @property
    def end(self) -> int:
        return max([*self.outputs, *(offset + 1 for offset in self.kept)])

    @property
    def parts(self) -> list[Group]:
        """Return the parts: an output with the base offset of a source is replaced separately, after the outputs before
        it.
        """
        starts = [base for base in self.outputs if base in self.source_bases]
        return [
            Group(
                tuple(base for base in self.source_bases if low <= base < high),
                tuple(offset for offset in self.kept if low <= offset < high),
                self.txn_index if high == 2**62 else None,
                tuple(base for base in self.continued if low < base < high),
            )
            for low, high in zip(starts, (*starts[1:], 2**62), strict=True)
        ]


@dataclass(frozen=True)
class Partition:
    """The offsets of the records in each segment, by base offset; the last segment is active."""

    segments: Mapping[int, Sequence[int]]
    groups: tuple[Group, ...]
    txn_indexes: Mapping[int, bytes] = field(default_factory=dict)

    def make(self, log_dir: Path) -> None:
        """Write the partition with all files that exist before the first commit: sources, scratch files and snapshots.
        """
        path = log_dir / PARTITION
        path.mkdir(parents=True)
        for base, offsets in self.segments.items():
            write_segment(path, base, log_of(offsets), "", self.txn_indexes.get(base))
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(NO_PRODUCERS)
        for group in self.groups:
            for base, log in group.outputs.items():
                write_segment(path, base, log, SCRATCH, group.txn_index_of(base))

    def outputs(self) -> list[GroupOutput]:
        return [
            GroupOutput(
                group.source_bases,
                tuple(_output_segment(base, log, group.txn_index_of(base)) for base, log in group.outputs.items()),
            )
            for group in self.groups
        ]

    @property
    def parts(self) -> list[Group]:
        """Return the parts that are each replaced in one step, in the order of the commits."""
        return [part for group in self.groups for part in group.parts]

    def judge(self, loaded: Loaded) -> list[bool]:
        """Return for each part whether a broker finds it replaced. Raises AssertionError if it finds other files than
        sources or outputs.

        Sources at or above the end of their outputs may exist after the commit: all their records are superseded or
        expired, so that they do not change the contents.
        """
        found = dict(loaded.segments)
        for base, segment in found.items():
            index, time_index = index_files(segment.log, base, INTERVAL_BYTES)
            assert segment.index in (None, index), f"the index of {base} does not match its log"
            assert segment.time_index in (None, time_index), f"the time index of {base} does not match its log"
        replaced = []
        expected = set(self.segments)
        for part in self.parts:
            present = [base for base in part.source_bases if base in found]
            as_sources = present == list(part.source_bases) and all(
                found[base].log == log_of(self.segments[base]) for base in present
            )
            if as_sources and not self._same(part):
                replaced.append(False)
                if found[part.base].index is not None:  # without an offset index, a broker also rebuilds this
                    assert found[part.base].txn_index == self.txn_indexes.get(part.base)
            else:
                replaced.append(True)
                expected |= part.outputs.keys()
                self._check_replaced(part, found, present)
        assert replaced == sorted(replaced, reverse=True), (
            f"a later part was not replaced before an earlier one: {replaced}"
        )
        sources = {base for part in self.parts for base in part.source_bases}
        for base in self.segments.keys() - sources:
            assert base in found and found[base].log == log_of(self.segments[base]), f"segment {base} changed"
        assert found.keys() <= expected, f"found {sorted(found)}, but expected only {sorted(expected)}"
        return replaced

    def _check_replaced(self, part: Group, found: Mapping[int, LoadedSegment], present: list[int]) -> None:
        for base, log in part.outputs.items():
            assert base in found, f"no segment at {base}"
            assert found[base].log == log, f"neither the source nor the output at {base}"
            if found[base].index is not None:
                # If the only output is empty, the index of the source remains, because no file is deleted.
                assert found[base].txn_index == part.txn_index_of(base) or part.end == base
        rest = [base for base in present if base != part.base]
        assert rest == [b for b in part.source_bases if b != part.base][-len(rest) or 99 :], rest
        for base in rest:
            assert base >= part.end, f"source {base} is within the outputs"
            assert found[base].log == log_of(self.segments[base])

    def _same(self, part: Group) -> bool:
        """Return whether the output is identical to its only source."""
        return part.source_bases == (part.base,) and part.outputs == {part.base: log_of(self.segments[part.base])}

    def check_start(self, log_dir: Path) -> list[bool]:
        """Call `judge` with the log that brokers of all versions find at their start, and return the result.

        The logs must be equal, and brokers before 3.0 must leave no `.swap` file, which a later version would use.
        """
        path = log_dir / PARTITION
        replaced = self.judge(load(path))
        for order, is_2_4 in ((list.sort, False), (list.reverse, False), (list.reverse, True)):
            found, left = load_before_3(path, order, is_2_4=is_2_4)
            assert self.judge(found) == replaced
            assert left == []
        return replaced


def _output_segment(base: int, log: bytes, txn_entries: bytes | None) -> OutputSegment:
    return OutputSegment(
        base,
        tuple(
            CleanFile(suffix, f"{base:020d}{suffix}{SCRATCH}", len(data), hashlib.sha256(data).hexdigest())
            for suffix, data in segment_data(base, log, txn_entries).items()
        ),
    )


def log_of(offsets: Sequence[int]) -> bytes:
    """Return batches of two records; the key of a record contains its offset."""
    return _log_of(tuple(offsets))


@lru_cache
def _log_of(offsets: tuple[int, ...]) -> bytes:
    batches = []
    for at in range(0, len(offsets), 2):
        records = [Rec(o, 1_000_000 + o, f"key-{o}".encode(), b"value") for o in offsets[at : at + 2]]
        batches.append(encode_batch(records))
    return b"".join(batches)


def txn_index(*marker_offsets: int) -> bytes:
    """Return the entries of aborted transactions that began at offset 0 and ended at these offsets."""
    return b"".join(struct.pack(">hqqqq", 0, 1, 0, offset, offset + 1) for offset in marker_offsets)


def segment_data(base: int, log: bytes, txn_entries: bytes | None) -> dict[str, bytes]:
    index, time_index = index_files(log, base, INTERVAL_BYTES)
    data = {".log": log, ".index": index, ".timeindex": time_index}
    return data if txn_entries is None else {**data, ".txnindex": txn_entries}


def write_segment(path: Path, base: int, log: bytes, stage: str, txn_entries: bytes | None = None) -> None:
    """Write the files of one segment, with `stage` appended to each name."""
    for suffix, data in segment_data(base, log, txn_entries).items():
        (path / f"{base:020d}{suffix}{stage}").write_bytes(data)


def offsets_of(log: bytes) -> list[int]:
    return [rec.offset for batch in decode_log(log) for rec in batch.records]
