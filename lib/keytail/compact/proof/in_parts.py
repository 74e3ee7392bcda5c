"""Proves one pass in several threads: the sources are divided into parts, each of which is walked beside its output.

A part begins in the middle of a source and of an output, in the state that the walk over everything before would have
reached (boundaries.py). The state with which a part begins is only a guess, derived from headers and index files. The
guess is not trusted: each part must end in exactly the state in which the next part began. By induction, all parts
together are the proof that one walk would be. The parts share only the table of keys, whose contents do not depend on
the order of the keys.

If a guess is wrong, if a part finds a violation, or if the pass has transactions, whose state is not guessed, one walk
proves the pass. Only that walk reports violations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.compact.proof.boundaries import Boundary, Group, boundaries_of
from keytail.compact.proof.keys import Keys, KeysOfPart
from keytail.compact.proof.output import finish_output, open_checked, start_output
from keytail.compact.proof.state import PartOfProof, Proof, ProofSpec
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.side_by_side import side_by_side

_PARTS_PER_THREAD = 4  # with several parts per thread, all threads end at about the same time
_MIN_PART_BYTES = 1 << 20


class _OneWalk(Exception):
    """The pass must be proven by one walk."""


@dataclass(frozen=True)
class _Part:
    """The walk over a group from `start` (None: the start of the group) to `stop` (None: its end)."""

    group: Group
    start: Boundary | None
    stop: Boundary | None


class _PartProof(Proof):
    """The proof of one part after the other, by one thread at a time."""

    def __init__(self, fs: FileSystem, spec: ProofSpec, keys: Keys) -> None:
        super().__init__(fs, spec, part=PartOfProof(KeysOfPart(keys), None))
        self.source.reads_ahead = self.output.reads_ahead = False
        self.sums = np.zeros(4, np.int64)

    def ensure_markers(self) -> None:
        raise _OneWalk

    def restart(self, group: Group, start: Boundary | None) -> None:
        """Begin a part, in the state `start`, and open its output."""
        self.restart_state()
        first = start.output if start else 0
        self.state.output.number = group.outputs_before + first - 1
        self.waiting = list(group.outputs[first:])
        start_output(self)
        if start is not None:
            assert self.current is not None
            self.output.open(self.current.paths[names.LOG], self.current.log_bytes, start.output_position)

    def count_part(self) -> None:
        """Add the totals of the part that has ended to the sums."""
        totals = self.state.totals
        self.sums += [totals.batches_read, totals.batches_kept, totals.records_read, totals.records_kept]


def prove_in_parts(
    fs: FileSystem,
    spec: ProofSpec,
    groups: Sequence[Group],
    keys: Keys,
    walk: Callable[[Proof, Callable[[], bool]], None],
) -> list[int] | None:
    """Prove the groups in `spec.threads` threads, with all keys in `keys`. Return the numbers of batches checked and
    kept, and of records checked and kept; None if one walk must prove the groups. The caller checks the latest records
    in `keys`.

    `walk(proof, stopped)` walks the open source to its end, or until `stopped()` is true.
    """
    source_bytes = sum(segment.log_bytes for group in groups for segment in group.sources)
    part_bytes = max(_MIN_PART_BYTES, source_bytes // (_PARTS_PER_THREAD * spec.threads))
    proofs: list[_PartProof] = []
    idle: list[_PartProof] = []
    is_over = False

    def parts() -> Generator[_Part, None, None]:
        for group in groups:
            starts = [None, *boundaries_of(fs, spec, group, part_bytes)]
            for start, stop in zip(starts, [*starts[1:], None], strict=True):
                yield _Part(group, start, stop)

    def prove(part: _Part) -> tuple[_Part, Boundary]:
        nonlocal is_over
        try:
            proof = idle.pop()
        except IndexError:
            proof = _PartProof(fs, spec, keys)
            proofs.append(proof)
        try:
            return part, _prove(proof, part, walk, lambda: is_over)
        except BaseException:  # one walk follows, or no walk after a signal: the other threads need not end their parts
            is_over = True
            raise
        finally:
            idle.append(proof)

    done = side_by_side(parts(), prove, spec.threads)
    try:
        with contextlib.closing(done):
            last_offset = -1
            for part, end in done:
                overlaps = part.start is None and last_offset >= part.group.sources[0].base_offset
                if overlaps or part.stop not in (None, end):
                    is_over = True
                    return None
                last_offset = end.source_last_offset
    except (_OneWalk, KeytailError):
        return None
    finally:
        for proof in proofs:
            proof.close()
    if is_over:
        return None
    return np.sum([proof.sums for proof in proofs], axis=0).tolist()


def _prove(
    proof: _PartProof, part: _Part, walk: Callable[[Proof, Callable[[], bool]], None], stopped: Callable[[], bool]
) -> Boundary:
    """Prove a part; return the state at its end."""
    group, start, stop = part.group, part.start, part.stop
    proof.restart(group, start)
    first, last = start.source if start else 0, stop.source if stop else len(group.sources) - 1
    for number in range(first, last + 1):
        segment = group.sources[number]
        _open(proof, segment, start if start and number == first else None, stop if number == last else None)
        walk(proof, stopped)
    end = Boundary.of(proof, last, group.outputs_before)
    if stop is None:
        while proof.waiting:
            finish_output(proof)
            start_output(proof)
        finish_output(proof)
    proof.put_keys()
    proof.count_part()
    return end


def _open(proof: _PartProof, segment: SegmentFacts, start: Boundary | None, stop: Boundary | None) -> None:
    """Open a source from `start` on, up to `stop`."""
    path = os.path.join(proof.path, names.segment_file(segment.base_offset, names.LOG))
    open_checked(proof, proof.source, path, segment.log_bytes)
    end = stop.source_position if stop else segment.log_bytes
    proof.source.open(path, end, start.source_position if start else 0)
    proof.start_source(segment)
    if start is not None:
        start.set_in(proof)
