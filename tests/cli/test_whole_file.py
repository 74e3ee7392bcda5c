"""A file that a run writes at its end is complete, or unchanged."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from keytail.cli.stopping import Stopped
from keytail.cli.whole_file import refuse_file, write_whole
from keytail.errors import Refused, UsageProblem
from keytail.log.fs import LOCAL
from tests.command_line import Run


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), Stopped(15), ValueError("no text")])
def test_a_file_is_unchanged_if_writing_it_fails(problem: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("before")

    def write(file: TextIO) -> None:
        file.write("half")
        raise problem

    with pytest.raises(type(problem)):
        write_whole(str(path), write)
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("rows", "before")]
    write_whole(str(path), lambda file: file.write("after"))
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("rows", "after")]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _link_to_a_file(path: Path) -> None:
    path.with_name("target").write_text("target")
    path.symlink_to(path.with_name("target"))


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _device(path: Path) -> None:
    """Create a separate device, so that no device of the machine can be replaced. Only root can do this."""
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can create devices")


OTHERS: dict[str, Callable[[Path], None]] = {
    "a named pipe": _fifo,
    "a socket": _socket,
    "a symbolic link": _link_to_a_file,
    "a symbolic link, dangling": _dangling_link,
    "a directory": Path.mkdir,
    "a device": _device,
}


def _names(directory: Path) -> list[tuple[str, int]]:
    return sorted((item.name, item.lstat().st_ino) for item in directory.iterdir())


@pytest.mark.parametrize("kind", OTHERS)
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows"
    OTHERS[kind](path)
    before = _names(tmp_path)
    what = kind.partition(",")[0]
    with pytest.raises(UsageProblem, match=f"--rows-file would replace {what} .*Give a new name"):
        refuse_file(LOCAL, str(path), (), "--rows-file")
    with pytest.raises(Refused, match=f"the file would replace {what} of the same name"):
        write_whole(str(path), lambda file: file.write("rows"))
    assert _names(tmp_path) == before, "no temporary file may be left"


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_that_appears_under_the_name_during_the_write_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows"
    path.write_text("before")
    refuse_file(LOCAL, str(path), (), "--rows-file")
    before: list[tuple[str, int]] = []

    def write(file: TextIO) -> None:
        path.unlink()
        OTHERS[kind](path)
        before.extend(name for name in _names(tmp_path) if not name[0].endswith(".tmp"))
        file.write("rows")

    with pytest.raises(Refused, match="of the same name"):
        write_whole(str(path), write)
    assert _names(tmp_path) == before


def test_a_directory_that_is_exchanged_during_the_write_does_not_get_the_file(tmp_path: Path) -> None:
    """The file is written to the directory in which the run began to write it, even if the path has changed since."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "elsewhere").mkdir()

    def write(file: TextIO) -> None:
        (tmp_path / "reports").rename(tmp_path / "moved")
        (tmp_path / "reports").symlink_to(tmp_path / "elsewhere")
        file.write("rows")

    write_whole(str(tmp_path / "reports" / "rows"), write)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "moved" / "rows").read_text() == "rows"


def test_a_directory_that_becomes_a_link_into_a_log_dir_does_not_get_the_file(tmp_path: Path, log_dir: Path) -> None:
    link = tmp_path / "reports"
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    refuse_file(LOCAL, str(link / "rows"), (), "--rows-file")
    link.unlink()
    link.symlink_to(log_dir)
    before = _names(log_dir)
    with pytest.raises(UsageProblem, match="which is a log dir"):
        write_whole(str(link / "rows"), lambda file: file.write("rows"))
    assert _names(log_dir) == before


@pytest.mark.parametrize("flag", ["--report", "--rows-file", "--quarantine-report"])
@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout"])
def test_no_flag_replaces_a_device(run: Run, log_dir: Path, flag: str, path: str) -> None:
    """The path is checked before the run, because root could replace /dev/null with a regular file."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", lambda *_, **__: pytest.fail("a device would have been replaced"))
        result = run("verify", "--log-dirs", log_dir, flag, path)
    assert result.exit_code == 2, result.stderr
    assert f"{flag} would replace" in result.stderr


def test_two_flags_with_the_same_file_are_a_usage_error(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    files = ("--rows-file", tmp_path / "out", "--quarantine-report", tmp_path / "link" / "out")
    result = run("verify", "--log-dirs", log_dir, *files)
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "--rows-file and --quarantine-report name the same file" in result.stderr
