"""Stops before every file operation of a rebuild: each file is unchanged or correct, no broker accepts an incomplete
file, and the next run has the result of an undisturbed run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.log.replacement.recover import recover
from keytail.rebuild_index.partition import RebuildSettings, plan_partition
from keytail.rebuild_index.tasks import Rebuild
from tests.chance import SEED
from tests.crash.compactions import INTERVAL_BYTES, Log, LogDir
from tests.crash.driver import Counts, Failed, State, digest_of, for_every_fault, for_every_stop
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka

NAME = "orders-0"
SHARE = 0.1
LOG_DIR = LogDir(
    (
        Log(
            NAME,
            [
                ["T1 a:1 b:1", "t2 a:2 c:1", "! C9"],
                ["t2 d:1", "A1", "x:1"],
                ["T1 b:2 e:1", "a:3", "A2", "x:1", "y:1"],
                ["C1", "t4 x:9", "A4", "b:3 c:2 x:2"],
                ["y:1", "y:2"],
            ],
        ),
    )
)
BASES = sorted(LOG_DIR.logs[0].segments)
CONFIGS = {"cleanup.policy": "compact", "segment.index.bytes": "8192", "index.interval.bytes": str(INTERVAL_BYTES)}


def run(fs: FileSystem, root: Path, run_id: str = "r1") -> Failed:
    """Run `rebuild-index` with `--execute`, without locks and Spark."""
    [listing] = survey_log_dirs(fs, [str(root)])
    [entry] = listing.partitions
    recover(fs, entry.path)
    facts = survey_partition(fs, listing, entry)
    if facts.problems:
        return Failed(facts.problems)
    assert facts.leftovers == ()
    settings = RebuildSettings(INTERVAL_BYTES, segment_index_bytes=8192, execute=True, run_id=run_id)
    plan = plan_partition(fs, facts, settings)
    [outcome] = Rebuild([plan], hosted={listing.path: hosted([listing])}, fs=fs).run()
    reported = (*outcome.rest.refused, *([str(outcome.problem)] if outcome.problem else []))
    assert not reported or fs is not LOCAL, reported
    return Failed(reported)


def damage_files(root: Path, *, only_what_a_broker_repairs: bool) -> None:
    """Remove or damage a different file of each segment."""
    path = root / NAME

    def file(number: int, suffix: str) -> Path:
        return path / f"{BASES[number]:020d}{suffix}"

    for suffix in (".index", ".timeindex", ".txnindex"):
        file(1, suffix).unlink()
    file(2, ".index").unlink()
    file(2, ".timeindex").unlink()
    if only_what_a_broker_repairs:
        for snapshot in path.glob("*.snapshot"):  # the initial snapshots of the log dir have no producers
            if int(snapshot.stem) in BASES:
                snapshot.unlink()
        return
    file(0, ".timeindex").write_bytes(b"")
    file(0, ".txnindex").write_bytes(bytes(34))
    file(3, ".index").write_bytes(file(3, ".index").read_bytes()[:8] + b"\0" * 8)
    file(3, ".txnindex").write_bytes(b"\0" * 33)
    file(3, ".snapshot").unlink()
    (path / f"{LOG_DIR.logs[0].end:020d}.snapshot").write_bytes(b"\0" * 10)
    (path / "leader-epoch-checkpoint").unlink()


def files_of(root: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (root / NAME).iterdir()}
    return {name: data for name, data in found.items() if not name.endswith((".clean", ".tmp"))}


@pytest.mark.long
def test_every_stop_of_a_rebuild_leaves_valid_files(fast_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    LOG_DIR.make(fast_dir / "right")
    right = files_of(fast_dir / "right")
    damaged = fast_dir / "spoiled"
    shutil.copytree(fast_dir / "right", damaged)
    damage_files(damaged, only_what_a_broker_repairs=False)
    before = files_of(damaged)
    undisturbed = fast_dir / "undisturbed"
    shutil.copytree(damaged, undisturbed)
    run(LOCAL, undisturbed)
    after = files_of(undisturbed)
    assert {n: d for n, d in after.items() if not n.endswith(".snapshot")} == {
        n: d for n, d in right.items() if not n.endswith(".snapshot")
    }
    assert after.keys() == right.keys()
    digest = digest_of(undisturbed)
    counts = Counts("index rebuild")

    def check(state: State) -> None:
        found = files_of(state.root)
        for name in before.keys() | after.keys() | found.keys():
            assert found.get(name) in (before.get(name), after.get(name)), name
        for base in BASES:
            stem = f"{base:020d}"
            if f"{stem}.index" in found and f"{stem}.index" not in before:
                for suffix in (".timeindex", ".txnindex"):  # a broker with an `.index` does not rebuild these
                    assert found.get(stem + suffix) == after.get(stem + suffix), stem + suffix
        assert found == after or not state.action_ended
        run(LOCAL, state.root, "r2")
        assert digest_of(state.root) == digest

    def make(path: Path) -> None:
        shutil.copytree(damaged, path)

    for_every_stop(make, run, check, work_dir=fast_dir / "stops", counts=counts)
    for_every_fault(
        make, run, check, again=lambda fs, root: run(fs, root, "r3"),
        work_dir=fast_dir / "faults", counts=counts, share=SHARE, scratch=(".clean", ".tmp"), seed=SEED,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\nrebuild (seed {SEED}): {counts}")
    assert counts.distinct_states > 50


@pytest.mark.interop
def test_kafka_starts_after_every_stop_of_a_rebuild(kafka: Kafka, fast_dir: Path) -> None:  # noqa: F811
    """If a broker can rebuild the missing files itself, it finds the same logs after every stop as without keytail."""
    damaged = fast_dir / "spoiled"
    LOG_DIR.make(damaged)
    damage_files(damaged, only_what_a_broker_repairs=True)

    def opened(root: Path) -> tuple[object, ...]:
        copy = fast_dir / "kafka" / NAME
        shutil.copytree(root / NAME, copy)
        loaded = kafka.load(copy, configs=CONFIGS, fetch=True, transactions=True)
        index_files = {p.name: p.read_bytes() for p in copy.iterdir() if "index" in p.suffix and p.stat().st_size}
        shutil.rmtree(copy.parent)
        assert loaded.fetch_mismatches == ()
        return loaded.records, loaded.aborted, loaded.committed, index_files

    expected = opened(damaged)

    def check(state: State) -> None:
        assert opened(state.root) == expected
        if state.action_ended:
            assert not kafka.load(state.root / NAME, configs=CONFIGS).repaired

    for_every_stop(
        lambda path: shutil.copytree(damaged, path), run, check,
        work_dir=fast_dir / "stops", counts=Counts(), partial_cuts=1,
    )  # fmt: skip
