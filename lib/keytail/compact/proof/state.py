"""The state of one proof: its windows and tables, the values that the kernels share, and its error messages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from keytail.compact.proof.keys import LEAST_MEMORY_BYTES as _LEAST_MEMORY_BYTES
from keytail.compact.proof.keys import Keys
from keytail.compact.proof.markers import collect_markers
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.kernels import proof as kernels
from keytail.kernels import proof_markers as marker_kernels
from keytail.kernels.opening import Decoders
from keytail.log.fs import FileSystem
from keytail.log.window import Window

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replace import OutputSegment

_BLOCK_BYTES = 1 << 20  # of a decompressed batch: larger ones are opened one by one

SOURCE = {
    kernels.SOURCE_CUT: "a batch is cut off by the end of the file",
    kernels.SOURCE_SIZE: "a batch has an impossible size",
    kernels.SOURCE_MAGIC: "a batch is not of format v2",
    kernels.SOURCE_CRC: "a batch has an invalid CRC",
    kernels.SOURCE_ORDER: "a batch's offsets do not follow those of the batch before it",
    kernels.SOURCE_RECORD: "a record cannot be parsed, or its offset does not follow the one before it",
    kernels.SOURCE_COUNT: "a batch's record count is not the number of its records",
}
_SOURCE_SLUGS = {
    kernels.SOURCE_CUT: "incomplete-batch",
    kernels.SOURCE_CRC: "invalid-crc",
    kernels.SOURCE_RECORD: "invalid-record",
    kernels.SOURCE_COUNT: "invalid-record",
}
_LOST = {
    kernels.LOST_LAST_BATCH: "the batch that ends the cleaned range is not in the output",
    kernels.LOST_BEYOND_END: "a record beyond the cleaned range is not in the output",
    kernels.LOST_KEYLESS: "a record without a key is not in the output",
    kernels.LOST_PRODUCER: "the last batch of an active producer is not in the output",
    kernels.LOST_OPEN: "data of a transaction that has not ended is not in the output",
    kernels.LOST_MARKER: "the marker of a transaction that had data is not in the output",
    kernels.LOST_MARKER_EARLY: "a marker was removed before its delete horizon",
    kernels.LOST_MARKER_HELD: "a marker was removed above the offset to which another replica has been cleaned",
}
_OUTPUT = {
    kernels.OUTPUT_CUT: "a batch is cut off by the end of the file",
    kernels.OUTPUT_SIZE: "a batch has an impossible size",
    kernels.OUTPUT_MAGIC: "a batch is not of format v2",
    kernels.OUTPUT_CRC: "a batch has an invalid CRC",
    kernels.OUTPUT_ORDER: "a batch's offsets do not follow those of the batch before it",
    kernels.OUTPUT_RANGE: "a batch's offsets are outside its segment",
    kernels.OUTPUT_UNKNOWN: "no batch of the source has this base offset at this place",
    kernels.OUTPUT_LAST_OFFSET: "a batch's last offset differs from the source's",
    kernels.OUTPUT_LEADER_EPOCH: "a batch's leader epoch differs from the source's",
    kernels.OUTPUT_PRODUCER: "a batch's producer id, epoch or sequence differs from the source's",
    kernels.OUTPUT_ATTRIBUTES: "a batch's attributes differ from the source's",
    kernels.OUTPUT_CODEC: "a batch's codec differs from the source's",
    kernels.OUTPUT_BASE_TIMESTAMP: "a rebuilt batch's base timestamp is wrong",
    kernels.OUTPUT_HORIZON: "a batch's delete horizon is missing or should not be there",
    kernels.OUTPUT_MAX_TIMESTAMP: "a rebuilt batch's max timestamp is wrong",
    kernels.OUTPUT_COUNT: "a batch's record count is not the number of its records",
    kernels.OUTPUT_EMPTY: "an emptied batch is not just the source's header",
    kernels.OUTPUT_RECORD: "a record cannot be parsed",
    kernels.OUTPUT_EXTRA_RECORD: "the batch has a record that the source's does not have",
    kernels.OUTPUT_RECORD_DIFFERS: "a record's timestamp, key, value or headers differ from the source's",
    kernels.OUTPUT_ABORTED: "a batch has data of an aborted transaction",
    kernels.OUTPUT_REBUILT_WHOLE: "a batch from which nothing was removed differs from the source's bytes",
}
_INDEX = {
    kernels.INDEX_ENTRY: (names.INDEX, "an offset index entry does not match the segment"),
    kernels.INDEX_MISSING: (names.INDEX, "an offset index entry is missing"),
    kernels.TIME_ENTRY: (names.TIME_INDEX, "a time index entry does not match the segment"),
    kernels.TIME_MISSING: (names.TIME_INDEX, "a time index entry is missing"),
}
REMEDY = "Nothing was replaced. Keep the directory and report this: it is a bug in keytail or a failing disk"
SOURCE_REMEDY = "Nothing was replaced. Run `keytail verify`, which lists the errors of the partition"


@dataclass(frozen=True)
class Output:
    """The output segment that is being read, with its index files."""

    base_offset: int
    end_offset: int
    log_bytes: int
    index: np.ndarray
    time_index: np.ndarray
    txn_index: bytes
    paths: dict[str, str]


@dataclass(frozen=True)
class ProofSoFar:
    """The state of the proof that one pass saves for the next: its table of keys, its markers, its state."""

    slots: np.ndarray
    used: int
    markers: np.ndarray
    state: np.ndarray


@dataclass(frozen=True)
class PartOfProof:
    """One part of a proof that runs in several parts side by side: `keys` takes the keys noted by this part; the holder
    of all keys checks the latest records against what became of them. `markers`, None if the log has none, already take
    all data of the log into account.

    `present` are segments of later rounds, which this part notes as still present.
    """

    keys: Keys
    markers: np.ndarray | None
    present: tuple[SegmentFacts, ...] = ()


class Proof:
    """The state of one proof: windows, the table of keys, and the values that the kernels share."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        segments: Sequence[SegmentFacts],
        segment_index_bytes: int,
        memory_bytes: int,
        so_far: ProofSoFar | None = None,
        part: PartOfProof | None = None,
        scratch_path: str | None = None,
    ) -> None:
        self.fs = fs
        self.path = path
        self.scratch_path = scratch_path or path
        self.segments = segments
        self.segment_index_bytes = segment_index_bytes
        self.memory_bytes = max(memory_bytes, _LEAST_MEMORY_BYTES)
        self.keys = Keys(self.memory_bytes) if part is None else part.keys
        self.markers = np.empty((0, marker_kernels.COLUMNS), dtype=np.int64)
        self.producers = np.empty((3, 0), dtype=np.int64)
        self.waiting: list[tuple[OutputSegment, int]] = []  # remaining outputs, and where each must end
        self.current: Output | None = None
        self.file_horizon_ms = 0
        self.source = Window(fs)
        self.output = Window(fs)
        self.decoders = Decoders()
        self.source_block = np.empty(_BLOCK_BYTES, np.uint8)
        self.output_block = np.empty(_BLOCK_BYTES, np.uint8)
        self.state = np.zeros(kernels.STATE_SIZE, dtype=np.int64)
        self.bytes_read = 0
        if part is not None and part.markers is not None:
            self.markers = part.markers
            self.state[kernels.MARKERS_KNOWN] = 1
        if so_far is not None:
            self.keys = Keys(self.memory_bytes, so_far.slots, so_far.used)
            self.markers = so_far.markers
            self.keys.take_memory(self.markers.nbytes)
            self.state = so_far.state
            # Markers unknown to the previous round are in no source; some of its files are replaced.
            self.state[kernels.MARKERS_KNOWN] = 1

    def so_far(self) -> ProofSoFar:
        return ProofSoFar(self.keys.slots, self.keys.used, self.markers, self.state)

    def put_keys(self, records: int = 0, key_bytes: int = 0) -> None:
        """Put the keys noted so far into the table, and make room for the next batch's notes."""
        self.keys.put(int(self.state[kernels.NOTED]), records, key_bytes)
        self.state[kernels.NOTED] = self.state[kernels.NOTED_KEY_BYTES] = 0

    def know_markers(self) -> None:
        """Collect the table of markers, once: only a log with transactions needs it."""
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
        with contextlib.ExitStack() as all_of_them:
            for one in (self.source, self.output, self.keys):
                all_of_them.callback(one.close)

    def show_windows(self) -> None:
        """Set how far the windows extend, for the kernels."""
        state = self.state
        state[kernels.SOURCE_TO] = self.source.filled
        state[kernels.SOURCE_IS_ALL] = self.source.is_all
        state[kernels.OUTPUT_TO] = self.output.filled
        state[kernels.OUTPUT_IS_ALL] = self.output.is_all
        state[kernels.OUTPUT_POSITION] = self.output.position

    def lost(self, code: int, offset: int) -> NoReturn:
        """Raise for a part of the source's next batch that is missing from the output and must not be."""
        self.state[kernels.FAIL_AT] = self.state[kernels.SOURCE_FROM]
        self.state[kernels.FAIL_OFFSET] = offset
        self.fail(code)

    def fail(self, code: int) -> NoReturn:
        """Raise the error that a kernel found, with its place."""
        at, offset = int(self.state[kernels.FAIL_AT]), int(self.state[kernels.FAIL_OFFSET])
        if code in _INDEX:
            suffix, what = _INDEX[code]
            assert self.current is not None
            path = self.current.paths[suffix]
            raise KeytailError(
                what, path=path, byte_position=at, offset=offset, remedy=REMEDY, slug="invalid-output-index"
            )
        kind: type[KeytailError] = KeytailError
        window, remedy = self.source, REMEDY
        if code in _OUTPUT:
            window, what, slug = self.output, _OUTPUT[code], "invalid-output-batch"
        elif code in _LOST:
            what, slug = _LOST[code], "missing-in-output"
        elif code == kernels.WOULD_LOSE_KEYLESS:
            kind, what, slug = Refused, "the range to be cleaned has a record without a key", "records-without-key"
            remedy = (
                "Check cleanup.policy: compaction would remove such records, which usually means that the policy is "
                "wrong. To remove them, give --drop-keyless"
            )
        else:
            kind, what, remedy, slug = CorruptLog, SOURCE[code], SOURCE_REMEDY, _SOURCE_SLUGS.get(code, "invalid-batch")
        raise kind(
            what,
            path=window.path,
            byte_position=window.position + at,
            offset=offset if offset >= 0 else None,
            remedy=remedy,
            slug=slug,
        )
