"""Runs a share of the fuzz; `make hostile` runs the rest. KEYTAIL_HOSTILE_INPUTS and KEYTAIL_HOSTILE_DIRECTORIES set
the numbers of inputs, and KEYTAIL_SEED sets the seed.
"""

from __future__ import annotations

import ctypes
import os
import random

import pytest

from tests import golden
from tests.chance import SEED
from tests.hostile import directories, fuzz
from tests.hostile.arena import Arena
from tests.hostile.corpus import corpus
from tests.hostile.mutator import Mutator, split
from tests.hostile.parsers import read_log
from tests.reference.batches import Rec

INPUTS = int(os.environ.get("KEYTAIL_HOSTILE_INPUTS", "1500"))
DIRECTORIES = int(os.environ.get("KEYTAIL_HOSTILE_DIRECTORIES", "15"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(golden.unpack(tmp_path_factory.mktemp("golden")))


@pytest.mark.long
def test_damaged_bytes_are_refused_or_read_correctly(root: str) -> None:
    item = fuzz.parsers(root)
    fuzz.warm(item, SEED, 100)
    tally = fuzz.Runner(item, SEED).run(0, INPUTS)
    assert not tally.defects, f"seed {SEED}: {tally}"
    assert sum(tally.inputs.values()) == INPUTS


@pytest.mark.long
def test_damaged_directories_are_refused_or_processed_correctly(root: str) -> None:
    item = fuzz.directories(root)
    fuzz.warm(item, SEED, 3)
    tally = fuzz.Runner(item, SEED).run(0, DIRECTORIES)
    assert not tally.defects, f"seed {SEED}: {tally}"


def test_the_same_seed_and_number_cause_the_same_damage(root: str) -> None:
    of = Mutator(list(corpus(root).logs))
    spoiled = [of.log(random.Random(f"7/{number}")) for number in range(300)]
    assert spoiled == [of.log(random.Random(f"7/{number}")) for number in range(300)]
    assert sum(log not in of.sources for log in spoiled) > 250
    assert len(set(spoiled)) > 250
    assert all(b"".join(split(log)) == log for log in spoiled)


def test_undamaged_inputs_are_valid_and_damage_reaches_the_records(root: str) -> None:
    of = Mutator(list(corpus(root).logs))
    assert all(isinstance(read_log(log), list) for log in of.sources)
    reasons = {str(getattr(read_log(of.log(random.Random(number))), "what", "")) for number in range(1500)}
    for part in ("checksum", "record", "offset", "cannot be read", "varint"):
        assert any(part in reason for reason in reasons), f"no damage of the kind {part!r}: {reasons}"


@pytest.mark.long
def test_the_runner_reports_crashes_hangs_memory_and_errors() -> None:
    """The code that monitors the parsers is tested, too."""

    def one(seed: int, number: int) -> str:
        if number == 3:
            os.kill(os.getpid(), 11)
        if number == 5:
            while True:
                pass
        if number == 7:
            bytearray(8 << 30)
        if number == 8:
            raise KeyError("a traceback")
        return "fine"

    tally = fuzz.Runner(one, 0, stuck_s=1.0).run(0, 12)
    assert {key.split(":")[0].split(" at")[0] for key in tally.defects} == {
        "the process died", "no end after 1 s", "MemoryError", "KeyError",
    }  # fmt: skip
    assert sorted(number for numbers in tally.defects.values() for number in numbers) == [3, 5, 7, 8]


def test_access_before_or_after_guarded_memory_ends_the_process() -> None:
    """An arena has an inaccessible page before and after its memory."""

    def beyond(seed: int, number: int) -> str:
        array = Arena(100).put(b"guarded", in_front=number == 1)
        at = array.ctypes.data + (len(array) if number == 0 else -1)
        return str(ctypes.c_uint8.from_address(at).value)

    tally = fuzz.Runner(beyond, 0).run(0, 2)
    assert [key for key in tally.defects if "SIGSEGV" in key]
    assert sorted(number for numbers in tally.defects.values() for number in numbers) == [0, 1]


def test_a_wrong_result_is_detected(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reader returned another timestamp, the fuzz would report it."""
    from tests.hostile import parsers

    real = parsers._as_recs

    def wrong(table: object) -> list[Rec]:
        return [Rec(rec.offset, rec.timestamp + 1, rec.key, rec.value, rec.headers) for rec in real(table)]

    monkeypatch.setattr(parsers, "_as_recs", wrong)
    monkeypatch.setenv("KEYTAIL_HOSTILE_TARGET", "chunk reader")
    runner = fuzz.Runner(fuzz.parsers(root), SEED)
    # Most damaged inputs are refused, so that one of about ten reveals the error.
    assert any(runner.run(first, 40).defects for first in range(0, 800, 40))


def test_only_the_offsets_of_cleaned_segments_must_ascend() -> None:
    """A compaction ends at the high watermark, and neither reads nor changes the segments above it."""

    def segment(base: int, *offsets: int) -> tuple[int, list[Rec] | None, int]:
        return base, [Rec(offset, 0, b"%d" % offset, b"") for offset in offsets], 100

    log, shorter = [segment(0, 0, 1), segment(2, 9, 5)], [segment(0, 0, 1), segment(2, 9)]
    directories._compacted("t-0", "compacted", log, log, set(), 2)
    with pytest.raises(directories.Wrong, match="do not ascend"):
        directories._compacted("t-0", "compacted", log, log, set(), 3)
    with pytest.raises(directories.Wrong, match="changed above offset 2"):
        directories._compacted("t-0", "compacted", log, shorter, set(), 2)
