"""The specification of a proof, the state of a proof with windows and tables, and the error messages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from keytail.compact.proof.keys import MIN_MEMORY_BYTES as _MIN_MEMORY_BYTES
from keytail.compact.proof.keys import NOT_ERASED, Keys
from keytail.compact.proof.markers import SOURCE_REMEDY, collect_markers, note_first_data
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.kernels.opening.decoders import Decoders
from keytail.kernels.proof import codes
from keytail.kernels.proof.markers import COLUMNS
from keytail.kernels.proof.state import Windows, new_state, save
from keytail.log.fs import FileSystem
from keytail.log.window import Window

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replacement.replace import GroupOutput, OutputSegment, UnfinishedOutput

_BLOCK_BYTES = 1 << 20  # Initial room for a decompressed batch; prove.py provides more for larger batches.

SOURCE = {
    codes.SOURCE_CUT: "a batch is cut off by the end of the file",
    codes.SOURCE_SIZE: "a batch has an impossible size",
    codes.SOURCE_MAGIC: "a batch is not of format v2",
    codes.SOURCE_CRC: "a batch has an invalid CRC",
    codes.SOURCE_ORDER: "a batch's offsets do not follow those of the previous batch",
    codes.SOURCE_RECORD: "a record cannot be parsed, or its offset does not follow that of the previous record",
    codes.SOURCE_COUNT: "a batch's record count is not the number of its records",
}
_SOURCE_SLUGS = {
    codes.SOURCE_CUT: "incomplete-batch",
    codes.SOURCE_CRC: "invalid-crc",
    codes.SOURCE_RECORD: "invalid-record",
    codes.SOURCE_COUNT: "invalid-record",
}
_LOST = {
    codes.LOST_LAST_BATCH: "the batch that ends the cleaned range is not in the output",
    codes.LOST_BEYOND_END: "a record beyond the cleaned range is not in the output",
    codes.LOST_KEYLESS: "a record without a key is not in the output",
    codes.LOST_PRODUCER: "the last batch of an active producer is not in the output",
    codes.LOST_OPEN: "data of a transaction that has not ended is not in the output",
    codes.LOST_MARKER: "the marker of a transaction that had data is not in the output",
    codes.LOST_MARKER_EARLY: "a marker was removed before its delete horizon",
    codes.LOST_MARKER_HELD: "a marker was removed above the offset to which another replica has been cleaned",
    codes.LOST_BATCH: "a batch is not in the output, not even without its records",
    codes.LOST_OTHER_KEY: "a record whose key is not to be erased is not in the output",
}
_OUTPUT = {
    codes.OUTPUT_CUT: "a batch is cut off by the end of the file",
    codes.OUTPUT_SIZE: "a batch has an impossible size",
    codes.OUTPUT_MAGIC: "a batch is not of format v2",
    codes.OUTPUT_CRC: "a batch has an invalid CRC",
    codes.OUTPUT_ORDER: "a batch's offsets do not follow those of the previous batch",
    codes.OUTPUT_RANGE: "a batch's offsets are outside its segment",
    codes.OUTPUT_UNKNOWN: "no batch of the source has this base offset at this place",
    codes.OUTPUT_LAST_OFFSET: "a batch's last offset differs from the source's",
    codes.OUTPUT_LEADER_EPOCH: "a batch's leader epoch differs from the source's",
    codes.OUTPUT_PRODUCER: "a batch's producer id, epoch or sequence differs from the source's",
    codes.OUTPUT_ATTRIBUTES: "a batch's attributes differ from the source's",
    codes.OUTPUT_CODEC: "a batch's codec differs from the source's",
    codes.OUTPUT_BASE_TIMESTAMP: "a rebuilt batch's base timestamp is wrong",
    codes.OUTPUT_HORIZON: "a batch's delete horizon is missing or should not be there",
    codes.OUTPUT_MAX_TIMESTAMP: "a rebuilt batch's max timestamp is wrong",
    codes.OUTPUT_COUNT: "a batch's record count is not the number of its records",
    codes.OUTPUT_EMPTY: "an emptied batch is not just the source's header",
    codes.OUTPUT_RECORD: "a record cannot be parsed",
    codes.OUTPUT_EXTRA_RECORD: "the batch has a record that the source's does not have",
    codes.OUTPUT_RECORD_DIFFERS: "a record's timestamp, key, value or headers differ from the source's",
    codes.OUTPUT_ABORTED: "a batch has data of an aborted transaction",
    codes.OUTPUT_ERASED_KEY: "a record has a key that is to be erased",
    codes.OUTPUT_REBUILT_WHOLE: "a batch from which nothing was removed differs from the source's bytes",
}
_INDEX = {
    codes.INDEX_ENTRY: (names.INDEX, "an offset index entry does not match the segment"),
    codes.INDEX_MISSING: (names.INDEX, "an offset index entry is missing"),
    codes.TIME_ENTRY: (names.TIME_INDEX, "a time index entry does not match the segment"),
    codes.TIME_MISSING: (names.TIME_INDEX, "a time index entry is missing"),
}
REMEDY = "Nothing was replaced. Keep the directory and report this: it is a bug in keytail or a failing disk"


@dataclass(frozen=True)
class ProofSpec:
    """The parameters of a proof that the scratch files of `groups` (ascending) may replace the segments that these
    groups name.
    """

    partition_path: str
    # All segments of the partition, ascending: the segments above the rewritten ones may have markers.
    segments: Sequence[SegmentFacts]
    groups: Sequence[GroupOutput]
    first_dirty_offset: int  # start of the mapped range, which ends before `end_offset`
    end_offset: int
    first_uncleanable_offset: int
    now_ms: int
    delete_retention_ms: int
    index_interval_bytes: int
    drop_keyless: bool
    memory_bytes: int  # memory for the tables of keys and markers; less than 4 MiB counts as 4 MiB
    secret: bytes  # secret of the key hash, the same for all passes and parts of one cleaning
    log_start_offset: int = 0
    segment_index_bytes: int = 2**31 - 1
    # The sorted ids of active producers, their last data offsets (-1: unknown), and their epochs. None: producers are
    # not checked.
    active_producers: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    pass_segments: tuple[int, int] | None = None  # first and end (exclusive) index of the segments that a pass replaces
    expected_keys: int = 0  # approximate number of keys, for the size of their table; 0: unknown
    # From this offset on, no tombstone or marker may be removed because of its age.
    removal_limit_offset: int = 2**63 - 1
    scratch_path: str | None = None  # directory of the outputs; None: the directory of the sources
    threads: int = 1  # number of threads that share the proof
    keep_magic: bool = False  # rewritten messages of magic 0 and 1 keep their magic
    by_file_time: bool = False  # tombstones and markers are removed by the rules of format/CLEANING.md 16
    # Only for an erasure (erase/ERASE.md): the hashes under `secret` of the keys whose records are removed, uint64[2,
    # n], sorted by the low word. Segments that no group names are unchanged.
    erased_keys: np.ndarray | None = None


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
    """What one pass of a proof saves for the next pass: the table of keys, the markers, and the state."""

    slots: np.ndarray
    used: int
    markers: np.ndarray
    state: np.ndarray


@dataclass(frozen=True)
class PartOfProof:
    """The inputs of one part of a proof that several tasks, or several threads of a task, carry out.

    `keys` collects the keys of this part; after the parts have been merged, it is checked that the latest records were
    retained. `markers` is the table of all markers, which covers the data of all segments; None if no transaction is
    expected. `present`: segments that later passes rewrite; their records are noted as still present.
    """

    keys: Keys
    markers: np.ndarray | None
    present: tuple[SegmentFacts, ...] = ()


class Proof:
    """The state of one proof: windows, the table of keys, and the values that the kernels share."""

    def __init__(
        self, fs: FileSystem, spec: ProofSpec, so_far: ProofSoFar | None = None, part: PartOfProof | None = None
    ) -> None:
        self.fs = fs
        self.spec = spec
        self.path = spec.partition_path
        self.scratch_path = spec.scratch_path or spec.partition_path
        self._memory_bytes = max(spec.memory_bytes, _MIN_MEMORY_BYTES)
        self.markers = np.empty((0, COLUMNS), dtype=np.int64)
        self.producers = np.empty((3, 0), dtype=np.int64)
        if spec.active_producers is not None:
            self.producers = np.array(spec.active_producers, dtype=np.int64)
        # Remaining outputs, each with the offset at which it must end
        self.waiting: list[tuple[OutputSegment | UnfinishedOutput, int]] = []
        self.current: Output | None = None
        clean = [segment for segment in spec.segments if segment.base_offset < spec.first_dirty_offset]
        self.file_horizon_ms = _mtime_ms(clean[-1]) - spec.delete_retention_ms if clean else 0
        self.source = Window(fs)
        self.output = Window(fs)
        self.decoders = Decoders()
        self.source_block = np.empty(_BLOCK_BYTES, np.uint8)
        self.output_block = np.empty(_BLOCK_BYTES, np.uint8)
        self._set_state(new_state(None if so_far is None else so_far.state))
        self.bytes_read = 0
        if so_far is None:
            self.state.source.last_offset = self.state.output.last_offset = self.state.output.number = -1
        if part is not None:
            self.keys = part.keys
            if part.markers is not None:
                self.markers = part.markers
                self.state.knows_markers = 1
        elif so_far is not None:
            self.keys = Keys(self._memory_bytes, spec.secret, so_far.slots, so_far.used)
            self.markers = so_far.markers
            self.keys.take_memory(self.markers.nbytes)
            # Markers are not collected again, because some sources have already been replaced. If the previous pass
            # collected none, no segment of the round has transactions.
            self.state.knows_markers = 1
        else:
            erased = NOT_ERASED if spec.erased_keys is None else spec.erased_keys
            self.keys = Keys(self._memory_bytes, spec.secret, erased=erased)
        self.keys.expect(spec.expected_keys)
        self._set_rules()

    def _set_state(self, state: Any) -> None:
        self.state = state
        # These views of the state are used in each step: NumPy takes microseconds for an attribute of an attribute.
        self._of_source, self._of_output, self._wanted = state.source, state.output, state.wanted

    def _set_rules(self) -> None:
        spec, rules = self.spec, self.state.rules
        horizon_ms = spec.now_ms + spec.delete_retention_ms
        erases = spec.erased_keys is not None
        has_horizon = horizon_ms < 2**63 and not spec.by_file_time and not erases
        rules.first_dirty = spec.first_dirty_offset
        rules.end_offset = spec.end_offset
        rules.first_uncleanable = spec.first_uncleanable_offset
        rules.log_start = spec.log_start_offset
        rules.removal_limit = spec.removal_limit_offset
        rules.now_ms = spec.now_ms
        rules.horizon_ms = horizon_ms if has_horizon else -1
        rules.interval_bytes = spec.index_interval_bytes
        rules.drop_keyless = spec.drop_keyless
        rules.keep_magic = spec.keep_magic
        rules.by_file_time = spec.by_file_time
        rules.erases = erases

    def restart_state(self) -> None:
        """Set the state to the initial state of a proof, in which nothing is known yet."""
        self._set_state(new_state())
        self.state.source.last_offset = self.state.output.last_offset = self.state.output.number = -1
        self._set_rules()

    def so_far(self) -> ProofSoFar:
        return ProofSoFar(self.keys.slots, self.keys.used, self.markers, save(self.state))

    def put_keys(self, records: int = 0) -> None:
        """Put the keys noted so far into the table, and make room for the next batch's notes."""
        self.keys.put(int(self.state.noted.count), records)
        self.state.noted.count = 0

    def ensure_markers(self) -> None:
        """Collect the table of markers on first use; only a log with transactions needs it."""
        if self.state.knows_markers:
            return
        found = collect_markers(self.fs, self.path, self.spec.segments, self._memory_bytes // 2)
        if found is None:
            self.keys.fail_for_memory()
        if self.spec.erased_keys is not None:  # the data of a transaction may be in a segment that is not rewritten
            note_first_data(self.fs, self.path, self.spec.segments, found, self.spec.log_start_offset)
        self.markers = found
        self.keys.take_memory(found.nbytes)
        self.state.knows_markers = 1

    def start_source(self, segment: SegmentFacts) -> None:
        """Prepare the state for a source whose file is open."""
        source = self.state.source
        source.at = 0
        source.is_old = _mtime_ms(segment) <= self.file_horizon_ms
        source.last_offset = max(int(source.last_offset), segment.base_offset - 1)
        source.block_bytes = self.state.output.block_bytes = -1
        self.bytes_read += segment.log_bytes

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for item in (self.source, self.output, self.keys):
                all_of_them.callback(item.close)

    def windows(self) -> Windows:
        """Store the extent of both windows in the state, and return the bytes of the windows and the room for
        blocks."""
        for part, window in ((self._of_source, self.source), (self._of_output, self.output)):
            part["to"], part["is_all"] = window.filled, window.is_all
        self._of_output["position"] = self.output.position
        return Windows(self.source.bytes, self.output.bytes, self.source_block, self.output_block)

    def advance(self, *, is_output: bool) -> None:
        """Move one window to its next batch, and read the number of bytes that a kernel requested."""
        part, window = (self._of_output, self.output) if is_output else (self._of_source, self.source)
        window.advance(int(part["at"]), int(self._wanted["bytes"]))
        part["at"] = 0

    def fail_at_source(self, code: int, offset: int) -> NoReturn:
        """Raise the error `code` with the position of the source's next batch."""
        self.state.failure.at = self.state.source.at
        self.state.failure.offset = offset
        self.fail(code)

    def fail(self, code: int) -> NoReturn:
        """Raise the error `code` with the position in the state."""
        at, offset = int(self.state.failure.at), int(self.state.failure.offset)
        if code in _INDEX:
            suffix, what = _INDEX[code]
            assert self.current is not None
            path = self.current.paths[suffix]
            raise KeytailError(
                what, path=path, byte_position=at, offset=offset, remedy=REMEDY, slug="invalid-output-index"
            )
        window = self.output if code in _OUTPUT else self.source
        where: dict[str, Any] = {
            "path": window.path,
            "byte_position": window.position + at,
            "offset": offset if offset >= 0 else None,
        }
        if code in _OUTPUT:
            raise KeytailError(_OUTPUT[code], **where, remedy=REMEDY, slug="invalid-output-batch")
        if code in _LOST:
            raise KeytailError(_LOST[code], **where, remedy=REMEDY, slug="missing-in-output")
        if code == codes.WOULD_LOSE_KEYLESS:
            raise Refused(
                "the range to be cleaned has a record without a key",
                **where,
                remedy="Check cleanup.policy: compaction would remove such records, which usually means that the "
                "policy is wrong. To remove them, give --drop-keyless",
                slug="records-without-key",
            )
        if code == codes.SOURCE_ERASED_KEY:
            remedy = "Run the same command again, and report this if it remains"
            raise KeytailError("a record with an erased key is left", **where, remedy=remedy, slug="erased-key-left")
        raise CorruptLog(
            SOURCE[code], **where, remedy=SOURCE_REMEDY, slug=_SOURCE_SLUGS.get(code, "invalid-batch")
        )


def _mtime_ms(segment: SegmentFacts) -> int:
    return segment.log_mtime_ns // 1_000_000
