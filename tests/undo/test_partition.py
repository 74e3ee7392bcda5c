"""The files that undo restores, their order, and the differences that prevent it, in examples and random cases."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import keytail.undo
from keytail.errors import CorruptLog, Refused
from keytail.kernels.native import file_digest
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement.recover import recover
from keytail.log.replacement.replace import GroupOutput, commit_group
from keytail.undo.backup import Backup, keep
from keytail.undo.manifest import MANIFEST, Manifest, read_manifest
from keytail.undo.partition import Decision, PartitionState, bytes_to_copy, check_backup, decide, read_state, restore
from tests.chance import SEED, draws
from tests.crash.partitions import NO_PRODUCERS, PARTITION, Group, Partition, log_of, txn_index, write_segment
from tests.reference.loader import load

MTIME_NS = 1_700_000_000_123_456_789
ACTIVE = 40
SEGMENTS = {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 36), 36: (), ACTIVE: range(40, 42)}
# A merge; a split with an index of aborted transactions; an output that ends below the base offset of a source.
GROUPS = (
    Group((0, 10), (1, 4, 12)),
    Group((20,), (21, 22, 25), txn_index(25), (24,)),
    Group((30, 36), (31,)),
)
Tree = dict[str, tuple[bytes, int, int, int, int]]


class Scenario:
    """A partition with a backup, in which the first `done` groups are replaced."""

    def __init__(
        self, root: Path, done: int, *, partition: Partition | None = None, copies: bool = False,
        before: int | None = 10, after: int = ACTIVE,
    ) -> None:  # fmt: skip
        self.logs, self.path, self.originals = root / "logs", root / "logs" / PARTITION, root / "originals"
        partition = partition or Partition(SEGMENTS, GROUPS, {0: txn_index(3)})
        partition.make(self.logs)
        (self.path / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n4 25\n")
        self.cleaner = self.logs / "cleaner-offset-checkpoint"
        self.set_cleaner(before)
        (self.logs / "log-start-offset-checkpoint").write_text("0\n1\nother 1 5\n")
        for file in self.path.iterdir():
            os.utime(file, ns=(MTIME_NS, MTIME_NS))
        self.before = tree(self.path)
        groups = [with_digests(self.path, group) for group in partition.outputs()]
        bases = [base for group in groups for base in group.source_bases]
        self.entry = keep(
            LOCAL, Backup(str(self.originals), copies), str(self.path), groups[: done + 1],
            run_id="r1", source_bases=bases, end_offset=ACTIVE, next_checkpoint=after,
        )  # fmt: skip
        for group in groups[:done]:
            commit_group(LOCAL, str(self.path), group)
        if done == len(groups):
            self.set_cleaner(after)
        recover(LOCAL, str(self.path))
        self.left = tree(self.path)

    def set_cleaner(self, offset: int | None) -> None:
        lines = ["other 1 5"] if offset is None else [f"orders 0 {offset}", "other 1 5"]
        self.cleaner.write_text("\n".join(["0", str(len(lines)), *lines]) + "\n")

    @property
    def cleaned(self) -> int | None:
        entries = read_offsets(LOCAL, str(self.cleaner))
        assert entries["other", 1] == 5
        return entries.get(("orders", 0))

    @property
    def manifest(self) -> Manifest:
        return read_manifest(LOCAL, self.entry)

    def decide(self) -> Decision:
        return decide(self.manifest, read_state(LOCAL, self.manifest))

    def undo(self) -> None:
        decision = self.decide()
        assert decision.differences == ()
        check_backup(LOCAL, self.manifest, self.entry, decision.parts)
        restore(LOCAL, self.manifest, self.entry, decision, 2)


def with_digests(path: Path, group: GroupOutput) -> GroupOutput:
    def digest(name: str) -> str:
        found = file_digest()
        found.update((path / name).read_bytes())
        return found.hexdigest()

    segments = tuple(
        replace(out, files=tuple(replace(file, digest_hex=digest(file.name)) for file in out.files))
        for out in group.segments
    )
    return replace(group, segments=segments)


def tree(path: Path) -> Tree:
    """Return all files of a directory except scratch files."""
    found = {}
    for file in sorted(path.iterdir()):
        if not file.name.endswith(".clean"):
            facts = file.stat()
            found[file.name] = (file.read_bytes(), facts.st_mtime_ns, facts.st_mode, facts.st_uid, facts.st_gid)
    return found


def bases(decision: Decision) -> list[tuple[int, ...]]:
    return [part.source_bases for part in decision.parts]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("done", range(len(GROUPS) + 1))
def test_the_directory_is_restored(tmp_path: Path, done: int, copies: bool) -> None:
    scenario = Scenario(tmp_path, done, copies=copies)
    assert (scenario.left != scenario.before) == (done > 0)
    parts = bases(scenario.decide())
    assert parts == [group.source_bases for group in GROUPS[:done]][::-1], "the newest group must be first"
    scenario.undo()
    assert tree(scenario.path) == scenario.before
    assert scenario.cleaned == 10
    assert scenario.decide().is_done
    assert scenario.manifest.undone_ms == 2
    restore(LOCAL, scenario.manifest, scenario.entry, scenario.decide(), 3)
    assert tree(scenario.path) == scenario.before


class WithoutLinks(FileSystem):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)


def test_without_hard_links_copies_are_kept_and_restored(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS), copies=True)
    restore(WithoutLinks(), scenario.manifest, scenario.entry, scenario.decide(), 2)
    assert tree(scenario.path) == scenario.before
    partition, originals = Partition(SEGMENTS, GROUPS), Backup(str(tmp_path / "others"), False)
    partition.make(tmp_path / "logs2")
    with pytest.raises(Refused, match="cannot create a hard link") as caught:
        keep(
            WithoutLinks(), originals, str(tmp_path / "logs2" / PARTITION), partition.outputs()[:1], run_id="r2",
            source_bases=[0, 10], end_offset=ACTIVE, next_checkpoint=ACTIVE,
        )  # fmt: skip
    assert "--copy-originals" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "target"), [(10, 40, 10), (None, 40, None), (40, 40, 40), (0, 40, 0), (1000, 40, None)]
)
def test_the_cleaners_checkpoint_is_restored(
    tmp_path: Path, before: int | None, after: int, target: int | None
) -> None:
    """A checkpoint above the offsets that the run cleaned is removed; without it, cleaning begins at the log start."""
    scenario = Scenario(tmp_path, len(GROUPS), before=before, after=after)
    decision = scenario.decide()
    assert (decision.cleaner_checkpoint, decision.moves_checkpoint) == (target, target != after)
    scenario.undo()
    assert scenario.cleaned == target


def test_the_checkpoint_is_lowered_before_anything_is_restored(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    (tmp_path / "originals" / "r1" / PARTITION / f"{30:020d}.log").unlink()
    with pytest.raises(FileNotFoundError):
        restore(LOCAL, scenario.manifest, scenario.entry, scenario.decide(), 2)
    assert scenario.cleaned == 10
    assert tree(scenario.path) == scenario.left
    assert scenario.manifest.undone_ms is None


def test_appended_segments_are_unchanged(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    write_segment(scenario.path, 60, log_of(range(60, 66)), "")
    (scenario.path / f"{60:020d}.snapshot").write_bytes(NO_PRODUCERS)
    (scenario.path / f"{66:020d}.snapshot").write_bytes(NO_PRODUCERS)
    with (scenario.path / f"{ACTIVE:020d}.log").open("ab") as active:
        active.write(log_of(range(42, 60)))
    (scenario.path / "leader-epoch-checkpoint").write_text(f"0\n3\n0 0\n4 25\n9 {ACTIVE}\n")
    with_more = tree(scenario.path)
    scenario.undo()
    wanted = {name: file for name, file in scenario.before.items() if name[:20].isdigit() and int(name[:20]) < ACTIVE}
    wanted |= {name: file for name, file in with_more.items() if not name[:20].isdigit() or int(name[:20]) >= ACTIVE}
    assert tree(scenario.path) == wanted
    offsets = [record.offset for record in load(scenario.path).records()]
    assert offsets == [*range(36), *range(40, 66)]


def test_undo_keeps_snapshots_that_belong_to_no_segment(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    (scenario.path / f"{17:020d}.snapshot").write_bytes(NO_PRODUCERS)
    scenario.undo()
    assert (scenario.path / f"{17:020d}.snapshot").exists()


@pytest.mark.parametrize("base", [20, 30])
def test_snapshots_that_a_broker_removed_below_the_log_start_are_not_a_difference(tmp_path: Path, base: int) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    (scenario.path / f"{base:020d}.snapshot").unlink()
    scenario.undo()
    assert tree(scenario.path) == scenario.before
    (scenario.path / f"{base:020d}.snapshot").unlink()
    assert scenario.decide().is_done


def test_last_sources_left_by_an_interrupted_replacement_are_accepted(tmp_path: Path) -> None:
    """Row 12 of SWAP.md: these sources begin after the end of the files that replaced the earlier sources."""
    scenario = Scenario(tmp_path, len(GROUPS))
    for name in [name for name in scenario.before if name.startswith(f"{36:020d}")]:
        shutil.copy2(Path(scenario.entry) / name, scenario.path / name)
    assert bases(scenario.decide()) == [(30,), (20,), (0, 10)]
    scenario.undo()
    assert tree(scenario.path) == scenario.before


def rewrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def compact_again(scenario: Scenario) -> None:
    write_segment(scenario.path, 0, log_of((4, 12)), "")


# Changes that a broker, or anyone else, may have made since the run, and the report of each.
DIFFERENCES: dict[str, tuple[Callable[[Scenario], object], str]] = {
    "a flipped bit": (
        lambda s: flip(s.path / f"{0:020d}.log"), "the contents of 0{20}.log differ from those after the run"
    ),
    "a longer file": (lambda s: rewrite(s.path / f"{24:020d}.index", bytes(24)), "24.index has 24 bytes; after"),
    "compacted again": (compact_again, r"0000.log has \d+ bytes; after the run it had \d+"),
    "a rebuilt index": (lambda s: rewrite(s.path / f"{20:020d}.timeindex", b""), "20.timeindex has 0 bytes; after"),
    "a missing segment": (lambda s: (s.path / f"{20:020d}.log").unlink(), "20.log is missing"),
    "a missing index": (lambda s: (s.path / f"{24:020d}.txnindex").unlink(), "24.txnindex is missing"),
    "an added segment": (lambda s: write_segment(s.path, 5, log_of([5]), ""), "05.log was added"),
    "an added source segment": (lambda s: write_segment(s.path, 10, log_of([12]), ""), "10.log was added"),
    "an added index": (lambda s: rewrite(s.path / f"{0:020d}.txnindex", txn_index(3)), "00.txnindex was added"),
    "an added snapshot": (lambda s: rewrite(s.path / f"{10:020d}.snapshot", NO_PRODUCERS), "10.snapshot was added"),
    "a changed snapshot": (lambda s: flip(s.path / f"{30:020d}.snapshot"), "30.snapshot differ from those after"),
    "another log start": (
        lambda s: (s.logs / "log-start-offset-checkpoint").write_text("0\n1\norders 0 7\n"),
        r"the log start offset is 7; before the run it was 0 \(log-start-offset-checkpoint\)",
    ),
    "another epoch": (
        lambda s: (s.path / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n5 25\n"),
        "has epoch 0 from offset 0, epoch 5 from offset 25 below offset 40; before the run it had epoch 0 from "
        "offset 0, epoch 4 from offset 25",
    ),
    "missing epochs": (
        lambda s: (s.path / "leader-epoch-checkpoint").unlink(),
        "has no epochs below offset 40; before the run it had epoch 0",
    ),
    "cleaned further": (lambda s: s.set_cleaner(41), "checkpoint has offset 41; after the run it had offset 40"),
    "a missing checkpoint entry": (
        lambda s: s.set_cleaner(None), "cleaner-offset-checkpoint has no entry; after the run it had offset 40"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_reported_and_prevents_undo(tmp_path: Path, name: str) -> None:
    change, reported = DIFFERENCES[name]
    scenario = Scenario(tmp_path, len(GROUPS))
    change(scenario)
    differences = scenario.decide().differences
    assert any(re.search(reported, text) for text in differences), differences
    assert not scenario.decide().is_done


def test_all_differences_are_reported(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    for name in ("a flipped bit", "a missing segment", "another epoch", "cleaned further"):
        DIFFERENCES[name][0](scenario)
    assert len(scenario.decide().differences) == 4


@pytest.mark.parametrize("name", ["a flipped bit", "a missing segment"])
def test_groups_that_the_run_did_not_reach_must_be_unchanged(tmp_path: Path, name: str) -> None:
    scenario = Scenario(tmp_path, 0)
    DIFFERENCES[name][0](scenario)
    assert scenario.decide().differences


@pytest.mark.parametrize("entry", ["orders 0 0", "orders 0 -1"])
def test_an_equivalent_log_start_is_not_a_difference(tmp_path: Path, entry: str) -> None:
    """A broker removes log start offsets that are not above the base offset of the first segment."""
    scenario = Scenario(tmp_path, len(GROUPS))
    (scenario.logs / "log-start-offset-checkpoint").write_text(f"0\n1\n{entry}\n")
    assert scenario.decide().differences == ()


@pytest.mark.parametrize("damage", ["gone", "flipped", "longer"])
def test_a_damaged_backup_is_reported_before_anything_is_changed(tmp_path: Path, damage: str) -> None:
    scenario = Scenario(tmp_path, len(GROUPS), copies=True)
    kept = Path(scenario.entry) / f"{10:020d}.log"
    if damage == "gone":
        kept.unlink()
    elif damage == "flipped":
        flip(kept)
    else:
        kept.write_bytes(kept.read_bytes() + b"x")
    with pytest.raises(CorruptLog, match=rf"file of the backup .*{kept}.*cannot be undone.*\[damaged-backup\]"):
        check_backup(LOCAL, scenario.manifest, scenario.entry, scenario.decide().parts)
    assert tree(scenario.path) == scenario.left


def test_unneeded_backup_files_may_be_missing(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, 1)
    (Path(scenario.entry) / f"{20:020d}.log").unlink()
    scenario.undo()
    assert tree(scenario.path) == scenario.before


def test_times_and_modes_are_restored_if_the_backup_files_lost_them(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, len(GROUPS))
    assert bytes_to_copy(LOCAL, scenario.manifest, scenario.entry, scenario.decide().parts) == 0
    kept = [path for path in Path(scenario.entry).iterdir() if path.name in scenario.before]
    for path in kept:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o600)
    size_bytes = sum(path.stat().st_size for path in kept)
    assert bytes_to_copy(LOCAL, scenario.manifest, scenario.entry, scenario.decide().parts) == size_bytes
    scenario.undo()
    assert tree(scenario.path) == scenario.before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(("uid", "mode"), [(0, 0o6755), (52_013, 0o4711)])
def test_an_edited_manifest_cannot_give_a_file_another_owner_or_special_bits(
    uid: int, mode: int, lost: bool, tmp_path: Path
) -> None:
    """With `lost`, the backup files do not have the attributes in the manifest, and are copied; otherwise they have
    them.
    """
    owner = 52_012
    scenario = Scenario(tmp_path, len(GROUPS), copies=True)
    manifest = Path(scenario.entry) / MANIFEST
    fields = json.loads(manifest.read_text())
    fields["files"] = [{**kept, "uid": uid, "gid": uid, "mode": mode} for kept in fields["files"]]
    manifest.write_text(json.dumps(fields))
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, owner, owner)
    kept = [path for path in Path(scenario.entry).iterdir() if path.name in scenario.before]
    for path in kept:
        if not lost:
            path.chmod(mode)  # a hard link shares the mode
    before = {path.name for path in scenario.path.iterdir()}
    scenario.undo()
    put_back = [path for path in scenario.path.iterdir() if path.name not in before]
    assert len(put_back) > 5
    for path in put_back:
        facts = path.stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (owner, owner, mode & 0o666), path.name


def random_partition(rng: random.Random) -> Partition:
    ends = sorted(rng.sample(range(1, ACTIVE), rng.randint(2, 5)))
    starts = [0, *ends]
    segments: dict[int, list[int]] = {
        base: [offset for offset in range(base, end) if rng.random() < 0.8]
        for base, end in zip(starts, [*ends, ACTIVE], strict=True)
    }
    segments[ACTIVE] = list(range(ACTIVE, ACTIVE + 2))
    groups, rest = [], starts
    while rest:
        count = rng.randint(1, len(rest))
        sources, rest = tuple(rest[:count]), rest[count:]
        kept = tuple(offset for base in sources for offset in segments[base] if rng.random() < 0.5)
        behind = dict(zip(starts, [*ends, ACTIVE], strict=True))
        places = [
            offset
            for offset in kept
            if offset not in segments
            and offset > sources[0]
            # The cleaner never leaves a whole source between two outputs (log/SWAP.md, state 56).
            and not any(
                max([sources[0], *(item for item in kept if item < offset)]) < base and behind[base] <= offset
                for base in sources
            )
        ]
        continued = tuple(sorted(rng.sample(places, min(len(places), rng.choice([0, 0, 1, 2])))))
        aborted = txn_index(kept[-1]) if kept and rng.random() < 0.3 else None
        groups.append(Group(sources, kept, aborted, continued))
    return Partition(segments, tuple(groups), {0: txn_index(1)} if rng.random() < 0.3 else {})


@pytest.mark.parametrize("number", range(draws(20)))
def test_random_partitions_are_restored(tmp_path: Path, number: int) -> None:
    """All replaced files are restored, and a change of any file below the active segment prevents that."""
    rng = random.Random(f"{SEED} {number}")
    partition = random_partition(rng)
    done = rng.randint(0, len(partition.groups))
    scenario = Scenario(tmp_path, done, partition=partition, copies=rng.random() < 0.5)
    assert scenario.decide().differences == ()
    ours = [path for path in scenario.path.iterdir() if path.name[:20].isdigit() and int(path.name[:20]) < ACTIVE]
    victim = rng.choice(sorted(ours))
    data, facts = victim.read_bytes(), victim.stat()
    victim.write_bytes(data + b"x" if rng.random() < 0.5 or not data else bytes([data[0] ^ 1]) + data[1:])
    assert scenario.decide().differences, victim
    victim.write_bytes(data)
    os.utime(victim, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    scenario.undo()
    assert tree(scenario.path) == scenario.before
    assert scenario.cleaned == 10


def test_an_undo_without_groups_is_done() -> None:
    manifest = Manifest("r1", "t", 0, "/d", 1, 10, None, 10, None, (), (), ())
    assert decide(manifest, PartitionState({}, None, None, ())).is_done


# By row of the table of states: the parts that have the files from before the run.
ROWS = {1: "all", 2: "all", 3: "newest", 4: "none", 5: "none", 6: "none", 7: "none", 8: "newest", 9: "newest",
        10: "all", 11: "all", 12: "as before"}  # fmt: skip


def test_the_table_of_states_is_complete() -> None:
    """tests/crash/test_undo.py stops at every step to show that each state is as described."""
    page = (Path(next(iter(keytail.undo.__path__))) / "UNDO.md").read_text()
    found = re.findall(r"^\| (\d+) \| .* \| (all|newest|none|as before) \| .* \|$", page, re.MULTILINE)
    assert {int(number): part for number, part in found} == ROWS
