"""Defines the input of a task that repacks one partition, and the state that one pass saves for the next pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from keytail.compact.task import CleaningTask, SavedState, Totals
from keytail.format.batch import HEADER_BYTES
from keytail.log.replacement.replace import CleanFile
from keytail.log.writer import MAX_SEGMENT_BYTES

if TYPE_CHECKING:
    from keytail.compact.repack.producers import ProducersOfLog
    from keytail.compact.repack.proof import ProvenProducers

_NO_FILE = CleanFile("", "", 0, "")


@dataclass(frozen=True)
class Repacking:
    """The changes that a repack makes. Neighbouring batches are merged up to `batch_bytes` of uncompressed records; 0
    disables merging. Batches that may be changed get the codec with the number `codec`, with the exceptions in
    REPACK.md; if it is None, they keep their codec. Rebuilt batches are compressed at `level`; None is the default
    level of Kafka's codec. Merged batches may lose producers that have been idle for `forget_after_ms`; if this is
    None, they lose none.
    """

    batch_bytes: int
    codec: int | None = None
    level: int | None = None
    forget_after_ms: int | None = None

    @property
    def merges(self) -> bool:
        return self.batch_bytes > 0

    def block_bytes(self, max_message_bytes: int) -> int:
        """Return the maximum size of a merged batch's records, uncompressed and encoded for that batch."""
        return max(0, min(self.batch_bytes, max_message_bytes - HEADER_BYTES))


@dataclass(frozen=True)
class RepackTask(CleaningTask):
    """One repack of one partition. Segments from `first_uncleanable_offset` on are not changed."""

    repacking: Repacking = field(default_factory=partial(Repacking, 0))
    cleaner_checkpoint: int | None = None
    would: ClassVar[str] = "would-repack"

    @property
    def begins_at(self) -> int:
        return self.segments[0].base_offset

    @property
    def expired_before_ms(self) -> int | None:
        """The time in ms at or before which the last batch of expired producers was written; None if none is forgotten.
        """
        idle_ms = self.repacking.forget_after_ms
        return None if idle_ms is None else self.now_ms - idle_ms

    def next_checkpoint(self, end_offset: int) -> int:
        """Return the largest checkpoint that the cleaner may have after the repack: its present one, or `end_offset` if
        that is larger. The repack itself does not move the checkpoint."""
        return max(end_offset, self.cleaner_checkpoint or 0)


@dataclass(frozen=True)
class RepackState(SavedState):
    """The state that one pass saves for the next pass, without files: each segment is repacked by itself.

    `producers` and `proven` are the facts about producers that the writer and the proof found in the first pass: in
    later passes, some sources have already been replaced.
    """

    producers: ProducersOfLog | None = field(default=None, compare=False)
    proven: ProvenProducers | None = field(default=None, compare=False)
    batches_before: int = 0  # number of source batches in all passes so far
    batches_after: int = 0

    @classmethod
    def at(cls, next_segment: int, totals: Totals, **more: Any) -> RepackState:
        return cls(next_segment, _NO_FILE, _NO_FILE, totals, **more)

    @property
    def files(self) -> tuple[CleanFile, ...]:
        return ()


def output_segment_bytes(task: CleaningTask) -> int:
    """Return the maximum bytes of an output: twice `segment.bytes`, or twice the largest segment if that is more, but
    at most MAX_SEGMENT_BYTES. So only a segment that grows to more than its double, or beyond that limit, is
    divided."""
    largest = max((segment.log_bytes for segment in task.segments), default=0)
    return min(MAX_SEGMENT_BYTES, 2 * max(task.config.segment_bytes, largest))
