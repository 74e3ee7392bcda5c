"""Small partition directories with replacements ready to commit, and the judge of every state between.

The outputs are made by hand: what matters here is which bytes a broker finds, not why they were kept.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keytail.log.replace import CleanFile, GroupOutput
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.indexing import index_files
from tests.reference.loader import Loaded, load

INTERVAL_BYTES = 50  # less than a batch: every batch but the first has an index entry
PARTITION = "orders-0"
SCRATCH = ".r1.a1.clean"
NO_PRODUCERS = bytes.fromhex("0001 48674bc7 00000000")  # a producer snapshot without entries


@dataclass(frozen=True)
class Group:
    """Offsets kept of the sources; `txn_index` is the output's, None for no such file."""

    source_bases: tuple[int, ...]
    kept: tuple[int, ...]
    txn_index: bytes | None = None

    @property
    def base(self) -> int:
        return self.source_bases[0]

    @property
    def log(self) -> bytes:
        return log_of(self.kept)

    @property
    def end(self) -> int:
        return self.kept[-1] + 1 if self.kept else self.base


@dataclass(frozen=True)
class Partition:
    """Segments by base, each with the offsets it holds; the last one is the active segment."""

    segments: Mapping[int, Sequence[int]]
    groups: tuple[Group, ...]
    txn_indexes: Mapping[int, bytes] = field(default_factory=dict)

    def make(self, log_dir: Path) -> None:
        """The partition with everything that is there before the first commit: sources, scratch, snapshots."""
        path = log_dir / PARTITION
        path.mkdir(parents=True)
        for base, offsets in self.segments.items():
            write_segment(path, base, log_of(offsets), "", self.txn_indexes.get(base))
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(NO_PRODUCERS)
        for group in self.groups:
            write_segment(path, group.base, group.log, SCRATCH, group.txn_index)

    def outputs(self) -> list[GroupOutput]:
        return [
            GroupOutput(
                group.base,
                group.source_bases,
                tuple(
                    CleanFile(
                        suffix,
                        f"{group.base:020d}{suffix}{SCRATCH}",
                        len(data),
                        hashlib.sha256(data).hexdigest(),
                    )
                    for suffix, data in segment_data(group.base, group.log, group.txn_index).items()
                ),
            )
            for group in self.groups
        ]

    def judge(self, loaded: Loaded) -> list[bool]:
        """Which groups a broker finds replaced. AssertionError when it finds anything but sources or output.

        Sources at or above the end of their output may still be there after the commit: all that they hold
        was superseded by later records or had expired, so with the output they are as good as without.
        """
        found = dict(loaded.segments)
        for base, segment in found.items():
            index, time_index = index_files(segment.log, base, INTERVAL_BYTES)
            assert segment.index in (None, index), f"the index of {base} is not its log's"
            assert segment.time_index in (None, time_index), f"the time index of {base} is not its log's"
        replaced = []
        for group in self.groups:
            present = [base for base in group.source_bases if base in found]
            as_sources = present == list(group.source_bases) and all(
                found[base].log == log_of(self.segments[base]) for base in present
            )
            if as_sources and not self._same(group):
                replaced.append(False)
                assert found[group.base].txn_index == self.txn_indexes.get(group.base)
            else:
                replaced.append(True)
                assert group.base in found, f"nothing at {group.base}"
                assert found[group.base].log == group.log, f"neither source nor output at {group.base}"
                if found[group.base].index is not None:
                    assert found[group.base].txn_index == group.txn_index or not group.kept
                rest = [base for base in present if base != group.base]
                assert rest == [b for b in group.source_bases if b != group.base][-len(rest) or 99 :], rest
                for base in rest:
                    assert base >= group.end, f"source {base} lies within the output"
                    assert found[base].log == log_of(self.segments[base])
        assert replaced == sorted(replaced, reverse=True), f"a later group before an earlier one: {replaced}"
        sources = {base for group in self.groups for base in group.source_bases}
        for base in self.segments.keys() - sources:
            assert base in found and found[base].log == log_of(self.segments[base]), f"segment {base} changed"
        assert found.keys() <= self.segments.keys()
        return replaced

    def _same(self, group: Group) -> bool:
        """Whether the output cannot be told from its only source."""
        return group.source_bases == (group.base,) and group.log == log_of(self.segments[group.base])

    def load(self, log_dir: Path) -> Loaded:
        return load(log_dir / PARTITION)


def log_of(offsets: Sequence[int]) -> bytes:
    """Batches of two records; a record's key tells its offset."""
    batches = []
    for at in range(0, len(offsets), 2):
        records = [Rec(o, 1_000_000 + o, f"key-{o}".encode(), b"value") for o in offsets[at : at + 2]]
        batches.append(encode_batch(records))
    return b"".join(batches)


def txn_index(*marker_offsets: int) -> bytes:
    """Entries of aborted transactions that began at offset 0 and ended with these markers."""
    return b"".join(struct.pack(">hqqqq", 0, 1, 0, offset, offset + 1) for offset in marker_offsets)


def segment_data(base: int, log: bytes, txn_entries: bytes | None) -> dict[str, bytes]:
    index, time_index = index_files(log, base, INTERVAL_BYTES)
    data = {".log": log, ".index": index, ".timeindex": time_index}
    return data if txn_entries is None else {**data, ".txnindex": txn_entries}


def write_segment(path: Path, base: int, log: bytes, stage: str, txn_entries: bytes | None = None) -> None:
    """The files of one segment, each with `stage` after its name."""
    for suffix, data in segment_data(base, log, txn_entries).items():
        (path / f"{base:020d}{suffix}{stage}").write_bytes(data)


def offsets_of(log: bytes) -> list[int]:
    return [rec.offset for batch in decode_log(log) for rec in batch.records]
