"""Proves each source as soon as it has been rewritten, for a log that does not fit into the page cache.

The proof reads sources and outputs itself, as `prove` does, but what was just rewritten is still in the page cache: the
log is read from the disk twice, by the map phase and by the write phase, and not three times. The last output is read
as far as it has been written. If proven batches are moved to another output (OutputWriter.outputs), or if the index
entries that were checked in memory are not those of the file, the proof fails.

Violations are not reported here: the caller then proves everything again with `prove`, and only that proof reports
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from keytail.compact.proof.output import check_size, finish_output, output_of, start_output
from keytail.compact.proof.prove import base_after, check_groups, open_source, refuse_unjustified, walk
from keytail.compact.proof.state import Proof, ProofSpec
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts
    from keytail.log.replacement.replace import GroupOutput, OutputSegment, UnfinishedOutput

Outputs = Callable[[], "Sequence[OutputSegment | UnfinishedOutput]"]


class _Violation(Exception):
    """A violation that only this proof looks for."""


class ProofAsWritten:
    """The proof of one pass that rewrites all segments below the end offset of `spec`, whose groups are not known yet.

    `outputs` returns the outputs so far. Call `take` for all sources, in ascending order, before batches of later
    sources are appended; at the end, call `passes`, and in any case `close`.
    """

    def __init__(self, fs: FileSystem, spec: ProofSpec, outputs: Outputs) -> None:
        self._spec, self._outputs = spec, outputs
        self._proof: Proof | None = Proof(fs, spec)  # None: the proof has failed, and its memory is free
        self._sources: list[SegmentFacts] = []  # those that have been opened

    def take(self, sources: Sequence[SegmentFacts], end_bytes: int) -> None:
        """Prove the next sources, unless something has failed; the last of them only up to byte position `end_bytes`,
        where a batch ends. The next call begins with that source, if it is not proven to its end."""
        self._unless_failed(lambda proof: self._walk(proof, sources, end_bytes))

    def passes(self, groups: Sequence[GroupOutput]) -> bool:
        """Return whether all outputs, which are finished and are those of `groups`, may replace the sources."""
        self._unless_failed(lambda proof: self._finish(proof, groups))
        return self._proof is not None

    def close(self) -> None:
        """End the threads of the proof, and free its memory."""
        proof, self._proof = self._proof, None
        if proof is not None:
            proof.close()

    def _unless_failed(self, prove: Callable[[Proof], None]) -> None:
        if self._proof is None:
            return
        try:
            prove(self._proof)
        except (KeytailError, _Violation):
            self.close()

    def _walk(self, proof: Proof, sources: Sequence[SegmentFacts], end_bytes: int) -> None:
        self._look_at_outputs(proof, sources[-1])
        if proof.current is None:
            start_output(proof)
        for source in sources:
            if source not in self._sources[-1:]:
                self._check_end(proof)
                self._sources.append(source)
                open_source(proof, source)
            proof.source.size_bytes = end_bytes if source is sources[-1] else source.log_bytes
            walk(proof)
            if proof.state.source.last_offset >= base_after(self._spec.segments, source.base_offset):
                raise _Violation("a batch ends above the next segment's base offset")

    def _check_end(self, proof: Proof) -> None:
        """Raise _Violation unless the last source that was opened has been walked to its end."""
        if self._sources and proof.source.size_bytes != self._sources[-1].log_bytes:
            raise _Violation("a source was not proven to its end")

    def _finish(self, proof: Proof, groups: Sequence[GroupOutput]) -> None:
        check_groups(replace(self._spec, groups=groups), self._sources)
        self._check_end(proof)
        self._look_at_outputs(proof, self._sources[-1])
        finish_output(proof)
        while proof.waiting:
            start_output(proof)
            finish_output(proof)
        proof.put_keys()
        refuse_unjustified(proof.fs, proof.path, self._spec.segments, *proof.keys.first_unjustified())

    def _look_at_outputs(self, proof: Proof, last_source: SegmentFacts) -> None:
        """Set the outputs that follow the current one, and set how far the current output has been written."""
        outputs = list(self._outputs())
        end = base_after(self._spec.segments, last_source.base_offset)
        ends = [*(output.base_offset for output in outputs[1:]), end]
        state = proof.state.output
        proof.waiting = list(zip(outputs, ends, strict=True))[int(state.number) + 1 :]
        if proof.current is None:
            return
        before, now = proof.current, output_of(proof, outputs[int(state.number)], ends[int(state.number)])
        entries, times = int(proof.state.indexes.index_at), int(proof.state.indexes.time_at)
        is_same = (
            before.paths[names.LOG] == now.paths[names.LOG]
            and np.array_equal(before.index[:entries], now.index[:entries])
            and np.array_equal(before.time_index[:times], now.time_index[:times])
            # If an output becomes too large, the batches of its last source are moved to another output.
            and now.log_bytes >= proof.output.position + int(state.at)
            and int(state.last_offset) < now.end_offset
        )
        if not is_same:
            raise _Violation("an output was changed after it had been proven")
        check_size(proof, now.paths[names.LOG], now.log_bytes)
        proof.current = now
        proof.output.size_bytes = now.log_bytes
        state.next_base = now.end_offset
