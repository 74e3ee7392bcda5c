"""Changes the log of a stopped broker as `compact --repack` and `keytail erase` do, in plain Python.

`changed_log` is the only function that tests call. It shares no code with keytail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.reference.batches import Batch, Rec, decode_log, encode_batch

Merges = Callable[[Batch, Batch], bool]
Keeps = Callable[[Rec], bool]


def merge_all(first: Batch, second: Batch) -> bool:
    return True


def changed_log(partition: Path, *, merges: Merges | None = None, keeps: Keeps | None = None) -> list[Batch]:
    """Change all segments of a partition, and return its batches.

    Neighbouring batches are merged if `merges` is true of them and they may share a batch: same leader epoch, codec
    and timestamp type, no producer id, no control batch. Records for which `keeps` is false are removed; an emptied
    batch keeps its header. The indexes of changed segments are removed, so that a broker builds them again.
    """
    batches: list[Batch] = []
    for path in sorted(partition.glob("*.log")):
        old = path.read_bytes()
        parts = [[batch] for batch in decode_log(old)]
        if keeps is not None:
            parts = [[_erased(part[0], keeps)] for part in parts]
        if merges is not None:
            parts = list(_groups([part[0] for part in parts], merges))
        new = b"".join(_encoded(part) for part in parts)
        if new != old:
            path.write_bytes(new)
            for suffix in (".index", ".timeindex"):
                path.with_suffix(suffix).unlink(missing_ok=True)
        batches += decode_log(new)
    return batches


def read_log(partition: Path) -> list[Batch]:
    return [batch for path in sorted(partition.glob("*.log")) for batch in decode_log(path.read_bytes())]


def _erased(batch: Batch, keeps: Keeps) -> Batch:
    kept = tuple(record for record in batch.records if batch.control or keeps(record))
    return batch if len(kept) == len(batch.records) else Batch(**{**vars(batch), "records": kept, "record_count": -1})


def _groups(batches: Sequence[Batch], merges: Merges) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    for batch in batches:
        if group and not (_may_share(group[-1], batch) and merges(group[0], batch)):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _may_share(first: Batch, second: Batch) -> bool:
    return all(batch.producer_id == -1 and not batch.control and batch.records for batch in (first, second)) and (
        (first.leader_epoch, first.attributes) == (second.leader_epoch, second.attributes)
    )


def _encoded(group: Sequence[Batch]) -> bytes:
    """Encode a group as one batch. The codec of an emptied batch is none, as Kafka's cleaner writes it."""
    first, last = group[0], group[-1]
    records = [record for batch in group for record in batch.records]
    return encode_batch(
        records,
        base_offset=first.base_offset,
        last_offset=last.last_offset,
        codec=first.codec if records else 0,
        timestamp_type=first.timestamp_type,
        leader_epoch=first.leader_epoch,
        producer_id=first.producer_id,
        producer_epoch=first.producer_epoch,
        base_sequence=first.base_sequence,
        transactional=first.transactional,
        control=first.control,
        delete_horizon_ms=first.delete_horizon_ms if records else None,
        max_timestamp=max(batch.max_timestamp for batch in group),
    )
