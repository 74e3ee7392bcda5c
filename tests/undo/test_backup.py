"""The backup of a partition: its files (names, contents, times, owners) as links or copies, refusals, and its removal.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.kernels.native import file_digest
from keytail.log.fs import LOCAL, FileStat, FileSystem
from keytail.log.replacement.replace import GroupOutput
from keytail.undo.backup import (
    MARKER,
    Backup,
    add_groups,
    copy_file,
    digest_file,
    entries,
    forget,
    keep,
)
from keytail.undo.manifest import MANIFEST, read_manifest, write_manifest
from tests.crash.partitions import PARTITION, Group, Partition
from tests.log_dirs import on_another_file_system

GROUPS = (Group((0, 10), (1, 4, 12)), Group((20,), (21, 25), continued=(24,)), Group((30,), ()))
SEGMENTS = {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 40), 40: range(40, 42)}
MTIME_NS = 1_700_000_000_123_456_789


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    Partition(SEGMENTS, GROUPS).make(tmp_path / "logs")
    (tmp_path / "logs" / PARTITION / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n4 25\n7 40\n")
    (tmp_path / "logs" / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 10\nother 1 5\n")
    for file in (tmp_path / "logs" / PARTITION).iterdir():
        os.utime(file, ns=(MTIME_NS, MTIME_NS))
    return tmp_path / "logs"


def outputs() -> list[GroupOutput]:
    return Partition(SEGMENTS, GROUPS).outputs()


def kept_of(log_dir: Path, *, copies: bool = False, groups: int = 1, fs: FileSystem = LOCAL, to: str = "") -> Path:
    backup = Backup(to or str(log_dir.parent / "originals"), copies)
    return Path(
        keep(
            fs, backup, str(log_dir / PARTITION), outputs()[:groups],
            run_id="r1", source_bases=[0, 10, 20, 30], end_offset=40, next_checkpoint=40,
        )
    )  # fmt: skip


def sources(log_dir: Path) -> list[Path]:
    wanted = (".log", ".index", ".timeindex", ".txnindex", ".snapshot")
    files = [path for path in (log_dir / PARTITION).iterdir() if path.name.endswith(wanted)]
    return sorted(path for path in files if int(path.name[:20]) < 40)


@pytest.mark.parametrize("copies", [False, True])
def test_every_source_file_is_backed_up_unchanged(log_dir: Path, copies: bool) -> None:
    if os.geteuid() == 0:
        os.chown(log_dir / PARTITION / f"{10:020d}.log", 1234, 2345)
    os.chmod(log_dir / PARTITION / f"{20:020d}.log", 0o640)
    entry = kept_of(log_dir, copies=copies)
    assert entry == log_dir.parent / "originals" / "r1" / PARTITION
    assert sorted(path.name for path in entry.iterdir()) == sorted([MANIFEST, *(p.name for p in sources(log_dir))])
    assert len([path for path in sources(log_dir) if path.name.endswith(".snapshot")]) == 3
    for source in sources(log_dir):
        ours, theirs = (entry / source.name).stat(), source.stat()
        assert (ours.st_ino == theirs.st_ino) != copies
        assert (entry / source.name).read_bytes() == source.read_bytes()
        for field in ("st_mtime_ns", "st_uid", "st_gid", "st_mode"):
            assert getattr(ours, field) == getattr(theirs, field)


def test_the_manifest_lists_the_old_and_the_new_files(log_dir: Path) -> None:
    entry = kept_of(log_dir, groups=2)
    manifest = read_manifest(LOCAL, str(entry))
    assert (manifest.name, manifest.partition_path) == (PARTITION, str(log_dir / PARTITION))
    assert (manifest.cleaner_checkpoint, manifest.next_checkpoint, manifest.log_start_checkpoint) == (10, 40, None)
    assert manifest.leader_epochs == ((0, 0), (4, 25)), (
        "the epoch that begins at the end of the cleaned range must be excluded"
    )
    for kept, source in zip(manifest.files, sources(log_dir), strict=True):
        digest = file_digest()
        digest.update(source.read_bytes())
        facts = source.stat()
        assert (kept.name, kept.size_bytes, kept.digest_hex) == (source.name, facts.st_size, digest.hexdigest())
        assert (kept.mtime_ns, kept.uid, kept.gid) == (facts.st_mtime_ns, facts.st_uid, facts.st_gid)
        assert kept.mode == facts.st_mode & 0o7777
    assert [part.source_bases for part in manifest.parts] == [(0, 10), (20,)]
    first, second = outputs()[:2]
    assert [left.name for left in manifest.parts[0].left] == [
        f"{0:020d}{file.suffix}" for file in first.segments[0].files
    ]
    assert [(left.size_bytes, left.digest_hex) for left in manifest.parts[1].left] == [
        (file.size_bytes, file.digest_hex) for out in second.segments for file in out.files
    ]
    add_groups(LOCAL, str(entry), outputs()[2:])
    assert [part.source_bases for part in read_manifest(LOCAL, str(entry)).parts] == [(0, 10), (20,), (30,)]
    assert json.loads((entry / MANIFEST).read_text())["version"] == 1


def test_a_group_replaced_in_several_steps_is_recorded_in_as_many_parts(log_dir: Path) -> None:
    both = GroupOutput((0, 10, 20), (outputs()[0].segments[0], *outputs()[1].segments))
    entry = kept_of(log_dir, groups=0)
    add_groups(LOCAL, str(entry), [both])
    assert [part.source_bases for part in read_manifest(LOCAL, str(entry)).parts] == [(0, 10), (20,)]


def test_the_manifest_is_written_last_and_a_failed_entry_leaves_nothing(log_dir: Path) -> None:
    class Failing(FileSystem):
        left = 4

        def link(self, source: str, target: str) -> None:
            self.left -= 1
            assert not os.path.exists(os.path.join(os.path.dirname(target), MANIFEST))
            if not self.left:
                raise OSError(5, "Input/output error", target)
            super().link(source, target)

    with pytest.raises(OSError, match="Input/output error"):
        kept_of(log_dir, fs=Failing())
    assert list((log_dir.parent / "originals").iterdir()) == []


def test_a_second_entry_of_the_same_run_and_partition_is_an_error_and_the_first_is_unchanged(log_dir: Path) -> None:
    entry = kept_of(log_dir)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    with pytest.raises(FileExistsError):
        kept_of(log_dir)
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_backup_without_an_index_is_refused(log_dir: Path, suffix: str) -> None:
    (log_dir / PARTITION / f"{20:020d}{suffix}").unlink()
    with pytest.raises(Refused, match=rf"{20:020d}{suffix}\). .*keytail rebuild-index .*\[segment-without-index\]"):
        kept_of(log_dir)
    assert not (log_dir.parent / "originals").exists()


def test_across_file_systems_copies_are_required(log_dir: Path) -> None:
    target = on_another_file_system(log_dir)
    try:
        with pytest.raises(Refused, match=r"file system.*--copy-originals \[backup-on-other-file-system\]"):
            kept_of(log_dir, to=str(target))
        entry = kept_of(log_dir, to=str(target), copies=True)
        for source in sources(log_dir):
            assert (entry / source.name).read_bytes() == source.read_bytes()
            assert (entry / source.name).stat().st_mtime_ns == source.stat().st_mtime_ns
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_held_bytes_count_files_without_another_hard_link(log_dir: Path) -> None:
    entry = kept_of(log_dir)
    [found] = entries(LOCAL, str(log_dir.parent / "originals"))
    assert (found.run_id, found.name, found.path, found.held_bytes) == ("r1", PARTITION, str(entry), 0)
    removed = log_dir / PARTITION / f"{10:020d}.log"
    size_bytes = removed.stat().st_size
    removed.unlink()
    [found] = entries(LOCAL, str(log_dir.parent / "originals"))
    assert found.held_bytes == size_bytes


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 1, "files": 3}'])
def test_an_unreadable_manifest_is_a_problem_of_its_entry(log_dir: Path, text: str) -> None:
    entry = kept_of(log_dir)
    (entry / MANIFEST).write_text(text)
    with pytest.raises(CorruptLog, match=r"\[invalid-manifest\]"):
        read_manifest(LOCAL, str(entry))
    [found] = entries(LOCAL, str(log_dir.parent / "originals"))
    assert found.manifest is None
    assert str(entry / MANIFEST) in found.problem


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (["files", 0, "name"], "../../../etc/00000000000000000000.log"),
        (["files", 0, "name"], "manifest.json"),
        (["files", 0, "name"], "leader-epoch-checkpoint"),
        (["files", 0, "size_bytes"], -1),
        (["files", 0, "size_bytes"], "1"),
        (["files", 0, "mtime_ns"], 2**63),
        (["files", 0, "mode"], 0.5),
        (["parts", 0, "left", 0, "name"], "/etc/shadow"),
        (["parts", 0, "left", 0, "size_bytes"], -1),
        (["parts", 0, "source_bases", 0], "0"),
        (["parts", 0, "source_bases", 0], 2**63),
        (["parts", 0, "source_bases", 0], 10**9),
        (["parts", 0, "left"], [{"name": f"{0:020d}.snapshot", "size_bytes": 0, "digest_hex": ""}]),
        (["kept_ms"], -(2**63) + 1),
        (["undone_ms"], 2**63 - 1),
        (["log_dir"], "/\ud800"),
        (["end_offset"], None),
        (["cleaner_checkpoint"], "10"),
        (["leader_epochs", 0, 0], [1]),
        (["log_dir"], "logs"),
        (["log_dir"], "/logs\0"),
        (["log_dir"], 5),
        (["topic"], "../other"),
        (["topic"], ["orders"]),
        (["partition"], 7),
        (["run_id"], "../other"),
    ],
)
def test_an_edited_manifest_cannot_point_elsewhere(log_dir: Path, at: list[str | int], value: object) -> None:
    """The owner of the log dir may write to the backup, and root may undo the run."""
    entry = kept_of(log_dir)
    fields: Any = json.loads((entry / MANIFEST).read_text())
    holder = fields
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    (entry / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(CorruptLog, match=r"\[invalid-manifest\]"):
        read_manifest(LOCAL, str(entry))


def test_a_manifest_of_another_version_is_refused(log_dir: Path) -> None:
    entry = kept_of(log_dir)
    fields = json.loads((entry / MANIFEST).read_text())
    (entry / MANIFEST).write_text(json.dumps({**fields, "version": 2}))
    with pytest.raises(Refused, match="version 2"):
        read_manifest(LOCAL, str(entry))


def test_a_manifest_is_read_back_as_written(log_dir: Path) -> None:
    entry = str(kept_of(log_dir, groups=3))
    manifest = read_manifest(LOCAL, entry)
    write_manifest(LOCAL, entry, manifest)
    assert read_manifest(LOCAL, entry) == manifest


def test_the_last_entry_of_a_run_is_removed_with_the_run(log_dir: Path) -> None:
    entry = kept_of(log_dir)
    (entry.parent / "orders-1").mkdir()
    (entry / (MANIFEST + ".tmp")).write_text("")
    before = {path.name: path.read_bytes() for path in sources(log_dir)}
    forget(LOCAL, str(entry))
    assert sorted(path.name for path in entry.parent.iterdir()) == [MARKER, "orders-1"]
    forget(LOCAL, str(entry.parent / "orders-1"))
    assert list((log_dir.parent / "originals").iterdir()) == []
    assert {path.name: path.read_bytes() for path in sources(log_dir)} == before


@pytest.mark.parametrize("name", ["notes.txt", f"{5:020d}.log.swap", "a directory"])
def test_other_directories_are_never_removed(log_dir: Path, name: str) -> None:
    entry = kept_of(log_dir)
    if name == "a directory":
        (entry / name).mkdir()
    else:
        (entry / name).write_text("x")
    before = sorted(path.name for path in entry.iterdir())
    with pytest.raises(Refused, match="nothing was removed"):
        forget(LOCAL, str(entry))
    assert sorted(path.name for path in entry.iterdir()) == before


def _as_in_a_log_dir(root: Path) -> Path:
    """Return a partition of a log dir: `<directory>/<log dir>/<topic>-<partition>` looks like an entry of a backup."""
    Partition(SEGMENTS, GROUPS).make(root / "logs")
    entry = root / "logs" / PARTITION
    for file in entry.iterdir():
        if file.suffix not in (".log", ".index", ".timeindex"):
            file.unlink()
    (root / "logs" / "meta.properties").write_text("version=1\n")
    return entry


def _in_a_copy_without_meta_properties(root: Path) -> Path:
    entry = _as_in_a_log_dir(root)
    (root / "logs" / "meta.properties").unlink()
    return entry


def _with_a_marker_in_a_log_dir(root: Path) -> Path:
    entry = _as_in_a_log_dir(root)
    (root / "logs" / MARKER).write_text("keytail backup of run logs\n")
    return entry


def _below_a_log_dir(root: Path) -> Path:
    Partition(SEGMENTS, GROUPS).make(root / "source")
    (root / "originals").mkdir()
    entry = kept_of(root / "source", to=str(root / "originals"))
    (root / "meta.properties").write_text("version=1\n")
    return entry


def _look_alike_manifest(root: Path) -> Path:
    """Return a directory of another program with the form of an entry, such as `~/projects/web-2/manifest.json`."""
    entry = root / "projects" / "web-2"
    entry.mkdir(parents=True)
    (entry / MANIFEST).write_text('{"version": 1, "run_id": "projects", "topic": "web", "partition": 2}')
    return entry


def _manifest_of_another_partition(root: Path) -> Path:
    Partition(SEGMENTS, GROUPS).make(root / "source")
    entry = kept_of(root / "source", to=str(root / "originals"))
    return entry.rename(entry.with_name("other-0"))


def _empty(root: Path) -> Path:
    entry = root / "python" / "gtk-2"
    entry.mkdir(parents=True)
    return entry


def _marker_of_another_run(root: Path) -> Path:
    entry = _empty(root)
    (entry.parent / MARKER).write_text("keytail backup of run r1\n")
    return entry


def _marker_that_is_a_link(root: Path) -> Path:
    entry = _empty(root)
    (root / "elsewhere").write_text("keytail backup of run python\n")
    (entry.parent / MARKER).symlink_to(root / "elsewhere")
    return entry


def _without_a_marker(root: Path) -> Path:
    Partition(SEGMENTS, GROUPS).make(root / "source")
    entry = kept_of(root / "source", to=str(root / "originals"))
    (entry / MANIFEST).unlink()
    (entry.parent / MARKER).unlink()
    return entry


def _with_a_link_inside(root: Path) -> Path:
    Partition(SEGMENTS, GROUPS).make(root / "source")
    entry = kept_of(root / "source", to=str(root / "originals"))
    (entry / f"{0:020d}.log").unlink()
    (entry / f"{0:020d}.log").symlink_to(root / "source" / PARTITION / f"{0:020d}.log")
    return entry


NOT_BACKUPS = {
    "a partition of a log dir": (_as_in_a_log_dir, "it contains meta.properties"),
    "a partition of a copy of a log dir": (_in_a_copy_without_meta_properties, "not a backup created by keytail"),
    "a partition of a log dir with a marker": (_with_a_marker_in_a_log_dir, "it contains meta.properties"),
    "below a log dir": (_below_a_log_dir, "it contains meta.properties"),
    "a manifest of another program": (_look_alike_manifest, "not a backup created by keytail"),
    "a manifest of another partition": (_manifest_of_another_partition, "not a backup created by keytail"),
    "an empty directory": (_empty, "not a backup created by keytail"),
    "a marker of another run": (_marker_of_another_run, "not a backup created by keytail"),
    "a marker that is a link": (_marker_that_is_a_link, "not a backup created by keytail"),
    "unfinished, without a marker": (_without_a_marker, "not a backup created by keytail"),
    "a link inside": (_with_a_link_inside, "a file that keytail does not create"),
}


def _all_of(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("state", NOT_BACKUPS)
def test_only_directories_with_the_marker_are_removed(tmp_path: Path, state: str) -> None:
    make, why = NOT_BACKUPS[state]
    entry = make(tmp_path)
    if state == "a manifest of another partition":  # with the marker, the directory would be removed
        (entry.parent / MARKER).unlink()
    before = _all_of(tmp_path)
    with pytest.raises(Refused, match=why) as refused:
        forget(LOCAL, str(entry))
    assert "othing was removed" in str(refused.value)
    assert _all_of(tmp_path) == before


@pytest.mark.parametrize("state", ["unfinished", "damaged manifest", "of an older keytail", "emptied"])
def test_directories_with_the_marker_are_removed_in_any_state(log_dir: Path, state: str) -> None:
    entry = kept_of(log_dir)
    if state == "unfinished":
        (entry / MANIFEST).unlink()
    elif state == "damaged manifest":
        (entry / MANIFEST).write_text("{")
    elif state == "of an older keytail":
        (entry.parent / MARKER).unlink()
    else:
        for path in entry.iterdir():
            path.unlink()
    forget(LOCAL, str(entry))
    assert list((log_dir.parent / "originals").iterdir()) == []


@pytest.mark.parametrize("size_bytes", [0, 1, (4 << 20) - 1, 4 << 20, (8 << 20) + 3])
def test_files_of_any_size_are_digested_and_copied(tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "a").write_bytes(data)
    digest = file_digest()
    digest.update(data)
    like = LOCAL.stat(str(tmp_path / "a"))
    assert digest_file(LOCAL, str(tmp_path / "a")) == (size_bytes, digest.hexdigest())
    assert copy_file(LOCAL, str(tmp_path / "a"), str(tmp_path / "b"), like) == (size_bytes, digest.hexdigest())
    assert (tmp_path / "b").read_bytes() == data


def test_a_copy_that_fails_leaves_no_file(tmp_path: Path) -> None:
    class Full(FileSystem):
        def write(self, fd: int, buffer: object) -> int:
            raise OSError(28, "No space left on device")

    (tmp_path / "a").write_bytes(b"x")
    like: FileStat = LOCAL.stat(str(tmp_path / "a"))
    with pytest.raises(OSError, match="No space left"):
        copy_file(Full(), str(tmp_path / "a"), str(tmp_path / "b"), like)
    assert not (tmp_path / "b").exists()
