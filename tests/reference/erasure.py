"""An erasure in plain Python: the segments without the records of some keys. Shares no code with `keytail`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tests.reference.batches import Batch
from tests.reference.cleaner import Segment, _emptied, _rebuilt
from tests.reference.legacy import LegacyBatch, decode_any_log, is_uniform, rebuilt_wrapper


def erase(
    segments: Sequence[Segment], keys: Collection[bytes], producers: Mapping[int, tuple[int, int]] | None = None
) -> dict[int, bytes]:
    """Return the new log of each segment that has a record to be erased, by its base offset. `producers` has the last
    data offset and the epoch of each active producer.
    """
    changed = {}
    for segment in segments:
        batches = decode_any_log(segment.log)
        if any(is_erased(record.key, keys) for batch in batches if not batch.control for record in batch.records):
            raw = [segment.log[batch.position : batch.position + batch.size] for batch in batches]
            parts, newest = [], 0
            for batch, data in zip(batches, raw, strict=True):
                parts.append(_of_batch(batch, data, keys))
                made = decode_any_log(parts[-1])
                if made and made[0].records:
                    newest = max(newest, made[0].max_timestamp)
                elif made and not batch.control and batch.max_timestamp > newest:
                    if (producers or {}).get(batch.producer_id, (-1, 0))[0] != batch.last_offset:
                        parts[-1] = _emptied(replace(batch, max_timestamp=newest))
            changed[segment.base_offset] = b"".join(parts)
    return changed


def is_erased(key: bytes | None, keys: Collection[bytes]) -> bool:
    return key is not None and key in keys


def _of_batch(batch: Batch, raw: bytes, keys: Collection[bytes]) -> bytes:
    kept = [record for record in batch.records if not is_erased(record.key, keys)]
    is_old = isinstance(batch, LegacyBatch)
    if batch.control:
        return raw
    if len(kept) == len(batch.records):
        # A message whose inner messages have another magic is written again by every rewrite (LEGACY.md 5).
        return rebuilt_wrapper(batch, kept) if is_old and batch.codec and not is_uniform(batch, raw) else raw
    if not kept:
        return b"" if is_old else _emptied(batch)
    return rebuilt_wrapper(batch, kept) if is_old else _rebuilt(batch, kept, batch.delete_horizon_ms)
