"""Proves each source as soon as it has been rewritten, for a log that does not fit into the page cache.

The proof reads sources and outputs itself, as `prove` does, but what was just rewritten is still in the page cache: the
log is read from the disk twice, by the map phase and by the write phase, and not three times. The last output is read
as far as it has been written. If proven batches are moved to another output (OutputWriter.outputs), or if the index
entries that were checked in memory are not those of the file, the proof fails.

A violation is not reported here: the caller then proves everything again with `prove`, and only that proof reports
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from keytail.compact.proof.output import check_size, finish_output, output_of, start_output
from keytail.compact.proof.prove import base_after, check_groups, open_source, refuse_unjustified, walk
from keytail.compact.proof.state import REMEDY, Proof, ProofSpec
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replacement.replace import GroupOutput, OutputSegment, UnfinishedOutput

Outputs = Callable[[], "Sequence[OutputSegment | UnfinishedOutput]"]


class ProofAsWritten:
    """The proof of one pass that rewrites all segments below the end offset of `spec`, whose groups are not known yet.

    `outputs` returns the outputs so far. Call `take` with all sources, in ascending order, when their batches have been
    appended, and no later ones; at the end, call `passes`, and in any case `close`.
    """

    def __init__(self, fs: FileSystem, spec: ProofSpec, outputs: Outputs) -> None:
        self._spec, self._outputs = spec, outputs
        self._proof = Proof(fs, spec)
        self._sources: list[SegmentFacts] = []  # those that have been opened
        self.has_failed = False

    def take(self, sources: Sequence[SegmentFacts], end_bytes: int) -> None:
        """Prove the next sources, unless something has failed; the last of them only up to byte position `end_bytes`,
        where a batch ends. The next call begins with that source, if it is not proven to its end."""
        self._unless_failed(lambda: self._walk(sources, end_bytes))

    def passes(self, groups: Sequence[GroupOutput]) -> bool:
        """Return whether all outputs, which are finished and are those of `groups`, may replace the sources."""
        self._unless_failed(lambda: self._finish(groups))
        return not self.has_failed

    def close(self) -> None:
        self._proof.close()

    def _unless_failed(self, prove: Callable[[], None]) -> None:
        if self.has_failed:
            return
        try:
            prove()
        except KeytailError:
            self.has_failed = True

    def _walk(self, sources: Sequence[SegmentFacts], end_bytes: int) -> None:
        proof = self._proof
        self._look_at_outputs(sources[-1])
        if proof.current is None:
            start_output(proof)
        for source in sources:
            if source not in self._sources[-1:]:
                self._sources.append(source)
                open_source(proof, source)
            proof.source.size_bytes = end_bytes if source is sources[-1] else source.log_bytes
            walk(proof)

    def _finish(self, groups: Sequence[GroupOutput]) -> None:
        check_groups(replace(self._spec, groups=groups), self._sources)
        self._look_at_outputs(self._sources[-1])
        finish_output(self._proof)
        while self._proof.waiting:
            start_output(self._proof)
            finish_output(self._proof)
        self._proof.put_keys()
        refuse_unjustified(
            self._proof.fs, self._proof.path, self._spec.segments, *self._proof.keys.first_unjustified()
        )

    def _look_at_outputs(self, last_source: SegmentFacts) -> None:
        """Set the outputs that follow the current one, and set how far the current output has been written."""
        proof, outputs = self._proof, list(self._outputs())
        end = base_after(self._spec.segments, last_source.base_offset)
        ends = [*(output.base_offset for output in outputs[1:]), end]
        number = int(proof.state.output.number)
        proof.waiting = list(zip(outputs, ends, strict=True))[number + 1 :]
        if proof.current is None:
            return
        before, now = proof.current, output_of(proof, outputs[number], ends[number])
        checked = int(proof.state.indexes.index_at), int(proof.state.indexes.time_at)
        is_same = np.array_equal(before.index[: checked[0]], now.index[: checked[0]])
        is_same = is_same and np.array_equal(before.time_index[: checked[1]], now.time_index[: checked[1]])
        # If an output becomes too large, the batches of its last source are moved to another output.
        is_same = is_same and now.log_bytes >= proof.output.position + int(proof.state.output.at)
        if not is_same or before.paths[names.LOG] != now.paths[names.LOG]:
            path = now.paths[names.LOG]
            raise KeytailError("an output was changed after it had been proven", path=path, remedy=REMEDY)
        check_size(proof, now.paths[names.LOG], now.log_bytes)
        proof.current = now
        proof.output.size_bytes = now.log_bytes
        proof.state.output.next_base = now.end_offset
