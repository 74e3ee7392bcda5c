"""Stops before every file operation of whole compactions, of the recovery, and of the next run.

Each stop has several states: the directory as it is, after a power cut, and after partial power cuts. In each, promises
1 and 2 hold for a broker, no checkpoint is above the cleaned segments, and keytail's next run has the result of the
reference model (promise 5). KEYTAIL_SOAK=1 tries more of everything, and KEYTAIL_SEED repeats the random log dirs.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.crash.compactions import (
    Expected,
    Found,
    Log,
    LogDir,
    end_of,
    expect,
    find,
    judge,
    random_log,
)  # fmt: skip
from tests.crash.driver import SOAK, digest_of, few_in_check
from tests.crash.explorer import Explorer, Visit
from tests.crash.trees import digest_of_tree, read_tree, remove_tree, write_tree
from tests.interop.conftest import fast_dir  # noqa: F401

SHAPES = {
    "merges": LogDir(
        (Log("orders-0", [["a:1 b:1", "c:1"], ["a:2 g:1"], ["b:2 +2 e:1"], ["a:3 d:-"], ["a:4"]]),), join=2
    ),
    "the first dirty offset inside a segment": LogDir(
        (Log("orders-0", [["a:1", "b:1"], ["c:1", "d:1", "a:2"], ["d:2 e:1"], []], checkpoint=3),)
    ),
    "tombstones in later groups than what they delete": LogDir(
        (Log("orders-0", [["a:1 b:1", "x:1"], ["a:2 x:2"], ["! a:- x:-"], ["y:1"], ["y:2"]]),)
    ),
    "an output that ends below its last sources, which hold a value and its tombstone": LogDir(
        (Log("orders-0", [["a:1"], ["x:1"], ["! x:-"], ["y:11111 z:1", "a:1111", "y:1"], []]),), join=3
    ),
    "empty outputs": LogDir((Log("orders-0", [["a:1"], ["b:1"], ["a:2 b:2"], ["a:3 b:3"], []]),), join=2),
    "several groups, and producers that must stay known": LogDir(
        (Log("orders-0", [["@1 a:1 b:1", "@2 a:1"], ["@1 a:2"], ["@3 b:2", "a:3"], ["c:1"]]),)
    ),
    "transactions across groups: committed, aborted, and one open": LogDir(
        (
            Log(
                "orders-0",
                [
                    ["T1 a:1 b:1", "t2 a:2 c:1", "! C9"],
                    ["t2 d:1", "A1", "x:1"],
                    ["C2", "T1 b:2 e:1", "a:3"],
                    ["C1", "t4 x:9", "A4", "b:3 c:2 x:2"],
                    ["T3 a:9 z:1", "y:1"],
                    ["T3 y:2"],
                ],
            ),
        ),
        join=2,
    ),
    "partitions that share a checkpoint file": LogDir(
        (
            Log("orders-0", [["a:1 b:1"], ["a:2"], ["b:1"]], checkpoint=2),
            Log("orders-1", [["a:1"], ["! a:-"], []]),
            Log("other-0", [["a:1"], ["a:2"], []], checkpoint=1, compacted=False),
        )
    ),
}  # fmt: skip
# Merges have all steps of a replacement. Only some partial power cuts reveal a wrong order of renames.
MAX_CUTS = "merges"
IN_CHECK = "several groups, and producers that must stay known"
RANDOM = 20 if SOAK else 1
NAMES = [*SHAPES, *(f"random {number}" for number in range(RANDOM))]
# These log dirs have several groups with different contents; each run of the tests draws one.
ALIKE = [
    "tombstones in later groups than what they delete", "empty outputs", "the first dirty offset inside a segment",
    "transactions across groups: committed, aborted, and one open", "random 0",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(NAMES, IN_CHECK, drawn=ALIKE))
def test_every_stop_of_a_compaction_and_of_the_next_run_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir = shape(name)
    undisturbed, settled = digest_after_a_run(log_dir, fast_dir / "undisturbed"), NextRuns()

    def visit(state: Visit) -> None:
        judge(log_dir, state.found, state.run, ended=state.ended)
        check_next_run(log_dir, state, undisturbed, settled)

    explorer = Explorer(log_dir, fast_dir, visit, SEED, soak=SOAK, partial_cuts=8 if SOAK or name == MAX_CUTS else 1)
    explorer.explore()
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {explorer}; losses 0")
    if name in SHAPES:  # a random log may have nothing to remove
        assert explorer.first.distinct_states > 50
        assert explorer.recoveries.distinct_states > 10


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(NAMES, IN_CHECK, drawn=ALIKE))
def test_every_fault_of_a_compaction_and_of_its_recovery_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir = shape(name)
    undisturbed, settled = digest_after_a_run(log_dir, fast_dir / "undisturbed"), NextRuns()

    def visit(state: Visit) -> None:
        judge(log_dir, state.found, state.run, ended=state.ended)
        check_next_run(log_dir, state, undisturbed, settled)

    explorer = Explorer(log_dir, fast_dir, visit, SEED, soak=SOAK)
    explorer.explore_faults()
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {explorer.first}; in recoveries {explorer.recoveries}; losses 0")


def shape(name: str) -> LogDir:
    if name in SHAPES:
        return SHAPES[name]
    rng = random.Random(f"{SEED} {name}")
    logs = tuple(random_log(rng, f"orders-{n}") for n in range(2 if SOAK and rng.random() < 0.3 else 1))
    log_dir = LogDir(logs, join=rng.choice([1, 2, 3]))
    print("seed", SEED, log_dir)
    return log_dir


def digest_after_a_run(log_dir: LogDir, root: Path) -> str:
    log_dir.make(root)
    start = find(log_dir, root)
    judge(log_dir, start, Expected(start, start.files(), start.checkpoints), ended=False)
    log_dir.run(LOCAL, root)
    run = expect(log_dir, start)
    assert run.checkpoints != start.checkpoints, "the run compacted nothing"
    judge(log_dir, find(log_dir, root), run, ended=True)
    digest = digest_of(root)
    shutil.rmtree(root)
    return digest


def check_next_run(log_dir: LogDir, state: Visit, undisturbed: str, settled: NextRuns) -> None:
    """Check promise 5: the next run has the files of an undisturbed run, and one more run changes nothing."""
    run = expect(log_dir, state.found)
    found, digest = settled.run(log_dir, state)
    judge(log_dir, found, run, ended=True)
    assert found.files() == run.files
    assert found.checkpoints == run.checkpoints
    if state.found == state.origin:
        assert digest == undisturbed, "the bytes differ from those of an undisturbed run"


@dataclass
class NextRuns:
    """Caches the results of next runs: a run begins with a recovery, and recoveries end in few states.

    There is one run for each recovered state and each set of kinds of files before the recovery. Other states with the
    same kinds of files are equal to the byte after the recovery, so that their result is the same. With KEYTAIL_SOAK=1,
    there is a run for each of them.
    """

    ends: dict[tuple[object, ...], tuple[Found, str]] = field(default_factory=dict)
    # digests of the results (with the times of logs) that one more run did not change
    again: set[str] = field(default_factory=set)

    def run(self, log_dir: LogDir, state: Visit) -> tuple[Found, str]:
        """Return what a broker finds after the next run, and the digest of all files."""
        left = state.state.tree
        kinds = frozenset(Path(name).suffix for name in left)
        log_dir.recover(LOCAL, state.root)
        key = (digest_of_tree(read_tree(state.root), times_of=".log"), kinds)
        if SOAK or key not in self.ends:
            remove_tree(state.root)
            write_tree(left, state.root)
            self.ends[key] = self._run(log_dir, state.root)
        return self.ends[key]

    def _run(self, log_dir: LogDir, root: Path) -> tuple[Found, str]:
        log_dir.run(LOCAL, root, "r2")
        found, tree = find(log_dir, root), read_tree(root)
        digest = digest_of_tree(tree)
        for log in log_dir.logs:
            check_names(log, found, root / log.name)
        if (ended := digest_of_tree(tree, times_of=".log")) not in self.again:
            log_dir.run(LOCAL, root, "r3")
            assert digest_of(root) == digest, "one more run changed something"
            self.again.add(ended)
        return found, digest


def check_names(log: Log, found: Found, path: Path) -> None:
    """Check that no other files remain, and that there is a snapshot for the log end offset and for each segment except
    the first.
    """
    bases = found.logs[log.name].segments
    assert log.end == end_of({base: segment.log for base, segment in bases.items()})
    expected = {"leader-epoch-checkpoint", f"{log.end:020d}.snapshot"}
    expected |= {f"{base:020d}{suffix}" for base in bases for suffix in (".log", ".index", ".timeindex")}
    expected |= {f"{base:020d}.txnindex" for base, segment in bases.items() if segment.txn_index}
    expected |= {f"{base:020d}.snapshot" for base in bases if base}
    present = {file.name for file in path.iterdir()}
    assert expected <= present, expected - present
    assert present == expected, f"leftovers: {present - expected}"
