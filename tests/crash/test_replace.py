"""Stops before every file operation of a replacement, and of its recovery: the model of Kafka's loader finds all
sources or all outputs, and the recovery ends with one of the two.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast

import pytest

from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement import replace
from keytail.log.replacement.recover import recover
from tests.chance import SEED
from tests.crash.driver import EVERY_FAULT, Counts, State, digest_of, few_in_check, for_every_fault, for_every_stop
from tests.crash.partitions import PARTITION, Group, Partition, txn_index
from tests.crash.trees import Tree, digest_of_tree
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.loader import load

SHARE = 0.1
CASES = {
    "three into one": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)},
        (Group((0, 10, 20), (1, 4, 8, 12, 15, 23, 29)),),
    ),
    "one by itself, with a transaction index that is retained": Partition(
        {0: range(10), 10: range(10, 20), 20: ()},
        (Group((10,), (12, 19), txn_index(19)),),
        {10: txn_index(12, 19)},
    ),
    "a transaction index that is removed": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 22)},
        (Group((0, 10), (5, 19)),),
        {0: txn_index(9), 10: txn_index(19)},
    ),
    "the output ends below its last sources": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 33)},
        (Group((0, 10, 20), (3, 5)),),
    ),
    "an empty output": Partition({0: range(10), 10: range(10, 20), 20: range(20, 30), 30: ()}, (Group((0, 10), ()),)),
    "two groups, one after the other": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 40), 40: range(40, 42)},
        (Group((0, 10), (1, 12, 19)), Group((20, 30), (22, 39), txn_index(39))),
        {30: txn_index(39)},
    ),
    "a source split in three": Partition(
        {0: range(10), 10: range(10, 30), 30: range(30, 34)},
        (Group((10,), (11, 12, 15, 16, 21, 22, 29), txn_index(29), continued=(15, 21)),),
        {10: txn_index(12, 29)},
    ),
    "three outputs, of which the last continues inside of a source and takes others": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)},
        (Group((0, 10, 20), (1, 4, 7, 8, 9, 15, 19, 23, 29), continued=(7, 9)),),
        {0: txn_index(9), 10: txn_index(19)},
    ),
    "two outputs that end below their last sources": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 40), 40: range(40, 41)},
        (Group((0, 10, 20, 30), (3, 5, 8), continued=(8,)),),
    ),
    "an empty output, then one that is not": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 22)},
        (Group((0, 10), (7, 8, 15), continued=(7,)),),
        {0: txn_index(9)},
    ),
    "an empty output after one that is not": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 22)}, (Group((0, 10), (1, 2), continued=(5,)),)
    ),
    "outputs that begin inside of sources and where they do": Partition(
        {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 33)},
        (Group((0, 10, 20), (1, 5, 6, 20, 21, 25, 29), txn_index(29), continued=(5, 20, 25)),),
        {20: txn_index(29)},
    ),
}

SEVERAL_OUTPUTS = [name for name, partition in CASES.items() if partition.groups[0].continued]
IN_CHECK = ("three into one", "one by itself, with a transaction index that is retained", "an empty output")


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(CASES, *IN_CHECK, drawn=SEVERAL_OUTPUTS))
def test_every_stop_of_a_replacement_and_of_its_recovery_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    partition = CASES[name]
    counts, in_recovery = Counts("replacement of segments"), Counts("recovery")
    settled: NextRuns = {}

    def commit(fs: FileSystem, root: Path) -> None:
        for group in partition.outputs():
            replace.commit_group(fs, str(root / PARTITION), group)

    def recover_dir(fs: FileSystem, root: Path) -> None:
        recover(fs, str(root / PARTITION))

    def check_within_recovery(state: State) -> None:
        partition.check_start(state.root)
        recover_completely(partition, state.root, settled)

    def check(state: State) -> None:
        replaced = partition.check_start(state.root)
        assert all(replaced) or not state.action_ended
        for_every_stop(
            state.tree, recover_dir, check_within_recovery,
            work_dir=fast_dir / "recovery", counts=in_recovery, partial_cuts=int(EVERY_FAULT), seed=1,
        )  # fmt: skip
        assert recover_completely(partition, state.root, settled) == replaced

    for_every_stop(partition.make, commit, check, work_dir=fast_dir / "commit", counts=counts, seed=2)
    with capsys.disabled():
        print(f"\n{name}: {counts}; in the recovery of these {in_recovery}")
    assert counts.distinct_states > 15
    assert in_recovery.distinct_states > 15


class _FewLinks:
    """A file system that refuses hard links after the first `links`."""

    def __init__(self, fs: FileSystem, links: int) -> None:
        self._fs, self._links = fs, links

    def __getattr__(self, name: str) -> object:
        return getattr(self._fs, name)

    def link(self, source: str, target: str) -> None:
        if self._links == 0:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), source)
        self._links -= 1
        self._fs.link(source, target)


@pytest.mark.parametrize("links", [1, 2])
def test_no_stop_loses_a_record_if_the_file_system_refuses_hard_links(links: int, fast_dir: Path) -> None:  # noqa: F811
    """Links created before the refusal are removed, and the directory is synced, before a rename: beside a `.log` with
    its final name, a broker would use them as rebuilt indexes, and remove the other index files.
    """
    partition = CASES["one by itself, with a transaction index that is retained"]

    def commit(fs: FileSystem, root: Path) -> None:
        for group in partition.outputs():
            replace.commit_group(cast("FileSystem", _FewLinks(fs, links)), str(root / PARTITION), group)

    def check(state: State) -> None:
        path = state.root / PARTITION
        replaced = partition.judge(load(path))
        assert all(replaced) or not state.action_ended
        recover(LOCAL, str(path))
        assert partition.judge(load(path)) == replaced

    for_every_stop(
        partition.make, commit, check, work_dir=fast_dir / "commit", counts=Counts(), partial_cuts=30, seed=SEED
    )


@pytest.mark.long
@pytest.mark.parametrize("name", few_in_check(CASES, *IN_CHECK, drawn=SEVERAL_OUTPUTS))
def test_every_fault_of_a_replacement_and_of_its_recovery_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The state after a failed operation is one of those after a stop, for a broker and for the recovery."""
    partition = CASES[name]
    counts, in_recovery = Counts("replacement of segments"), Counts("recovery")
    settled: NextRuns = {}
    unlike: dict[str, Tree] = {}

    def commit(fs: FileSystem, root: Path) -> None:
        for group in partition.outputs():
            replace.commit_group(fs, str(root / PARTITION), group)

    def check(state: State) -> None:
        replaced = partition.check_start(state.root)
        assert all(replaced) or not state.action_ended
        unlike.setdefault(digest_of_tree(state.tree), state.tree)
        assert recover_completely(partition, state.root, settled) == replaced

    def check_recovered(state: State) -> None:
        partition.check_start(state.root)
        recover_completely(partition, state.root, settled)

    for_every_fault(
        partition.make, commit, check, work_dir=fast_dir / "commit", counts=counts, share=SHARE, seed=SEED,
        partial_cuts=1,
    )  # fmt: skip
    for number, tree in enumerate(unlike.values()):
        for_every_fault(
            tree,
            lambda fs, path: recover(fs, str(path / PARTITION)),
            check_recovered,
            again=lambda fs, path: recover(fs, str(path / PARTITION)),
            work_dir=fast_dir / "recovery", counts=in_recovery, share=SHARE / 10, seed=SEED + number,
        )  # fmt: skip
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {counts}; in the recovery of these {in_recovery}")
    assert counts.faults > 10


NextRuns = dict[str, list[bool]]  # by digest, the checked results of recoveries


def recover_completely(partition: Partition, root: Path, settled: NextRuns) -> list[bool]:
    """Recover, and check that no other files remain, sources are unchanged or replaced, and a second recovery changes
    nothing. Return for each part whether its sources are replaced.
    """
    recover(LOCAL, str(root / PARTITION))
    digest = digest_of(root)
    if digest not in settled:
        settled[digest] = check_recovered(partition, root)
    return settled[digest]


def check_recovered(partition: Partition, root: Path) -> list[bool]:
    path = root / PARTITION
    replaced = partition.check_start(root)
    names = {file.name for file in path.iterdir()}
    assert not [name for name in names if name.count(".") > 1], names
    merged_away = {
        base
        for part, done in zip(partition.parts, replaced, strict=True)
        for base in part.source_bases[1:]
        if done and f"{base:020d}.log" not in names
    }
    for base in partition.segments:
        if base:
            assert (f"{base:020d}.snapshot" in names) == (base not in merged_away), base
    before = digest_of(root)
    assert recover(LOCAL, str(path)) == []
    assert digest_of(root) == before
    return replaced
