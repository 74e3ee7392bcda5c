"""Several threads produce the same bytes, results and errors as one thread."""

from __future__ import annotations

import functools
import os
import random
import struct
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition
from keytail.compact.map_phase import in_threads as map_in_threads
from keytail.compact.map_phase import reading
from keytail.compact.proof import in_parts
from keytail.compact.proof.boundaries import Boundary
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.write_phase import in_threads as write_in_threads
from keytail.compact.write_phase import rewrite
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.key_scan import KeyScanner
from keytail.log.records.scan import RecordScanner
from keytail.log.side_by_side import side_by_side
from tests.chance import chance, draws
from tests.compact.logs import random_log, task_for, write_log
from tests.compact.measure.logs import NOW, random_task
from tests.compact.test_passes import files_of, run_passes
from tests.in_pieces import read_in_pieces
from tests.reference.indexing import index_files

Outcome = tuple[Any, ...]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiny chunks, arenas, portions and parts, so that threads divide even a small log."""
    monkeypatch.setattr(
        cleaner, "SegmentReader", functools.partial(SegmentReader, chunk_bytes=400, arena_bytes=300)
    )
    monkeypatch.setattr(rewrite, "RecordScanner", lambda: RecordScanner(3))
    monkeypatch.setattr(reading, "KeyScanner", lambda seed: KeyScanner(seed, 3))
    monkeypatch.setattr(in_parts, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(in_parts, "_PARTS_PER_THREAD", 30)


def some_task(rng: random.Random, directory: Path) -> CleaningTask:
    """Return the task of a random log with at least one closed segment."""
    number = 0
    while True:
        number += 1
        task = random_task(rng, directory / f"{number}" / "t-0")
        if task is not None:
            return replace(task, hottest_keys=rng.choice([0, 0, 3]), map_max_entries=rng.choice([None, None, 3, 7]))


def outcome(task: CleaningTask, threads: int) -> Outcome:
    """Return the files, result and counts of a task with this number of threads, or its error."""
    before = threading.active_count()
    path = Path(task.partition_path)
    try:
        result: CleaningResult = clean_partition(LOCAL, replace(task, threads=threads))
    except KeytailError as error:
        assert not list(path.glob("*.clean"))
        return type(error), error.what, error.path, error.byte_position, error.offset, error.remedy, error.slug
    finally:
        assert threading.active_count() <= before + 1, "a thread outlives its task"
    files = {file.name: file.read_bytes() for file in path.glob("*.clean")}
    for name in files:
        (path / name).unlink()
    return files, replace(result, phases_s={}), result.sources, result.key_counts


@pytest.mark.parametrize("case", range(draws(60)))
def test_the_result_does_not_depend_on_the_number_of_threads(
    case: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(chance().randrange(2**32) + case)
    if rng.random() < 0.2:
        read_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
    if rng.random() < 0.3:
        monkeypatch.setattr(map_in_threads, "_MAX_KEYS", 4)
    task = some_task(rng, tmp_path)
    one = outcome(task, 1)
    for threads in (2, 3, 5):
        assert outcome(task, threads) == one


def damage(rng: random.Random, task: CleaningTask, segment: SegmentFacts, times: int) -> None:
    """Change bytes of a segment, with or without the checksums of their batches."""
    path = Path(task.path(segment.base_offset, ".log"))
    data = bytearray(path.read_bytes())
    bounds, at = [], 0
    while at < len(data):
        bounds.append((at, at + struct.unpack_from(">i", data, at + 8)[0] + 12))
        at = bounds[-1][1]
    for _ in range(times):
        start, end = rng.choice(bounds)
        data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.7 and data[start + 16] == 2:
            data[start + 17 : start + 21] = struct.pack(">I", crc32c(bytes(data[start + 21 : end])))
    path.write_bytes(data)
    os.utime(path, ns=(segment.log_mtime_ns, segment.log_mtime_ns))


@pytest.mark.parametrize("case", range(draws(120)))
def test_the_error_is_the_first_in_the_order_of_the_log(case: int, small: None, tmp_path: Path) -> None:
    """The map is not full here: with one thread, timing decides whether an error just after the end of a full map is
    found."""
    rng = random.Random(chance().randrange(2**32) + case)
    task = some_task(rng, tmp_path)
    while not any(segment.log_bytes for segment in task.segments):
        task = some_task(rng, tmp_path / "another")
    task = replace(task, map_max_entries=None)
    filled = [segment for segment in task.segments if segment.log_bytes]
    for segment in rng.sample(filled, min(len(filled), rng.choice([1, 1, 2]))):
        damage(rng, task, segment, rng.choice([1, 1, 3]))
    one = outcome(task, 1)
    for threads in (2, 3, 5):
        assert outcome(task, threads) == one


@pytest.mark.parametrize("case", range(draws(20)))
def test_passes_in_threads_have_the_result_of_one_pass(case: int, small: None, tmp_path: Path) -> None:
    rng = random.Random(chance().randrange(2**32) + case)
    log = random_log(rng, NOW, segments=6, codecs=rng.choice([(0,), (0, 1, 2, 3, 4)]))
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = min(rng.choice([base, *log.batch_ends]), end - 1)
    rounds = []
    for name, threads, bound in (("one", 1, None), ("many", rng.choice([2, 3, 5]), rng.choice([1, 1000, 3000]))):
        path = str(tmp_path / name / "t-0")
        facts = write_log(path, log.segments)
        task = task_for(
            path, log, facts, NOW, first_dirty=first_dirty, drop_keyless=True, grouping="measured",
            config={"segment_bytes": 600}, threads=threads, max_scratch_bytes=bound,
        )  # fmt: skip
        rounds.append(run_passes(task))
        for left in Path(path).glob("*.clean"):
            left.unlink()
    assert files_of(tmp_path / "many" / "t-0") == files_of(tmp_path / "one" / "t-0")
    assert replace(rounds[1][-1], groups=(), phases_s={}) == replace(rounds[0][-1], groups=(), phases_s={})


def plain_task(tmp_path: Path, **fields: Any) -> CleaningTask:
    """Return the task of a log in which each batch keeps some records."""
    log = random_log(random.Random(5), NOW, segments=9)
    facts = write_log(str(tmp_path / "t-0"), log.segments)
    for segment in log.segments:
        index, _ = index_files(segment.log, segment.base_offset, 64)
        (tmp_path / "t-0" / f"{segment.base_offset:020d}.index").write_bytes(index)
    first = log.segments[0].base_offset
    return task_for(str(tmp_path / "t-0"), log, facts, NOW, first_dirty=first, drop_keyless=True, **fields)


def in_wrong_order(items: Generator[Any, None, None], work: Callable[[Any], Any], threads: int) -> Any:
    """Yield the results of `side_by_side` with neighbours exchanged, except at the ends of segments."""
    done = list(side_by_side(items, work, threads))
    for k in range(len(done) - 1):
        if all(getattr(item, "source", True) for item in done[k : k + 2]):
            done[k], done[k + 1] = done[k + 1], done[k]
    yield from done


@pytest.mark.parametrize("module", [map_in_threads, write_in_threads])
def test_a_wrong_order_is_detected(
    module: Any, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = plain_task(tmp_path)
    one = outcome(task, 1)
    assert outcome(task, 2) == one
    monkeypatch.setattr(module, "side_by_side", in_wrong_order)
    assert outcome(task, 2) != one


def test_a_proof_is_divided_within_segments(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, parts = plain_task(tmp_path), []
    prove = in_parts._prove

    def counted(proof: Any, part: Any, *more: Any) -> Boundary:
        parts.append(part)
        return prove(proof, part, *more)

    monkeypatch.setattr(in_parts, "_prove", counted)
    monkeypatch.setattr(cleaner, "prove", functools.partial(_only_in_parts, cleaner.prove, monkeypatch))
    outcome(task, 3)
    assert sum(part.start is not None for part in parts) >= 4, "parts must begin within segments"
    assert {part.start.is_checked for part in parts if part.start} == {False, True}


def _only_in_parts(real: Any, monkeypatch: pytest.MonkeyPatch, fs: Any, spec: Any, so_far: Any) -> Any:
    """Prove in parts, and fail if one thread has to walk everything again."""
    with monkeypatch.context() as patch:
        patch.setattr("keytail.compact.proof.prove._prove_groups", lambda proof: pytest.fail("the proof is one walk"))
        return real(fs, spec, so_far)


@pytest.mark.parametrize("field", [name for name in Boundary.__dataclass_fields__ if name not in ("source", "output")])
def test_after_a_wrong_guess_the_proof_is_one_walk(
    field: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same, because the state in which a part begins is compared with the end of the part before."""
    task = plain_task(tmp_path)
    one = outcome(task, 1)
    found, walks = in_parts.boundaries_of, []

    def guess(*arguments: Any) -> list[Boundary]:
        boundaries = found(*arguments)
        for number, boundary in enumerate(boundaries):
            value = getattr(boundary, field)
            if field == "indexes":
                wrong = value._replace(since_last_entry=value.since_last_entry + 1)
            else:
                wrong = not value if field == "is_checked" else value + 1
            boundaries[number] = replace(boundary, **{field: wrong})
        return boundaries

    monkeypatch.setattr(in_parts, "boundaries_of", guess)
    real = in_parts.prove_in_parts
    monkeypatch.setattr(
        "keytail.compact.proof.prove.prove_in_parts", lambda *args: walks.append(real(*args)) or walks[-1]
    )
    assert outcome(task, 3) == one
    assert walks == [None]
