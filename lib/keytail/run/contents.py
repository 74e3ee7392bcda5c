"""Summarizes the contents of segments in tasks. A task reads a few segments and returns one answer for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keytail.errors import EXPLAINED, REPORT_IT, KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.contents import SegmentContents, contents_of
from keytail.run.batching import in_bundles
from keytail.run.engine import Engine
from keytail.run.tasks import as_problem

# Maximum bytes of the segments of a task with several segments: about what it reads in some tenths of a second.
TASK_BYTES = 256 << 20


@dataclass(frozen=True)
class SegmentPlace:
    """The place of one segment: its partition's directory, and its base offset."""

    partition_path: str
    base_offset: int


Answer = SegmentContents | KeytailError


def read_contents(
    engine: Engine,
    places: Sequence[SegmentPlace],
    fs: FileSystem = LOCAL,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Return for each place, in order, the summary of the segment's contents, or the error that prevented the reading.
    """
    parts = list(in_bundles(places, lambda place: _log_bytes(place, fs), TASK_BYTES))
    answers: list[Answer] = []
    outcomes = engine.run_bundle(parts, _read_on_worker, name="ledger: segments", stopped=stopped)
    for part, outcome in zip(parts, outcomes, strict=True):
        problem = outcome.problem or KeytailError(
            "internal error: a task returned no result", remedy=REPORT_IT, slug="task-without-result"
        )
        answers += outcome.value if outcome.value is not None else [problem] * len(part)
    return answers


def _read_on_worker(places: Sequence[SegmentPlace], attempt: str) -> list[Answer]:
    reader = SegmentReader(LOCAL)
    return [_read(place, reader) for place in places]


def _read(place: SegmentPlace, reader: SegmentReader) -> Answer:
    try:
        return contents_of(LOCAL, place.partition_path, place.base_offset, reader)
    except EXPLAINED as problem:
        return as_problem(problem)


def _log_bytes(place: SegmentPlace, fs: FileSystem) -> int:
    try:
        return fs.stat(os.path.join(place.partition_path, names.segment_file(place.base_offset, names.LOG))).size_bytes
    except OSError:  # the task reports the error
        return 0
