"""The rules, as definitions, for the section of a partition that a round cleans and for the grouping of segments.

A slow and literal implementation for comparison with `keytail.compact.plan`, with which it shares no code. Segments and
facts are any objects with the fields of `log/partition.py`.
"""

from __future__ import annotations

INT_MAX = 2**31 - 1


def between(segments, start, end):
    """Return the segments of the range [start, end): from the one that contains `start` to the last one below `end`."""
    if start == end:
        return []
    floors = [s.base_offset for s in segments if s.base_offset <= start]
    lowest = max(floors) if floors else 0
    return [s for s in segments if lowest <= s.base_offset < end]


def groups(segments, end_offset, first_uncleanable, segment_bytes, segment_index_bytes):
    """Return lists of base offsets, one list for each output segment."""
    todo = between(segments, 0, end_offset)
    result = []
    while todo:
        sizes = range(1, len(todo) + 1)
        allowed = [
            n
            for n in sizes
            if all(
                _joins(todo, k, first_uncleanable, segment_bytes, segment_index_bytes) for k in range(1, n)
            )
        ]
        result.append([s.base_offset for s in todo[: max(allowed)]])
        todo = todo[max(allowed) :]
    return result


def _joins(todo, k, first_uncleanable, segment_bytes, segment_index_bytes):
    """Return whether segment number `k` may be in one group with all segments before it."""
    together = todo[: k + 1]
    if sum(s.log_bytes for s in together) > segment_bytes:
        return False
    if sum((s.index_bytes or 0) // 8 * 8 for s in together) > segment_index_bytes:
        return False
    if sum((s.time_index_bytes or 0) // 12 * 12 for s in together) > segment_index_bytes:
        return False
    following = todo[k + 1].base_offset if k + 1 < len(todo) else first_uncleanable
    return todo[k].log_bytes == 0 or following - 1 - todo[0].base_offset <= INT_MAX


def selection(
    facts, config, now_ms, *, force=False, from_log_start=False, high_watermark="checkpoint", unstable=None
):
    """Return a dictionary with the numbers of `keytail.compact.plan.Selection`, and with `eligible`."""
    segments, start, end = facts.segments, facts.log_start_offset, facts.log_end_offset
    active = segments[-1].base_offset
    inactive = segments[:-1]

    checkpoint = start if facts.cleaner_checkpoint is None else facts.cleaner_checkpoint
    rewrite = not start <= checkpoint <= end and facts.cleaner_checkpoint is not None
    first_dirty = start if rewrite or from_log_start else checkpoint
    dirty = between(inactive, first_dirty, active) if first_dirty < active else []

    watermark = facts.high_watermark
    if watermark is None:
        watermark = end if high_watermark == "log-end" else start
    bounds = [active, sorted([start, watermark, end])[1]]
    if unstable is not None:
        bounds.append(max(unstable, start))
    if not facts.clean_shutdown:
        bounds.append(facts.recovery_point)
    if config.min_compaction_lag_ms > 0:
        bounds += [
            s.base_offset for s in dirty if s.largest_timestamp_ms > now_ms - config.min_compaction_lag_ms
        ]
    bound = max(first_dirty, min(bounds))
    uncleanable = (
        between(inactive, bound, active)[0].base_offset
        if bound < active and between(inactive, bound, active)
        else active
    )

    clean = sum(s.log_bytes for s in segments if s.base_offset < first_dirty)
    cleanable = sum(s.log_bytes for s in between(segments, min(first_dirty, uncleanable), uncleanable))
    total = clean + cleanable
    ratio = cleanable / total if total else 0.0
    ages = [s.first_batch_timestamp_ms for s in dirty if s.first_batch_timestamp_ms > 0]
    overdue = bool(ages) and min(ages) < now_ms - config.max_compaction_lag_ms
    due = force or overdue or ratio > config.min_cleanable_dirty_ratio
    return {
        "first_dirty_offset": first_dirty,
        "first_uncleanable_offset": uncleanable,
        "clean_bytes": clean,
        "cleanable_bytes": cleanable,
        "total_bytes": total,
        "dirty_ratio": ratio,
        "must_compact_now": overdue,
        "rewrite_checkpoint": rewrite,
        "eligible": "compact" in config.cleanup_policy and cleanable > 0 and due,
    }
