"""The segments of an open log: their base offsets, and the active segment, which takes appends.

APPEND.md beside this file specifies what a roll writes, and in which order.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right

from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.append.active_segment import ActiveSegment
from keytail.log.append.rolling import AppendConfig, RollState, draw_jitter_ms
from keytail.log.fs import FileStat, FileSystem
from keytail.log.index.files import OffsetEntry, OffsetIndex
from keytail.log.partition import SegmentFacts


class OpenSegments:
    """The base offsets of the segments, ascending, and the active segment. Call `create` or `reopen` before other
    methods."""

    def __init__(
        self, fs: FileSystem, directory: str, config: AppendConfig, like: FileStat, rng: random.Random
    ) -> None:
        self.bases: list[int] = []
        self._active: ActiveSegment | None = None
        self._fs = fs
        self._directory = directory
        self._config = config
        self._like = like
        self._rng = rng

    @property
    def active(self) -> ActiveSegment:
        """The active segment. Raises KeytailError after `close` or `abandon`."""
        if self._active is None:
            raise KeytailError("this log is closed", path=self._directory, remedy="Open it again", slug="log-closed")
        return self._active

    @property
    def is_open(self) -> bool:
        return self._active is not None

    def create(self, base_offset: int, now_ms: int) -> None:
        """Create a new active segment. The caller makes its name durable."""
        jitter_ms = draw_jitter_ms(self._rng, self._config)
        self._active = ActiveSegment.create(
            self._fs, self._directory, base_offset, self._config, self._like, now_ms=now_ms, jitter_ms=jitter_ms
        )
        self.bases.append(base_offset)

    def reopen(self, segments: tuple[SegmentFacts, ...], now_ms: int) -> None:
        """Open the segments of a closed log. Raises CorruptLog if an index cannot be continued."""
        last = segments[-1]
        jitter_ms = draw_jitter_ms(self._rng, self._config)
        opened = RollState(last.base_offset, last.log_bytes, last.first_batch_timestamp_ms, now_ms, jitter_ms)
        self.bases = [segment.base_offset for segment in segments]
        self._active = ActiveSegment.reopen(self._fs, self._directory, opened, self._config, self._like)

    def roll(self, base_offset: int, now_ms: int) -> bool:
        """Close the active segment durably and create the next segment, instead of any files of that name; return
        whether a segment was created.

        If the active segment already has that base offset, it is empty; it is reset, and False is returned. The
        caller makes the name of the new segment durable.
        """
        active = self.active
        if base_offset == active.base_offset:
            active.renew(now_ms, draw_jitter_ms(self._rng, self._config))
            return False
        for suffix in names.SEGMENT_SUFFIXES:
            path = self._path(base_offset, suffix)
            if self._fs.exists(path):
                self._fs.unlink(path)
        # The segment must be durable before the next segment exists: a broker that truncates a segment deletes all
        # later segments.
        active.close()
        self.create(base_offset, now_ms)
        return True

    def floor(self, offset: int) -> tuple[int, OffsetEntry]:
        """Return the base offset of the segment in which a read of `offset` begins, and the index entry at which the
        read begins."""
        number = bisect_right(self.bases, offset) - 1
        base = self.bases[number]
        path = self._path(base, names.INDEX)
        if not self._fs.exists(path):
            return base, OffsetEntry(-1, base, 0)
        with OffsetIndex.open(self._fs, path, base, active=number == len(self.bases) - 1) as index:
            return base, index.lookup(offset)

    def flush(self) -> None:
        """Make all appended batches durable; earlier segments became durable when they were closed."""
        if self.active.is_dirty:
            self.active.flush()

    def close(self) -> None:
        """Close the active segment and make its contents durable; the caller makes new file names durable."""
        self.active.close()
        self._active = None

    def abandon(self) -> None:
        """Close the active segment, leaving its files as they are."""
        active, self._active = self._active, None
        if active is not None:
            active.abandon()

    def _path(self, offset: int, suffix: str) -> str:
        return os.path.join(self._directory, names.segment_file(offset, suffix))
