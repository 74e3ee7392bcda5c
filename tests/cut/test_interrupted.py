"""A cut that is killed, or whose disk is full: no log dir has `meta.properties` before all else in it is durable."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

from keytail.cut.command import Request
from keytail.cut.driver import cut
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import DirEntry, FileSystem
from tests.chance import chance
from tests.crash.faults import Fault
from tests.crash.recorder import RecordingFileSystem
from tests.crash.trees import Tree
from tests.cut.test_command import copies_of, simple
from tests.log_dirs import snapshot


def request(copies: list[Path], output: Path) -> Request:
    given = tuple(f"{path.name}={path}" for path in copies)
    return Request(given, str(output), execute=True)


def files_of(tree: Tree, node: str) -> dict[str, bytes]:
    """Return the contents of all files of a node but `meta.properties`, by path."""
    return {
        path: found[0]
        for path, found in tree.items()
        if path.startswith(f"out/{node}/") and not path.endswith(names.META_PROPERTIES)
    }


def test_all_other_files_of_a_node_are_durable_before_its_meta_properties(tmp_path: Path) -> None:
    copies = copies_of(tmp_path, simple())
    fs, states = RecordingFileSystem(tmp_path), []
    has_begun = False

    def keep(operation: str, arguments: tuple[Any, ...]) -> None:
        nonlocal has_begun
        has_begun |= operation == "create" and str(arguments[0]).endswith(names.META_PROPERTIES)
        if has_begun:
            states.append(fs.power_cut())

    fs.before_each = keep
    before = [snapshot(path) for path in copies]
    assert {row.status for row in cut(request(copies, tmp_path / "out"), fs)} == {"whole"}
    assert [snapshot(path) for path in copies] == before
    final = fs.power_cut()
    assert len([path for path in final if path.endswith(names.META_PROPERTIES) and path.startswith("out/")]) == 3
    for state in states:
        for node in ("node-1", "node-2", "node-3"):
            assert files_of(state, node) == files_of(final, node)


def test_a_full_disk_leaves_no_log_dir_that_starts(tmp_path: Path) -> None:
    rng = chance()
    copies = copies_of(tmp_path, simple())
    before = [snapshot(path) for path in copies]
    whole = RecordingFileSystem(tmp_path)
    cut(request(copies, tmp_path / "whole"), whole)
    for number in range(3):
        output = tmp_path / f"out-{number}"
        fs = RecordingFileSystem(tmp_path)
        fs.fail_at(rng.randrange(len(whole.calls) // 3, len(whole.calls) * 9 // 10), Fault("ENOSPC", lasting=True))
        statuses: set[str] = set()
        with contextlib.suppress(KeytailError, OSError):
            statuses = {row.status for row in cut(request(copies, output), fs)}
        assert not statuses or "failed" in statuses
        assert not list(output.rglob(names.META_PROPERTIES))
        assert [snapshot(path) for path in copies] == before


def test_a_new_partition_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    class Failing(FileSystem):
        def scan(self, path: str) -> list[DirEntry]:
            if path.endswith(".unfinished"):
                raise OSError(errno.EIO, "Input/output error", path)
            return super().scan(path)

    copies = copies_of(tmp_path, simple())
    rows = cut(request(copies, tmp_path / "out"), Failing())
    assert "failed" in {row.status for row in rows} <= {"failed", "not-written"}
    errors = [row.error for row in rows if row.status == "failed"]
    assert all("the new directory cannot be read" in error and "Input/output error" in error for error in errors)
    assert not list((tmp_path / "out").rglob(names.META_PROPERTIES))
