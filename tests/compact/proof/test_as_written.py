"""A proof of each source as soon as it is rewritten has the verdict of a proof of finished outputs."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition
from keytail.compact.proof import prove as proof
from keytail.compact.proof.as_written import ProofAsWritten
from keytail.compact.proof.prove import ProofReport, base_after
from keytail.compact.proof.state import ProofSpec
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.passes import scratch_bytes
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.index.indexer import SegmentIndexer
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from keytail.log.replacement.replace import OutputSegment, UnfinishedOutput
from keytail.log.writer import OutputWriter
from tests.chance import SEED, cases, chance, draws
from tests.compact.proof import case as rounds
from tests.compact.proof import test_legacy, test_prove, test_transactions
from tests.compact.proof.test_in_parts import prove_random_changes, random_case
from tests.compact.test_passes import files_of, random_task, rec, run_passes, task_of
from tests.crash.driver import open_files
from tests.in_pieces import read_in_pieces
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.batches import encode_batch
from tests.reference.cleaner import Segment


@dataclass
class AsWritten:
    """Proves finished outputs as if they were just being written, and compares the verdict with that of `prove`."""

    rng: random.Random
    passed: int = 0
    failed: int = 0

    def prove(self, fs: FileSystem, spec: ProofSpec) -> ProofReport:
        error, report = None, None
        try:
            report = proof.prove(fs, spec)
        except KeytailError as problem:
            error = problem
        passes = self._passes(fs, spec)
        assert passes == (error is None), f"as written: {passes}, when finished: {error}"
        self.passed += passes
        self.failed += not passes
        if error is not None:
            raise error
        assert report is not None
        return report

    def _passes(self, fs: FileSystem, spec: ProofSpec) -> bool:
        finished = [output for group in spec.groups for output in group.segments]
        logs = {path: path.read_bytes() for path in (_path(spec, output, names.LOG) for output in finished)}
        written = 0

        def outputs() -> list[OutputSegment | UnfinishedOutput]:
            return _before(spec, finished, logs, written)

        sources = [segment for segment in spec.segments if segment.base_offset < spec.end_offset]
        walk = ProofAsWritten(fs, replace(spec, groups=()), outputs)
        try:
            while sources:
                n = self.rng.choice([1, 1, 2, 3])
                rewritten, sources = sources[:n], sources[n:]
                last = rewritten[-1]
                if self.rng.random() < 0.5 and (ends := _batch_ends(spec, last)):
                    part_bytes, written = self.rng.choice(ends)
                    walk.take(rewritten, part_bytes)
                    rewritten = [last]
                written = base_after(spec.segments, last.base_offset)
                walk.take(rewritten, last.log_bytes)
            written = _ALL
            return walk.passes(spec.groups)
        finally:
            walk.close()
            for path, data in logs.items():
                path.write_bytes(data)


_ALL = 2**63


def _path(spec: ProofSpec, output: OutputSegment, suffix: str) -> Path:
    return Path(spec.partition_path) / next(file.name for file in output.files if file.suffix == suffix)


def _batch_ends(spec: ProofSpec, source: SegmentFacts) -> list[tuple[int, int]]:
    """Return where the batches of a source end: the byte position, and the base offset of the next batch."""
    data = (Path(spec.partition_path) / names.segment_file(source.base_offset, names.LOG)).read_bytes()
    found, at = [], 0
    while at + 12 <= len(data):
        base, size = struct.unpack_from(">qi", data, at)
        if at:
            found.append((at, base))
        at += max(size, 0) + 12
    return found


def _before(
    spec: ProofSpec, finished: list[OutputSegment], logs: dict[Path, bytes], offset: int
) -> list[OutputSegment | UnfinishedOutput]:
    """Set the outputs to their state when all batches below `offset` had been appended, and return them."""
    begun = [output for output in finished if output.base_offset < offset] or finished[:1]
    for output in begun[:-1] if offset < _ALL else begun:
        path = _path(spec, output, names.LOG)
        _set_size(path, logs[path], len(logs[path]))
    if offset == _ALL or not begun:
        return list(begun)
    last = begun[-1]
    path = _path(spec, last, names.LOG)
    data, at = logs[path], 0
    while at + 12 <= len(data):
        base, size = struct.unpack_from(">qi", data, at)
        if base >= offset:
            break
        at += max(size, 0) + 12
    at = min(at, len(data))
    _set_size(path, data, at)
    paths = {suffix: _path(spec, last, suffix) for suffix in (names.LOG, names.INDEX, names.TIME_INDEX)}
    indexes = (paths[suffix].read_bytes() for suffix in (names.INDEX, names.TIME_INDEX))
    written = {suffix: str(path) for suffix, path in paths.items()}
    return [*begun[:-1], UnfinishedOutput(last.base_offset, written, at, *indexes)]


def _set_size(path: Path, data: bytes, size_bytes: int) -> None:
    with path.open("r+b") as file:
        at = min(file.seek(0, os.SEEK_END), size_bytes)
        file.truncate(at)
        file.seek(at)
        file.write(data[at:size_bytes])


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> AsWritten:
    """Prove every case of these tests in both ways."""
    made = AsWritten(chance())
    monkeypatch.setattr(test_prove, "prove", made.prove)
    monkeypatch.setattr(rounds, "prove", made.prove)
    return made


@pytest.mark.parametrize("codec", range(5))
def test_the_proof_passes_without_a_mutation(codec: int, as_written: AsWritten, tmp_path: Path) -> None:
    case = test_prove._example(codec, as_written.rng.choice([0, 1]))
    case.interval = as_written.rng.choice([60, 200])
    case.prove(tmp_path)


@pytest.mark.parametrize("name", test_prove.MUTATIONS)
def test_every_mutation_is_found(
    name: str, as_written: AsWritten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = as_written.rng
    if rng.random() < 0.2:
        read_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
    case = test_prove._example(rng.choice([0, 0, 1, 2, 3, 4]), rng.choice([0, 1]))
    case.interval = rng.choice([60, 200])
    test_prove.MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)


@pytest.mark.parametrize("name", test_legacy.MUTATIONS)
def test_every_mutation_of_messages_is_found(name: str, as_written: AsWritten, tmp_path: Path) -> None:
    case = test_legacy._example(as_written.rng.choice([1, 2]))
    test_legacy.MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)


@pytest.mark.parametrize("name", test_transactions.MUTATIONS)
def test_every_mutation_of_transactions_is_found(name: str, as_written: AsWritten, tmp_path: Path) -> None:
    case = test_transactions._example(as_written.rng.choice([0, 4]))
    test_transactions.MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)


@pytest.mark.parametrize("number", range(draws(120)))
def test_both_have_the_same_verdict_on_random_changes(
    number: int, as_written: AsWritten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_written.rng = rng = random.Random(SEED + number)
    case = random_case(rng)
    case.prove(tmp_path)
    prove_random_changes(rng, case, tmp_path, monkeypatch)


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no log seem to be in the page cache when it is rewritten."""
    monkeypatch.setattr(cleaner, "_EARLY_PROOF_BYTES", 1)
    monkeypatch.setattr(cleaner, "cached_share", lambda *_: 0.0)
    chunk_bytes = chance().choice([200, 1000, 1 << 20])
    monkeypatch.setattr(cleaner, "SegmentReader", partial(SegmentReader, chunk_bytes=chunk_bytes))


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each proof of a cleaning adds its kind."""
    found: list[str] = []
    passes, prove = ProofAsWritten.passes, cleaner.prove

    def as_written(self: ProofAsWritten, *given: object) -> bool:
        found.append("as written")
        return passes(self, *given)

    monkeypatch.setattr(ProofAsWritten, "passes", as_written)
    monkeypatch.setattr(cleaner, "prove", lambda *given: found.append("finished") or prove(*given))
    return found


def test_a_task_writes_the_same_whenever_its_sources_are_proven(
    uncached: None,
    proofs: list[str],
    fast_dir: Path,  # noqa: F811
) -> None:
    rng, early = chance(), 0
    for number in cases(draws(60), lambda: early >= 5):
        clean_in_both_ways(rng, fast_dir / str(number), proofs)
        assert proofs == ["as written"] or "as written" not in proofs, "the first proof fails, and the other one passes"
        early += proofs == ["as written"]


def clean_in_both_ways(rng: random.Random, path: Path, proofs: list[str]) -> None:
    """Clean a random partition and its copy, which seems to be in the page cache, with the same result; `proofs` are
    then those of the former."""
    task = random_task(rng, str(path / "t-0"), rng.choice(["kafka", "measured", "measured"]))
    if rng.random() < 0.3:  # some of these need several passes
        task = replace(task, max_scratch_bytes=scratch_bytes(task) + rng.randint(0, 20_000))
    shutil.copytree(path / "t-0", path / "other")
    other = replace(task, partition_path=str(path / "other"))
    proofs.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaner, "cached_share", lambda *_: 1.0)
        expected = run_passes(other)
    assert set(proofs) == {"finished"}
    proofs.clear()
    results = run_passes(task)
    for result, of_other in zip(results, expected, strict=True):
        assert replace(result, rest=None, phases_s={}) == replace(of_other, rest=None, phases_s={})
    for file in (*Path(task.partition_path).glob("*.clean"), *Path(other.partition_path).glob("*.clean")):
        file.unlink()  # the states of passes
    assert files_of(task.partition_path) == files_of(other.partition_path)


def test_batches_that_are_moved_to_another_output_after_their_proof_are_proven_again(
    uncached: None, proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output seems to have room for its second source, and has not."""
    monkeypatch.setattr(OutputWriter, "current_bytes", property(lambda self: 0))
    monkeypatch.setattr(cleaner, "SegmentReader", partial(SegmentReader, chunk_bytes=200))
    batches = [encode_batch([rec(offset, b"%d" % offset, bytes(200))]) for offset in range(6)]
    segments = [batches[:2], batches[2:], [encode_batch([rec(6, b"z")])]]
    task = task_of(tmp_path / "t-0", segments, 0, config={"segment_bytes": 5 * len(batches[0])})
    result = clean_partition(LOCAL, replace(task, max_scratch_bytes=None, grouping="measured"))
    assert [group.source_bases for group in result.groups] == [(0,), (2,)]
    assert proofs == ["as written", "finished"]


def test_an_index_that_was_changed_after_its_entries_were_proven_is_found(
    uncached: None, proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = SegmentIndexer.close

    def change_first_entry(self: SegmentIndexer) -> tuple[bytes, bytes]:
        index, time_index = close(self)
        return bytes([index[0] ^ 1]) + index[1:], time_index

    monkeypatch.setattr(SegmentIndexer, "close", change_first_entry)
    batches = [encode_batch([rec(offset, b"%d" % offset)]) for offset in range(6)]
    task = task_of(
        tmp_path / "t-0", [batches, [encode_batch([rec(6, b"z")])]], 0,
        config={"segment_bytes": 10**6, "index_interval_bytes": 1},
    )  # fmt: skip
    with pytest.raises(KeytailError, match="offset index entry"):
        clean_partition(LOCAL, replace(task, max_scratch_bytes=None))
    assert proofs == ["as written", "finished"]


def prove_written(
    monkeypatch: pytest.MonkeyPatch, path: Path, case: rounds.Case, first_bytes: int, seen: list[int]
) -> tuple[bool, str]:
    """Prove the outputs of a case in two parts, of which the first ends at byte `first_bytes` of the first source, or
    in one part if that is 0; `seen` are the numbers of outputs that have begun at the end of each part. Return whether
    the proof passes, and the error of the proof of finished outputs.
    """
    answer: list[tuple[bool, str]] = []

    def prove(fs: FileSystem, spec: ProofSpec) -> ProofReport | None:
        error = ""
        try:
            proof.prove(fs, spec)
        except KeytailError as problem:
            error = problem.what
        finished = [output for group in spec.groups for output in group.segments]
        begun = seen[0]

        def outputs() -> list[OutputSegment | UnfinishedOutput]:
            if begun == len(finished):
                return list(finished)
            last = finished[begun - 1]
            paths = {suffix: str(_path(spec, last, suffix)) for suffix in (names.LOG, names.INDEX, names.TIME_INDEX)}
            unfinished = UnfinishedOutput(last.base_offset, paths, os.path.getsize(paths[names.LOG]), b"", b"")
            return [*finished[: begun - 1], unfinished]

        walk = ProofAsWritten(fs, replace(spec, groups=()), outputs)
        sources = [source for source in spec.segments if source.base_offset < spec.end_offset]
        if first_bytes:
            walk.take(sources[:1], first_bytes)
        begun = seen[1]
        walk.take(sources, sources[-1].log_bytes)
        answer.append((walk.passes(spec.groups), error))
        walk.close()
        assert not [file for file in open_files() if file.startswith(spec.partition_path)]
        return None

    monkeypatch.setattr(rounds, "prove", prove)
    case.prove(path)
    return answer[0]


def data(offset: int, *keys: bytes) -> bytes:
    return encode_batch([rec(offset + i, key) for i, key in enumerate(keys)])


def test_an_output_that_begins_inside_an_earlier_batch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier batch was proven before that output began."""
    first, second = data(0, b"a", b"b", b"c"), data(3, b"d")
    segments = [Segment(0, first + second, 0, 0, rounds.NOW), Segment(10, data(10, b"z"), 0, 0, rounds.NOW)]
    for base, passes in ((3, True), (1, False), (2, False)):
        case = rounds.Case(segments, first_dirty=0)
        case.groups = [((0,), [rounds.Output(0, [first], []), rounds.Output(base, [second], [])])]
        found = prove_written(monkeypatch, tmp_path / str(base), case, len(first), [1, 2])
        assert found == (passes, "" if passes else "a batch's offsets are outside its segment")


def test_a_source_with_a_batch_above_the_next_segment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, late, second = data(0, b"a"), data(7, b"k"), data(8, b"k")
    ends = Segment(10, data(10, b"z"), 0, 0, rounds.NOW)
    for is_late in (False, True):
        logs = [first + late * is_late, second]
        segments = [Segment(base, log, 0, 0, rounds.NOW) for base, log in zip((0, 5), logs, strict=True)]
        case = rounds.Case([*segments, ends], first_dirty=0, segment_bytes=1)
        case.groups = [((0,), [rounds.Output(0, [first], [])]), ((5,), [rounds.Output(5, [second], [])])]
        passes, error = prove_written(monkeypatch, tmp_path / str(is_late), case, 0, [2, 2])
        assert passes is not is_late and bool(error) is is_late


def test_a_source_that_was_not_given_to_its_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = data(0, b"a"), data(1, b"b")
    segments = [Segment(0, first + second, 0, 0, rounds.NOW), Segment(10, data(10, b"z"), 0, 0, rounds.NOW)]
    case = rounds.Case(segments, first_dirty=0)
    case.groups = [((0,), [rounds.Output(0, [first], [])])]
    take = ProofAsWritten.take
    monkeypatch.setattr(ProofAsWritten, "take", lambda self, sources, _: take(self, sources, len(first)))
    passes, _ = prove_written(monkeypatch, tmp_path / "t-0", case, len(first), [1, 1])
    assert not passes


def a_task(rng: random.Random, path: Path, is_right: Callable[[CleaningTask], bool]) -> CleaningTask:
    """Return a random task for which `is_right` is true, and that is proven as it is written."""
    for _ in range(10_000):
        shutil.rmtree(path, ignore_errors=True)
        task = replace(random_task(rng, str(path), "measured"), map_max_entries=None)
        if is_right(task) and task.first_dirty_offset in [segment.base_offset for segment in task.segments]:
            return task
    raise AssertionError("no random task is right")


def test_a_violation_is_reported_by_the_proof_of_the_finished_outputs(
    uncached: None, proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, append = chance(), OutputWriter.append

    def lose_one(self: OutputWriter, data: object, table: object) -> None:
        if not lost:
            lost.append(table[0]["base_offset"])
            data, table = data[int(table[0]["size_bytes"]) :], table[1:]
        if len(table):
            append(self, data, table)

    monkeypatch.setattr(OutputWriter, "append", lose_one)
    for _ in cases(5, lambda: proofs):
        lost: list[int] = []
        task = a_task(rng, tmp_path / "t-0", lambda task: True)
        proofs.clear()
        with contextlib.suppress(KeytailError):
            clean_partition(LOCAL, task)
            continue  # the lost batch was an empty one, or nothing was written
        assert proofs == ["as written", "finished"]
        assert not list((tmp_path / "t-0").glob("*.clean"))


def test_the_clean_section_is_proven_after_the_map_is_freed(
    uncached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map and the table of the proof are not in memory at the same time."""
    events: list[tuple[str, int]] = []
    rewrite, take = Rewriter.rewrite, ProofAsWritten.take
    survivors = {}

    def rewriting(self: Rewriter, path: str, segment, number: int, writer) -> None:
        survivors["last"] = self._survivors
        events.append(("rewrite", segment.base_offset))
        rewrite(self, path, segment, number, writer)

    def taking(self: ProofAsWritten, sources, end_bytes: int) -> None:
        assert survivors["last"].offset_map.used == 0, "the map is still in memory"
        events.extend(
            ("prove", source.base_offset) for source in sources if events[-1] != ("prove", source.base_offset)
        )
        take(self, sources, end_bytes)

    monkeypatch.setattr(Rewriter, "rewrite", rewriting)
    monkeypatch.setattr(ProofAsWritten, "take", taking)
    task = a_task(
        chance(),
        tmp_path / "t-0",
        lambda task: (
            task.segments[1].base_offset < task.first_dirty_offset < task.segments[-2].base_offset
            and all(segment.log_bytes for segment in task.segments[:-1])
        ),
    )
    result = clean_partition(LOCAL, task)
    bases = [segment.base_offset for segment in task.segments if segment.base_offset < result.end_offset]
    clean = [base for base in bases if base <= task.first_dirty_offset]
    expected = [("rewrite", base) for base in clean] + [("prove", base) for base in clean]
    expected += [(what, base) for base in bases[len(clean) :] for what in ("rewrite", "prove")]
    assert events == expected


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_log_is_proven_as_written_if_it_is_not_in_the_page_cache(
    is_cached: bool, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "_EARLY_PROOF_BYTES", 1)
    find = cleaner.findings_of

    def and_drop(*given):
        found = find(*given)
        for segment in task.segments:
            with open(task.path(segment.base_offset, names.LOG), "rb") as file:
                os.fsync(file.fileno())
                file.read() if is_cached else os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return found

    monkeypatch.setattr(cleaner, "findings_of", and_drop)
    path = Path("/var/tmp") / f"keytail-as-written-{os.getpid()}"  # /tmp may be in memory: nothing can be dropped there
    try:
        task = a_task(chance(), path / "t-0", lambda task: task.segments[0].log_bytes > 0)
        clean_partition(LOCAL, task)
        assert proofs == (["finished"] if is_cached else ["as written"])
    finally:
        shutil.rmtree(path, ignore_errors=True)
