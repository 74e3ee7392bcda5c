"""Stops before every file operation of an import, and makes each one fail. A broker finds the complete import or none
of it, the state of producers is not lost, and after the next run the partition has the imported records once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from keytail.errors import in_words
from keytail.import_ import install as import_install
from keytail.import_.on_spark import Import
from keytail.import_.plan import Rules, plan_import, refusals
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.tasks import run_attempt
from tests.chance import SEED
from tests.crash.driver import Counts, Failed, State, few_in_check, for_every_fault, for_every_stop
from tests.crash.explorer import digest_of_rest
from tests.crash.partitions import PARTITION
from tests.import_.case import CASES, INTERVAL_BYTES, TWO_REPLICAS, Case
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka
from tests.reference.batches import Rec, all_records, decode_log
from tests.reference.indexing import index_files
from tests.reference.loader import Loaded, load_alike

SHARE = 0.03  # unless KEYTAIL_FAULTS=all
SCRATCH = (".clean", ".tmp", ".cleaned")
RULES = Rules(False, False, 700, 8192, INTERVAL_BYTES, 1 << 20, False)


def logs_of(case: Case, root: Path, number: int = 0) -> dict[int, bytes]:
    """Return the logs of one replica that a broker finds at its start."""
    return _logs(load_alike(case.dirs(root)[number] / PARTITION))


def _logs(loaded: Loaded) -> dict[int, bytes]:
    return {base: segment.log for base, segment in loaded.segments.items() if segment.log}


def names_of(case: Case, root: Path) -> set[str]:
    return {path.name for path in (case.dirs(root)[0] / PARTITION).iterdir()}


def records_in(logs: dict[int, bytes]) -> list[Rec]:
    return [rec for _, log in sorted(logs.items()) for rec in all_records(decode_log(log))]


def judge(case: Case, root: Path, before: dict[int, bytes], after: dict[int, bytes], number: int = 0) -> bool:
    """Return whether a broker finds the import. Raises AssertionError if it finds only a part."""
    path = case.dirs(root)[number] / PARTITION
    loaded = load_alike(path)
    logs = _logs(loaded)
    assert logs in (before, after), f"the logs of segments {sorted(logs)} are neither the old nor the new ones"
    is_there = logs == after
    for base, segment in loaded.segments.items():
        index, time_index = index_files(segment.log, base, INTERVAL_BYTES)
        assert segment.index in (None, index), f"the index of {base} does not match its log"
        assert segment.time_index in (None, time_index), f"the time index of {base} does not match its log"
    end = case.end + case.count if is_there else case.end
    usable = [offset for offset in loaded.snapshots if 0 < offset <= end]
    if case.snapshots:
        assert usable, "a broker would lose the state of all producers"
        newest = max(usable)
        files = {name: file.read_bytes() for name in (f"{newest:020d}.snapshot.swap", f"{newest:020d}.snapshot")
                 if (file := path / name).exists()}  # fmt: skip
        state = case.snapshots.get(newest) if newest <= case.end else case.snapshots[case.end]
        assert set(files.values()) == {state}, f"the snapshots at {newest} differ"
    lines = (path / "leader-epoch-checkpoint").read_text().splitlines()[2:]
    epochs = [tuple(map(int, line.split())) for line in lines]
    if is_there:
        written = {batch.leader_epoch for _, log in after.items() for batch in decode_log(log)
                   if batch.base_offset >= case.end}  # fmt: skip
        assert written == {epochs[-1][0]}, "the imported batches do not have the latest epoch"
        assert epochs[-1][1] <= case.end
    return is_there


def drive(case: Case, fs: FileSystem, root: Path, run_id: str = "r1") -> Failed:
    """Run the steps of the driver, with the task in this process."""
    replicas = case.replicas(fs, root)
    if reasons := [reason for replica in replicas for reason in refusals(replica.facts, RULES)]:
        return Failed(tuple(reasons))
    plan = plan_import(replicas, "one", append=True, topic_id=None)
    answer = None if plan.record else run_attempt(lambda _, __: case.write(fs, plan, run_id), None, "")
    assert answer is None or not answer.trace, answer
    job = Import(None, [plan], {}, "one", run_id, fs=fs)
    with patch.object(job, "_write", lambda: {0: answer} if answer else {}):
        [outcome] = job.run()
    return Failed(() if outcome.problem is None else (in_words(outcome.problem),))


def expected_logs(case: Case, tmp_path: Path) -> tuple[dict[int, bytes], dict[int, bytes]]:
    case.make(tmp_path / "whole")
    before = logs_of(case, tmp_path / "whole")
    case.run(LOCAL, tmp_path / "whole")
    after = logs_of(case, tmp_path / "whole")
    assert records_in(after) == [*records_in(before), *case.records]
    return before, after


def check_of_one(
    case: Case, before: dict[int, bytes], after: dict[int, bytes], names: set[str]
) -> Callable[[State], None]:
    """Return the check for one replica. `names` are the files of an undisturbed import."""

    def check(state: State) -> None:
        is_there = judge(case, state.root, before, after)
        assert is_there or not state.action_ended
        plan = case.run(LOCAL, state.root, "r2")
        assert judge(case, state.root, before, after)
        assert plan.record is not None or not is_there, "a complete import was repeated"
        assert names_of(case, state.root) - {"keytail-import.tmp", "leader-epoch-checkpoint.tmp"} == names
        end = case.end + case.count
        for checkpoint in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
            assert (case.dirs(state.root)[0] / checkpoint).read_text() == f"0\n2\norders 0 {end}\nother 3 17\n"
        assert case.run(LOCAL, state.root, "r3").is_done

    return check


def check_of_two(case: Case, before: dict[int, bytes], after: dict[int, bytes]) -> Callable[[State], None]:
    """Return the check that the second replica has no records that the first one lacks."""

    def check(state: State) -> None:
        first, second = (judge(case, state.root, before, after, number) for number in (0, 1))
        assert first or not second
        assert (first and second) or not state.action_ended
        for log_dir in case.dirs(state.root):
            moved = f"orders 0 {case.end + case.count}" in (log_dir / "replication-offset-checkpoint").read_text()
            assert not moved or second, "the high watermark is above the log end of a replica"
        case.run(LOCAL, state.root, "r2")
        assert judge(case, state.root, before, after, 0)
        assert judge(case, state.root, before, after, 1)
        assert segment_files(case, state.root, 0) == segment_files(case, state.root, 1)

    return check


@pytest.mark.parametrize("name", few_in_check(CASES, "one segment"))
def test_a_broker_finds_a_complete_import_or_none_after_every_stop(
    name: str,
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
) -> None:
    case, counts = CASES[name], Counts("import")
    before, after = expected_logs(case, tmp_path)
    check = check_of_one(case, before, after, names_of(case, tmp_path / "whole"))
    for_every_stop(case.make, case.run, check, work_dir=fast_dir / "work", counts=counts, partial_cuts=1)
    print(counts)
    assert counts.distinct_states > 50


@pytest.mark.long
def test_replicas_differ_at_most_by_the_whole_import(
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
) -> None:
    case, counts = TWO_REPLICAS, Counts("import into two replicas")
    before, after = expected_logs(case, tmp_path)

    check = check_of_two(case, before, after)
    for_every_stop(case.make, case.run, check, work_dir=fast_dir / "work", counts=counts, partial_cuts=1)
    print(counts)
    assert counts.distinct_states > 100


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_broker_finds_a_complete_import_or_none_after_every_fault(
    name: str,
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
) -> None:
    case, counts = CASES[name], Counts("import, faults")
    before, after = expected_logs(case, tmp_path)
    check = check_of_one(case, before, after, names_of(case, tmp_path / "whole"))
    faults(case, case.make, check, fast_dir, counts, SHARE)
    print(SEED, counts)
    assert counts.faults > 0


@pytest.mark.long
@pytest.mark.parametrize("one_has_it", [False, True])
def test_replicas_differ_at_most_by_the_whole_import_after_every_fault(
    one_has_it: bool,
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
) -> None:
    """Faults occur in a whole import, and in a run after an import into the first replica only."""
    case, counts = TWO_REPLICAS, Counts("import into two replicas, faults")
    before, after = expected_logs(case, tmp_path)

    def make(root: Path) -> None:
        case.make(root)
        if one_has_it:
            with patch.object(import_install, "finish"):
                case.run(LOCAL, root)
            assert [judge(case, root, before, after, number) for number in (0, 1)] == [True, False]

    faults(case, make, check_of_two(case, before, after), fast_dir, counts, SHARE / 2)
    print(SEED, counts)
    assert counts.faults > 0


def faults(
    case: Case,
    make: Callable[[Path], object],
    check: Callable[[State], None],
    work_dir: Path,
    counts: Counts,
    share: float,
) -> None:
    for_every_fault(
        make,
        lambda fs, root: drive(case, fs, root),
        check,
        work_dir=work_dir / "work",
        counts=counts,
        again=lambda fs, root: drive(case, fs, root, "r2"),
        share=share,
        partial_cuts=1,
        scratch=SCRATCH,
        seed=SEED,
    )


@pytest.mark.interop
@pytest.mark.parametrize("name", ["after records, in a new segment",
                                  "after an empty active segment with the only snapshot"])  # fmt: skip
def test_kafka_finds_a_complete_import_or_none_after_every_stop(
    name: str,
    tmp_path: Path,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
) -> None:
    """Kafka's own loader checks each state, as a broker that starts. The next run then begins on its files."""
    case, counts = CASES[name], Counts("import, opened by Kafka")
    before, after = expected_logs(case, tmp_path)
    known = producers_of(tmp_path / "whole", case, kafka)
    assert known

    def check(state: State) -> None:
        path = case.dirs(state.root)[0] / PARTITION
        model = judge(case, state.root, before, after)
        loaded = kafka.load(path, configs=CONFIGS, fetch=True, transactions=True, clock_ms=1_100_000)
        found = {base: (path / f"{base:020d}.log").read_bytes() for base in loaded.segment_bases}
        assert {base: log for base, log in found.items() if log} == (after if model else before)
        assert loaded.producers == known
        assert loaded.fetch_mismatches == ()
        assert loaded.log_end_offset == case.end + (case.count if model else 0)
        plan = case.run(LOCAL, state.root, "r2")
        assert (plan.record is not None) == model
        assert logs_of(case, state.root) == after

    for_every_stop(case.make, case.run, check, work_dir=fast_dir / "work", counts=counts, partial_cuts=0)
    print(counts)
    assert counts.distinct_states > 40


CONFIGS = {"segment.index.bytes": "8192", "index.interval.bytes": str(INTERVAL_BYTES)}


def producers_of(root: Path, case: Case, kafka: Kafka) -> tuple[tuple[int, ...], ...]:  # noqa: F811
    copy = root.with_name("for-kafka") / PARTITION
    shutil.copytree(case.dirs(root)[0] / PARTITION, copy)
    loaded = kafka.load(copy, configs=CONFIGS, transactions=True, clock_ms=1_100_000)
    assert loaded.repaired == []
    return loaded.producers


def segment_files(case: Case, root: Path, number: int) -> dict[str, bytes]:
    path = case.dirs(root)[number] / PARTITION
    return {file.name: file.read_bytes() for kind in ("log", "index", "timeindex") for file in path.glob(f"*.{kind}")}


@pytest.mark.long
def test_a_broker_finds_a_complete_import_or_none_after_every_stop_of_the_second_run(
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
) -> None:
    case = replace(CASES["after the only segment, with the only snapshot at its end"], count=7, segment_bytes=250)
    before, after = expected_logs(case, tmp_path)
    assert len(after) == 3
    first, second = Counts("import"), Counts("import, again")
    started: set[str] = set()

    def again(begin: State) -> None:
        digest = digest_of_rest(begin.tree)
        if digest in started:  # the next run removes scratch files without reading them
            return
        started.add(digest)

        def check(state: State) -> None:
            judge(case, state.root, before, after)
            case.run(LOCAL, state.root, "r3")
            assert judge(case, state.root, before, after)

        for_every_stop(
            begin.tree,
            lambda fs, path: case.run(fs, path, "r2"),
            check,
            work_dir=fast_dir / "again", counts=second, partial_cuts=0, torn_writes=False,
        )  # fmt: skip

    for_every_stop(
        case.make, case.run, again,
        work_dir=fast_dir / "work", counts=first, partial_cuts=0, torn_writes=False,
    )  # fmt: skip
    print(first, second)
    assert second.distinct_states > first.distinct_states
