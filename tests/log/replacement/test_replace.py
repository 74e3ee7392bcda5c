"""The checks of a commit before it changes anything, and the files after it."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from keytail.errors import KeytailError, Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement import replace
from keytail.log.replacement.recover import recover
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment
from tests.crash.driver import digest_of
from tests.crash.partitions import PARTITION, SCRATCH, Group, Partition, log_of
from tests.reference.loader import load

CASE = Partition(
    {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)},
    (Group((0, 10), (1, 4, 8, 12, 15)),),
)

# Two outputs of one group; the second one begins inside the first source.
SPLIT = dataclasses.replace(CASE, groups=(Group((0, 10), (1, 4, 8, 9, 12, 15), continued=(8,)),))


def _path(tmp_path: Path, case: Partition = CASE) -> Path:
    case.make(tmp_path)
    return tmp_path / PARTITION


def test_a_commit_leaves_the_output_and_no_other_files(tmp_path: Path) -> None:
    path = _path(tmp_path)
    inodes = {name: (path / name).stat().st_ino for name in os.listdir(path) if name[:20] >= f"{20:020d}"}
    scratch = [file for file in path.iterdir() if file.name.endswith(SCRATCH)]
    times = {file.name.removesuffix(SCRATCH): file.stat().st_mtime_ns for file in scratch}
    replace.commit_group(LOCAL, str(path), CASE.outputs()[0])
    assert CASE.judge(load(path)) == [True]
    names = set(os.listdir(path))
    assert names == {f"{0:020d}{s}" for s in (".log", ".index", ".timeindex")} | inodes.keys()
    assert inodes == {name: (path / name).stat().st_ino for name in inodes}, "other files must be unchanged"
    assert times == {name: (path / name).stat().st_mtime_ns for name in times}
    assert recover(LOCAL, str(path)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_the_guard_has_the_owner_and_mode_of_the_source(tmp_path: Path) -> None:
    path = _path(tmp_path)
    source = path / f"{0:020d}.log"
    os.chown(source, 1234, 4321)
    source.chmod(0o640)
    seen = []

    class Watched(FileSystem):
        def rename(self, source: str, target: str) -> None:
            guard = path / f"{0:020d}.log.cleaned"
            if guard.exists():
                facts = guard.stat()
                seen.append((facts.st_uid, facts.st_gid, facts.st_mode & 0o7777, facts.st_size))
            super().rename(source, target)

    replace.commit_group(Watched(), str(path), CASE.outputs()[0])
    assert set(seen) == {(1234, 4321, 0o640, 0)}


Change = Callable[[GroupOutput], GroupOutput]


def _with_files(group: GroupOutput, files: Iterable[CleanFile]) -> GroupOutput:
    """Replace the files of the last output."""
    *before, last = group.segments
    return dataclasses.replace(group, segments=(*before, OutputSegment(last.base_offset, tuple(files))))


def _without(suffix: str) -> Change:
    return lambda group: _with_files(group, (f for f in group.segments[-1].files if f.suffix != suffix))


def _resized(suffix: str) -> Change:
    return lambda group: _with_files(
        group,
        (
            dataclasses.replace(file, size_bytes=file.size_bytes + (file.suffix == suffix))
            for file in group.segments[-1].files
        ),
    )


def _rebased(*bases: int) -> Change:
    """Move the first outputs to these base offsets."""
    return lambda group: dataclasses.replace(
        group,
        segments=tuple(OutputSegment(base, out.files) for base, out in zip(bases, group.segments, strict=False)),
    )


def _sources(*bases: int) -> Change:
    return lambda group: dataclasses.replace(group, source_bases=bases)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_without(".log"), "has no .log"),
        (_without(".index"), "has no .index"),
        (_without(".timeindex"), "has no .timeindex"),
        (_resized(".log"), "bytes on the driver, but its task wrote"),
        (_resized(".timeindex"), "bytes on the driver, but its task wrote"),
        (_sources(0), "does not end with a complete batch below the next segment"),
        (_sources(0, 20), "but the segments on disk are"),
        (_sources(0, 10, 15), "but the segments on disk are"),
        (_sources(10, 20), "cannot be replaced by segments"),
        (_sources(10, 0), "cannot be replaced by segments"),
        (_sources(), "cannot be replaced by segments"),
    ],
)
def test_an_unexpected_output_changes_nothing(change: Change, complaint: str, tmp_path: Path) -> None:
    _assert_nothing_changes(CASE, change, complaint, tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_without(".log"), "has no .log"),
        (_resized(".index"), "bytes on the driver, but its task wrote"),
        (_rebased(0, 4), "does not end with a complete batch below the next segment"),  # 4 is inside the first output
        (_rebased(0, 20), "does not end with a complete batch below the next segment"),
        (_rebased(0, 25), "does not end with a complete batch below the next segment"),
        (_rebased(4, 8), "cannot be replaced by segments"),
        (_rebased(8, 0), "cannot be replaced by segments"),
        (_rebased(0, 0), "cannot be replaced by segments"),
        (_rebased(), "cannot be replaced by segments"),
        (_sources(0), "does not end with a complete batch below the next segment"),
    ],
)
def test_one_unexpected_output_of_several_changes_nothing(
    change: Change, complaint: str, tmp_path: Path
) -> None:
    _assert_nothing_changes(SPLIT, change, complaint, tmp_path)


def test_overlapping_outputs_change_nothing(tmp_path: Path) -> None:
    case = dataclasses.replace(CASE, groups=(Group((0, 10), (1, 4, 8, 12, 15), continued=(8,)),))
    path = _path(tmp_path, case)
    longer = log_of((1, 4, 8))
    (path / f"{0:020d}.log{SCRATCH}").write_bytes(longer)
    group = case.outputs()[0]
    files = (dataclasses.replace(group.segments[0].files[0], size_bytes=len(longer)), *group.segments[0].files[1:])
    group = dataclasses.replace(group, segments=(OutputSegment(0, files), group.segments[1]))
    before = digest_of(path)
    with pytest.raises(KeytailError, match="below the next segment"):
        replace.commit_group(LOCAL, str(path), group)
    assert digest_of(path) == before


def test_a_commit_of_several_outputs_leaves_no_other_files(tmp_path: Path) -> None:
    path = _path(tmp_path, SPLIT)
    replace.commit_group(LOCAL, str(path), SPLIT.outputs()[0])
    assert SPLIT.judge(load(path)) == [True]
    names = {name for name in os.listdir(path) if name.endswith(".log") or name.count(".") > 1}
    assert names == {f"{base:020d}.log" for base in (0, 8, 20, 30)}
    assert {name[:20] for name in os.listdir(path) if name.endswith(".snapshot")} == {f"{b:020d}" for b in (20, 30)}
    assert recover(LOCAL, str(path)) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV])
@pytest.mark.parametrize("case", [CASE, SPLIT], ids=["one", "two"])
def test_without_hard_links_files_are_renamed(case: Partition, number: int, tmp_path: Path) -> None:
    class WithoutLinks(FileSystem):
        def link(self, source: str, target: str) -> None:
            raise OSError(number, "no hard links here", source)

    path, linked = _path(tmp_path, case), _path(tmp_path / "linked", case)
    replace.commit_group(WithoutLinks(), str(path), case.outputs()[0])
    replace.commit_group(LOCAL, str(linked), case.outputs()[0])
    assert case.judge(load(path)) == [True]
    assert contents(path) == contents(linked)
    assert recover(LOCAL, str(path)) == []


def test_no_file_has_a_second_hard_link_after_a_commit(tmp_path: Path) -> None:
    path = _path(tmp_path)
    replace.commit_group(LOCAL, str(path), CASE.outputs()[0])
    assert {file.stat().st_nlink for file in path.iterdir()} == {1}


def test_a_source_between_two_outputs_is_refused(tmp_path: Path) -> None:
    """A broker before 3.0 would retain it beside the outputs: row 56 of SWAP.md."""
    case = dataclasses.replace(CASE, groups=(Group((0, 10, 20), (1, 4, 7, 23), continued=(7, 23)),))
    path = _path(tmp_path, case)
    before = digest_of(tmp_path)
    with pytest.raises(KeytailError, match="source segment 10 is between the end of output 7 and output 23"):
        replace.commit_group(LOCAL, str(path), case.outputs()[0])
    assert digest_of(tmp_path) == before


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_commit_is_refused_while_a_deleted_log_is_left(tmp_path: Path) -> None:
    path = _path(tmp_path, SPLIT)
    (path / f"{8:020d}.log.deleted").touch()
    before = digest_of(path)
    with pytest.raises(Refused, match=r"unfinished: 0{19}8\.log\.deleted"):
        replace.commit_group(LOCAL, str(path), SPLIT.outputs()[0])
    assert digest_of(path) == before


def _assert_nothing_changes(case: Partition, change: Change, complaint: str, tmp_path: Path) -> None:
    path = _path(tmp_path, case)
    before = digest_of(path)
    with pytest.raises(KeytailError, match=complaint):
        replace.commit_group(LOCAL, str(path), change(case.outputs()[0]))
    assert digest_of(path) == before


def test_a_missing_scratch_file_changes_nothing(tmp_path: Path) -> None:
    path = _path(tmp_path)
    (path / CASE.outputs()[0].segments[0].files[1].name).unlink()
    before = digest_of(path)
    with pytest.raises(FileNotFoundError):
        replace.commit_group(LOCAL, str(path), CASE.outputs()[0])
    assert digest_of(path) == before


def test_an_output_that_ends_inside_a_batch_changes_nothing(tmp_path: Path) -> None:
    path = _path(tmp_path)
    group = CASE.outputs()[0]
    first, *others = group.segments[0].files
    log = path / first.name
    log.write_bytes(log.read_bytes()[:-1])
    group = _with_files(group, (dataclasses.replace(first, size_bytes=first.size_bytes - 1), *others))
    before = digest_of(path)
    with pytest.raises(KeytailError, match="does not end with a complete batch"):
        replace.commit_group(LOCAL, str(path), group)
    assert digest_of(path) == before


@pytest.mark.parametrize("name", ["00000000000000000030.log.cleaned", "00000000000000000020.index.swap", "foo.log"])
def test_leftovers_of_other_replacements_are_resolved_first_or_refused(name: str, tmp_path: Path) -> None:
    path = _path(tmp_path)
    (path / name).touch()
    before = digest_of(path)
    with pytest.raises(Refused, match=r"unfinished|no broker writes"):
        replace.commit_group(LOCAL, str(path), CASE.outputs()[0])
    assert digest_of(path) == before


def test_a_name_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    path = _path(tmp_path)
    os.mkfifo(path / "00000000000000000020.index.swap")
    for act in (
        lambda: recover(LOCAL, str(path)),
        lambda: replace.commit_group(LOCAL, str(path), CASE.outputs()[0]),
    ):
        with pytest.raises(Refused, match="not a regular file"):
            act()


@pytest.mark.parametrize("failing", range(1, 12))
def test_recovery_resolves_the_files_that_a_disk_error_leaves(failing: int, tmp_path: Path) -> None:
    path = _path(tmp_path)

    class Failing(FileSystem):
        count = 0

        def _change(self, operation, arguments, action):
            self.count += 1
            if self.count == failing:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return action()

    with pytest.raises(OSError, match="Input/output error"):
        replace.commit_group(Failing(), str(path), CASE.outputs()[0])
    found = CASE.judge(load(path))
    recover(LOCAL, str(path))
    assert CASE.judge(load(path)) == found
    assert not [name for name in os.listdir(path) if name.count(".") > 1]


def test_scratch_files_are_removed_even_if_nothing_can_be_renamed(tmp_path: Path) -> None:
    """On a full disk this frees the space that is needed to finish the replacement."""
    path = _path(tmp_path)

    class Full(FileSystem):
        def rename(self, source, target):
            if target.endswith(".deleted"):
                raise OSError(errno.ENOSPC, "No space left on device", source)
            super().rename(source, target)

    with pytest.raises(OSError, match="No space left"):
        replace.commit_group(Full(), str(path), CASE.outputs()[0])
    (path / f"{30:020d}.log{SCRATCH}").write_bytes(bytes(100))
    with pytest.raises(OSError, match="No space left"):
        recover(Full(), str(path))
    assert not list(path.glob("*.clean"))
    recover(LOCAL, str(path))
    assert all(CASE.judge(load(path)))


def test_a_deleted_file_of_something_else_is_not_removed(tmp_path: Path) -> None:
    path = _path(tmp_path)
    (path / "notes.deleted").write_text("mine")
    (path / "00000000000000000000-0000000000.checkpoint.deleted").write_text("a snapshot's")
    recover(LOCAL, str(path))
    assert (path / "notes.deleted").exists()
    assert (path / "00000000000000000000-0000000000.checkpoint.deleted").exists()
    assert log_of(range(10)) == (path / f"{0:020d}.log").read_bytes()
