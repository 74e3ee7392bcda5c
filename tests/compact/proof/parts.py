"""Proves in parts that begin at random batches, and compares the verdict with that of one walk."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keytail.compact.proof import boundaries, in_parts
from keytail.compact.proof import prove as proof
from keytail.compact.proof.boundaries import Boundary, Group
from keytail.compact.proof.in_parts import _OneWalk, _Part, _PartProof
from keytail.compact.proof.keys import Keys
from keytail.compact.proof.prove import ProofReport
from keytail.compact.proof.state import Proof, ProofSpec
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem

MEMORY_BYTES = 1 << 24
THREADS = (2, 3, 5)


@dataclass
class Parts:
    """Divides proofs at random batches. `share` is the share of batches after which a part begins. `begun` counts these
    parts, `agreed` the proofs in parts that passed, and `refused` those that were left to one walk, which failed.
    """

    rng: random.Random
    share: float | None = None
    begun: int = 0
    agreed: int = 0
    refused: int = 0
    _states: list[str] = field(default_factory=lambda: ["guessed", "walked"])

    def prove(self, fs: FileSystem, spec: ProofSpec) -> ProofReport:
        """Prove in one walk, and in parts by a drawn number of threads, once with guessed states at their boundaries,
        once with those of a walk. Fails if parts pass although one walk fails, or if their report differs.
        """
        error, report = None, None
        try:
            report = proof.prove(fs, replace(spec, threads=1))
        except KeytailError as problem:
            error = problem
        for states in self._states:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(in_parts, "boundaries_of", self.cuts(states))
                found = self.prove_in_parts(fs, replace(spec, threads=self.rng.choice(THREADS)))
            if error is not None:
                assert found is None, f"the proof in parts passes ({states} states), but one walk fails: {error}"
                self.refused += 1
            elif found is not None:
                assert report is not None and replace(report, so_far=None) == found
                self.agreed += 1
        if error is not None:
            raise error
        assert report is not None
        return report

    @staticmethod
    def prove_in_parts(fs: FileSystem, spec: ProofSpec) -> ProofReport | None:
        """Return the report of a proof in parts, or None if the proof needs one walk."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proof, "_prove_groups", _raise_one_walk)
            try:
                return proof.prove(fs, spec)
            except (_OneWalk, KeytailError):  # an error before any walk, which the proof in one walk also reports
                return None

    def cuts(self, states: str) -> Callable[..., list[Boundary]]:
        """Return a `boundaries_of` that divides at drawn batches, with guessed states or those of a walk."""
        share = self.rng.choice([0.2, 0.5, 1.0]) if self.share is None else self.share

        def boundaries_of(fs: FileSystem, spec: ProofSpec, group: Group, part_bytes: int) -> list[Boundary]:
            cuts = [
                (number, position)
                for number, segment in enumerate(group.sources)
                for position in batches_of(spec, segment.base_offset, segment.log_bytes)
                if self.rng.random() < share
            ]
            found = walked(fs, spec, group, cuts) if states == "walked" else []
            for number, position in cuts[len(found) :]:
                with contextlib.suppress(boundaries._NoBoundary, OSError):
                    found.append(boundaries._boundary(fs, spec, group, number, position))
            self.begun += len(found)
            return found

        return boundaries_of


def _raise_one_walk(_proof: Proof) -> None:
    raise _OneWalk


def batches_of(spec: ProofSpec, base_offset: int, log_bytes: int) -> list[int]:
    """Return the positions of the batches of a source, as far as their sizes are possible."""
    with open(os.path.join(spec.partition_path, names.segment_file(base_offset, names.LOG)), "rb") as file:
        data = file.read(log_bytes)
    found, at = [], 0
    while at + 12 <= len(data):
        found.append(at)
        at += max(12, int.from_bytes(data[at + 8 : at + 12], "big", signed=True) + 12)
    return found


def walked(fs: FileSystem, spec: ProofSpec, group: Group, cuts: list[tuple[int, int]]) -> list[Boundary]:
    """Return the states that a walk has after the batches at `cuts`, as far as it passes. With these, no comparison of
    states fails, so that only the checks of the parts can find an error.
    """
    found: list[Boundary] = []
    keys = Keys(MEMORY_BYTES, spec.secret)
    walker = _PartProof(fs, spec, keys)
    try:
        for number, position in cuts:
            segment = group.sources[number]
            at = batches_of(spec, segment.base_offset, segment.log_bytes)
            end = (at[at.index(position) + 1 :] or [segment.log_bytes])[0]
            stop: Any = replace(_NOWHERE, source=number, source_position=end)
            part = _Part(group, found[-1] if found else None, stop)
            found.append(in_parts._prove(walker, part, proof.walk, lambda: False))
    except (KeytailError, _OneWalk):
        pass
    finally:
        walker.close()
        keys.close()
    return found


_NOWHERE = Boundary(0, 0, 0, 0, 0, 0, False, boundaries.IndexState())
