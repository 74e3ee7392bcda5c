"""The segments of a log that is open: their base offsets, and the last of them, which takes appends.

What a roll writes, and in which order, stands in APPEND.md beside this file.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right

from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.append.active_segment import ActiveSegment
from keytail.log.append.rolling import AppendConfig, Standing, draw_jitter_ms
from keytail.log.fs import FileStat, FileSystem
from keytail.log.index_files import OffsetEntry, OffsetIndex
from keytail.log.partition import SegmentFacts


class OpenSegments:
    """`bases` ascend; the last one is that of `active`. `create` or `reopen` comes first."""

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
        """KeytailError behind the end."""
        if self._active is None:
            raise KeytailError("this log is closed", path=self._directory, remedy="Open it again")
        return self._active

    @property
    def is_open(self) -> bool:
        return self._active is not None

    def create(self, base_offset: int, now_ms: int) -> None:
        """A new last segment. Its name is the caller's to make durable."""
        jitter_ms = draw_jitter_ms(self._rng, self._config)
        self._active = ActiveSegment.create(
            self._fs, self._directory, base_offset, self._config, self._like, now_ms=now_ms, jitter_ms=jitter_ms
        )
        self.bases.append(base_offset)

    def reopen(self, segments: tuple[SegmentFacts, ...], now_ms: int) -> None:
        """Those of a log that was closed. CorruptLog for an index that cannot be continued."""
        last = segments[-1]
        jitter_ms = draw_jitter_ms(self._rng, self._config)
        opened = Standing(last.base_offset, last.log_bytes, last.first_batch_timestamp_ms, now_ms, jitter_ms)
        self.bases = [segment.base_offset for segment in segments]
        self._active = ActiveSegment.reopen(self._fs, self._directory, opened, self._config, self._like)

    def roll(self, base_offset: int, now_ms: int) -> bool:
        """End the last one, durably, and begin another; False where it has that base: it is empty, and is renewed.

        The name of the new one is the caller's to make durable.
        """
        active = self.active
        if base_offset == active.base_offset:
            active.renew(now_ms, draw_jitter_ms(self._rng, self._config))
            return False
        for suffix in names.SEGMENT_SUFFIXES:
            path = self._path(base_offset, suffix)
            if self._fs.exists(path):
                self._fs.unlink(path)
        # Durable before there is a next one: a broker that recovers this segment and finds it torn drops what follows.
        active.close()
        self.create(base_offset, now_ms)
        return True

    def floor(self, offset: int) -> tuple[int, OffsetEntry]:
        """Base offset of the segment where a read of `offset` begins, and the entry of its index to begin at."""
        number = bisect_right(self.bases, offset) - 1
        base = self.bases[number]
        path = self._path(base, names.INDEX)
        if not self._fs.exists(path):
            return base, OffsetEntry(-1, base, 0)
        with OffsetIndex.open(self._fs, path, base, active=number == len(self.bases) - 1) as index:
            return base, index.lookup(offset)

    def flush(self) -> None:
        """Everything that was appended is durable then; the segments before were when they ended."""
        if self.active.is_dirty:
            self.active.flush()

    def close(self) -> None:
        """The end, durable but for names."""
        self.active.close()
        self._active = None

    def abandon(self) -> None:
        """The end, with the files as they are."""
        active, self._active = self._active, None
        if active is not None:
            active.abandon()

    def check(self) -> None:
        """Assert what holds at any time."""
        assert self.bases == sorted(set(self.bases))
        assert self.bases[-1] == self.active.base_offset
        self.active.check()

    def _path(self, offset: int, suffix: str) -> str:
        return os.path.join(self._directory, names.segment_file(offset, suffix))
