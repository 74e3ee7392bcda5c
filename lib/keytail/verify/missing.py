"""Detects missing segments between two existing segments.

Offsets without batches are no evidence by themselves, since compaction leaves such gaps (VERIFY.md lists the evidence).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keytail.dump.segment import LogReader, Part
from keytail.format import names
from keytail.format.batch import CONTROL
from keytail.verify.scope import Scope

_MAX_KEYS = 1_000_000


class MissingSegments:
    """Collects the offsets and record counts of the segments, in order; `close` adds the findings."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._ends: list[int] = []  # for each segment, the offset after its last batch
        self._are_dense = True

    def after_segment(self, base: int, records: int | None, last_offset: int) -> None:
        """Add a segment: its base offset, its number of records (None if not counted), and the last offset of the log
        up to the segment's end."""
        end = max(last_offset + 1, base)
        self._ends.append(end)
        self._are_dense = self._are_dense and records == end - base

    def close(self) -> None:
        """Add the findings. Call this method only after the whole log was read, and only if the broker is stopped."""
        bases, log_start = self._scope.bases, self._scope.log_start
        gaps = [
            (base, max(end, log_start), next_base)
            for base, end, next_base in zip(bases, self._ends, bases[1:], strict=False)
            if end < next_base and log_start < next_base
        ]
        left = self._left_files()
        for base, first, next_base in gaps:
            facts: dict[str, Any] = {"first": first, "last": next_base - 1}
            shown = [offset for offset in sorted(left) if base < offset and first <= offset < next_base]
            for offset in shown:
                may_be_whole = offset == first and self._may_be_of_a_shutdown(left[offset])
                kind = "segment-perhaps-missing" if may_be_whole else "segment-missing"
                self._scope.findings.add(kind, left[offset], offset=offset, **facts)
            alone = not shown and len(gaps) == 1 and not self._is_after_a_crash(base)
            if alone and self._was_never_compacted(below=first):
                log = names.segment_file(next_base, names.LOG)
                self._scope.findings.add("offsets-missing", log, 0, first, **facts)

    def _left_files(self) -> dict[int, str]:
        """Return for each offset a file that shows that a segment began there; an empty mapping after an unclean
        shutdown."""
        return names.left_by_missing_segments(self._scope.files) if self._scope.claims.clean_shutdown else {}

    def _may_be_of_a_shutdown(self, file: str) -> bool:
        """Return whether a file at the start of a gap may be the snapshot that a follower wrote at its log end when it
        was stopped. If the leader then removed the following offsets by compaction, the follower's next segment begins
        above them. Such a gap is possible only in a compacted topic.
        """
        return file.endswith(names.SNAPSHOT) and self._scope.claims.cleaner is not None

    def _is_after_a_crash(self, base: int) -> bool:
        """Return whether the segment at `base` was possibly not yet synced when a broker was killed. A copy without
        checkpoints is not treated as left by a killed broker."""
        return self._scope.claims.recovery_point is not None and self._scope.is_recovered(base)

    def _was_never_compacted(self, below: int) -> bool:
        """Return whether all of this holds: the partition has no cleaner checkpoint (a copy of some directories
        has none either); each segment has a record at every offset; below the offset `below`, there is a record that a
        cleaner would have removed.
        """
        return self._scope.claims.cleaner is None and self._are_dense and self._has_removable(below)

    def _has_removable(self, below: int) -> bool:
        """Return whether a record in a segment with a base offset below `below` has no key, or the key of another
        record. For most logs, a few keys suffice; at most _MAX_KEYS are compared.
        """
        seen: set[bytes] = set()
        reader = LogReader(self._scope.fs)
        for base in self._scope.bases:
            log = names.segment_file(base, names.LOG)
            if base >= below:
                return False
            size_bytes = self._scope.files[log].size_bytes
            for part in reader.parts(f"{self._scope.path}/{log}", 0, size_bytes, deep=True):
                for key in _keys(part):
                    if key is None or key in seen:
                        return True
                    seen.add(key)
                if len(seen) > _MAX_KEYS:
                    return False
        return False


def _keys(part: Part) -> Iterator[bytes | None]:
    """Yield the keys of the data records (not of markers) as digests of 16 bytes; None for a record without a key."""
    if part.records is None:
        return
    is_data = part.records.batches["attributes"][part.records.records["row"]] & CONTROL == 0
    keys = part.records.keys()
    data = keys.data.tobytes()
    for number in np.flatnonzero(is_data).tolist():
        start, end = int(keys.offsets[number]), int(keys.offsets[number + 1])
        yield hashlib.blake2b(data[start:end], digest_size=16).digest() if keys.valid[number] else None
