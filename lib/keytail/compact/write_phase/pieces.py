"""Rewrites a batch one piece at a time, because it has more decompressed bytes or records than are held in memory.

A batch that is rewritten in pieces is opened twice: first to decide about all of its records, then to write the
retained records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused
from keytail.format.batch import CODEC_MASK
from keytail.format.codecs.errors import LARGER_REMEDY
from keytail.format.compression import compressor
from keytail.kernels.rewriting.blocks import NOT_EARLIER, REBUILT
from keytail.limits import max_record_bytes
from keytail.log.records.chunk import Chunk

# A rebuilt block is kept in memory, compressed. The maximum size of a rebuilt block is that of its source batch or, if
# larger, the size of this number of records of the maximum size.
_PACKED_RECORDS = 2


@dataclass(frozen=True)
class FoundInPieces:
    """The numbers of retained records and retained null values in the pieces so far, and the timestamp of the first
    retained record."""

    kept: int = 0
    kept_nulls: int = 0
    first_timestamp_ms: int = NOT_EARLIER

    def and_more(self, records: np.ndarray, keep: np.ndarray, kept: int, kept_nulls: int) -> FoundInPieces:
        first_ms = self.first_timestamp_ms
        if kept and not self.kept:
            first_ms = int(records["timestamp_ms"][int(np.argmax(keep[: len(records)]))])
        return FoundInPieces(self.kept + kept, self.kept_nulls + kept_nulls, first_ms)


class BlockInPieces:
    """The rebuilt block of row `row` of a chunk, compressed as its pieces are added."""

    def __init__(self, chunk: Chunk, row: int) -> None:
        self._chunk, self._row = chunk, row
        batch = chunk.table[row]
        self._compressor = compressor(int(batch["attributes"]) & CODEC_MASK)
        self._most_bytes = max(_PACKED_RECORDS * max_record_bytes(), int(batch["size_bytes"]))
        self._packed = bytearray()
        self._rebuilt = np.zeros(0, REBUILT)

    def add(self, rebuilt: np.ndarray, block: np.ndarray) -> None:
        """Add the next piece: `rebuilt` is its row of REBUILT, `block` are its records. Raises Refused if the batch
        becomes too large to hold."""
        self._packed += self._compressor.compress(block.data)
        newest = self._rebuilt["max_timestamp_ms"][0] if len(self._rebuilt) else -(2**63)
        self._rebuilt = rebuilt.copy()
        self._rebuilt["max_timestamp_ms"] = max(newest, rebuilt["max_timestamp_ms"][0])
        if len(self._packed) > self._most_bytes:
            batch = self._chunk.table[self._row]
            raise Refused(
                f"a batch of {batch['size_bytes']} bytes would have more than {self._most_bytes} bytes when rebuilt",
                path=self._chunk.path,
                byte_position=int(batch["position"]),
                offset=int(batch["base_offset"]),
                remedy=f"Its producer compressed it better than the broker's default would. {LARGER_REMEDY}",
                slug="rebuilt-batch-too-large",
            )

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return one row of REBUILT for the whole batch, and its compressed block."""
        self._packed += self._compressor.flush()
        self._rebuilt["block_start"], self._rebuilt["block_bytes"] = 0, len(self._packed)
        self._rebuilt["where"] = 1
        self._rebuilt["last_offset"] = self._chunk.table["last_offset"][self._row]
        return self._rebuilt, np.frombuffer(self._packed, np.uint8)
