"""Runs a round of the reference cleaner on a partition, and then the proof of its output, which tests may change."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.proof.prove import ProofReport, prove
from keytail.compact.proof.state import ProofSpec
from keytail.kernels.proof.key_hash import SECRET_BYTES
from keytail.log import window
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from keytail.log.window import Window
from tests.reference import cleaner
from tests.reference.batches import Batch
from tests.reference.cleaner import Aborted, Segment
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log

NOW = 1_700_000_000_000
RETENTION = 1000
INTERVAL = 150


class SmallWindow(Window):
    """A window that is smaller than a batch, without space for prefetched bytes, and grows only to the requested size.
    """

    def __init__(self, fs: FileSystem) -> None:
        super().__init__(fs, 64)

    def advance(self, used: int, wanted_bytes: int) -> None:
        before = self.position + self.filled
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(window, "_HEADROOM_BYTES", 16)
            super().advance(used, wanted_bytes)
        assert self.position + self.filled > before, "the window did not advance, so that the proof would not end"


@dataclass
class Output:
    """One output segment. A test may change its batches and entries before the proof."""

    base: int
    batches: list[bytes]
    entries: list[bytes]

    def find(self, base_offset: int) -> int:
        return [struct.unpack_from(">q", data)[0] for data in self.batches].index(base_offset)


class Case:
    """A partition, of which the last segment is active, and the output of a round of the reference cleaner."""

    def __init__(self, segments: list[Segment], *, first_dirty: int, now_ms: int = NOW, **given) -> None:
        self.segments, self.first_dirty, self.now_ms = segments, first_dirty, now_ms
        self.log_start = given.pop("log_start_offset", 0)
        self.producers: dict = given.pop("producers", {})
        self.uncleanable = segments[-1].base_offset
        self.index_limit = 10_485_760
        self.keep_magic = given.get("keep_magic", False)
        self.by_file_time = given.get("by_file_time", False)
        self.removal_limit = given.get("removal_limit", cleaner.LONG_MAX)
        self.round = cleaner.clean(
            segments,
            first_dirty=first_dirty,
            first_uncleanable=self.uncleanable,
            now_ms=now_ms,
            delete_retention_ms=RETENTION,
            index_interval_bytes=INTERVAL,
            log_start_offset=self.log_start,
            producers=self.producers,
            **given,
        )
        self.groups: list[tuple[tuple[int, ...], list[Output]]] = []
        for made in self.round.segments:
            batches = [made.log[b.position : b.position + b.size] for b in decode_any_log(made.log)]
            entries = [made.txn_index[i : i + 34] for i in range(0, len(made.txn_index), 34)]
            self.groups.append((made.source_bases, [Output(made.base_offset, batches, entries)]))

    @property
    def outputs(self) -> list[Output]:
        return [output for _, outputs in self.groups for output in outputs]

    def at(self, base_offset: int) -> tuple[Output, int]:
        for output in self.outputs:
            for i, data in enumerate(output.batches):
                if struct.unpack_from(">q", data)[0] == base_offset:
                    return output, i
        raise AssertionError(base_offset)

    def source(self, base_offset: int) -> tuple[Batch, bytes]:
        for segment in self.segments:
            for batch in decode_any_log(segment.log):
                if batch.base_offset == base_offset:
                    return batch, segment.log[batch.position : batch.position + batch.size]
        raise AssertionError(base_offset)

    def put(self, data: bytes) -> None:
        """Replace the batch that has the base offset of `data`."""
        (base,) = struct.unpack_from(">q", data)
        output = [o for o in self.outputs if o.base <= base][-1]
        bases = {struct.unpack_from(">q", other)[0]: other for other in output.batches}
        bases[base] = data
        output.batches = [bases[at] for at in sorted(bases)]

    def drop(self, base_offset: int) -> None:
        output, i = self.at(base_offset)
        del output.batches[i]

    def files(self) -> dict[tuple[int, str], bytes]:
        files = {}
        for output in self.outputs:
            log = b"".join(output.batches)
            files[output.base, ".log"] = log
            files[output.base, ".index"], files[output.base, ".timeindex"] = index_files(log, output.base, INTERVAL)
            if output.entries:
                files[output.base, ".txnindex"] = b"".join(output.entries)
        return files

    def prove(self, directory: Path, memory_bytes: int = 1 << 24) -> ProofReport:
        return prove(LOCAL, self.spec(directory, memory_bytes))

    def spec(self, directory: Path, memory_bytes: int = 1 << 24) -> ProofSpec:
        """Write the files, and return what to prove."""
        directory.mkdir(exist_ok=True)
        facts = []
        for s in self.segments:
            (directory / f"{s.base_offset:020d}.log").write_bytes(s.log)
            facts.append(SegmentFacts(s.base_offset, len(s.log), s.mtime_ms * 10**6, 0, 0, None, 0, 0))
        files: dict[int, list[CleanFile]] = {}
        for (base, suffix), data in self.files().items():
            name = f"{base:020d}{suffix}.r.a.clean"
            (directory / name).write_bytes(data)
            files.setdefault(base, []).append(CleanFile(suffix, name, len(data), ""))
        groups = [
            GroupOutput(sources, tuple(OutputSegment(o.base, tuple(files[o.base])) for o in outputs))
            for sources, outputs in self.groups
        ]
        ids = sorted(self.producers)
        active = [
            ids,
            [-1 if self.producers[i][0] is None else self.producers[i][0] for i in ids],
            [self.producers[i][1] for i in ids],
        ]
        return ProofSpec(
            str(directory),
            facts,
            groups,
            first_dirty_offset=self.first_dirty,
            end_offset=self.round.end_offset,
            first_uncleanable_offset=self.uncleanable,
            now_ms=self.now_ms,
            delete_retention_ms=RETENTION,
            index_interval_bytes=INTERVAL,
            drop_keyless=False,
            memory_bytes=memory_bytes,
            secret=os.urandom(SECRET_BYTES),
            log_start_offset=self.log_start,
            segment_index_bytes=self.index_limit,
            removal_limit_offset=self.removal_limit,
            active_producers=tuple(np.array(column, np.int64) for column in active),
            keep_magic=self.keep_magic,
            by_file_time=self.by_file_time,
        )

    def after(self) -> list[Segment]:
        """Return the partition after the round."""
        made = [
            Segment(
                s.base_offset,
                s.log,
                len(s.index),
                len(s.time_index),
                s.mtime_ms,
                tuple(
                    Aborted(*struct.unpack_from(">qqqq", s.txn_index, i + 2)) for i in range(0, len(s.txn_index), 34)
                ),
            )
            for s in self.round.segments
        ]
        return made + [s for s in self.segments if s.base_offset >= self.round.end_offset]

    def split(self, group: int, bases: list[int]) -> None:
        """Split the output of a group at these offsets; entries of transaction indexes move with their markers."""
        sources, (output,) = self.groups[group]
        parts = []
        for low, high in pairwise([output.base, *bases, 2**62]):
            batches = [b for b in output.batches if low <= struct.unpack_from(">q", b)[0] < high]
            entries = [e for e in output.entries if low <= struct.unpack_from(">q", e, 18)[0] < high]
            parts.append(Output(low, batches, entries))
        self.groups[group] = (sources, parts)
