"""Files and directories that the user may not read: the error reports their owner and a remedy, and the exit status is
not 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keytail.log.fs import LOCAL
from tests.cli.forked import keytail
from tests.log_dirs import random_records, write_log_dir
from tests.owned import BROKER, ROOT_ONLY, give, open_directory

pytestmark = ROOT_ONLY

SEGMENT = f"{0:020d}.log"
REMEDY = "Give this file or directory the owner and mode of the files beside it (chown, chmod)"
OF_FILE = f"it belongs to user root (uid 0), mode 0600, and keytail works as user id {BROKER}"
OF_DIRECTORY = f"it belongs to user root (uid 0), mode 0700, and keytail works as user id {BROKER}"


@pytest.fixture
def log_dir() -> Iterator[Path]:
    """Write a log dir of the broker's user that has files and a directory of root; keytail works as the broker's user.
    """
    with open_directory() as home:
        names = [f"orders-{number}" for number in range(3)]
        path = write_log_dir(home / "logs", {name: random_records(0, 40) for name in names})
        give(path, BROKER, 0o755)
        for log in (path / "orders-0").glob("*.log"):
            os.chown(log, 0, 0)
            log.chmod(0o600)
        os.chown(path / "orders-1", 0, 0)
        (path / "orders-1").chmod(0o700)
        yield path


@pytest.mark.parametrize("files", ["file", "directory"])
def test_dump_reports_the_owner_of_an_unreadable_file(files: str, log_dir: Path) -> None:
    path = log_dir / "orders-0" / SEGMENT if files == "file" else log_dir / "orders-0"
    done = keytail("dump", path)
    assert done.returncode == 1, done.stderr
    assert f"the file cannot be read: Permission denied while opening the file for reading: {OF_FILE}" in done.stderr
    assert done.stderr.count(REMEDY) == 1
    assert "none of the files" not in done.stderr
    assert "leader-epoch-checkpoint" in done.stdout or files == "file"


@pytest.mark.parametrize("flags", [(), ("--records",)], ids=["sizes", "records"])
def test_describe_shows_no_numbers_of_unreadable_files(flags: tuple[str, ...], log_dir: Path) -> None:
    done = keytail("describe", "--log-dirs", log_dir, *flags)
    assert done.returncode == 3, done.stderr
    assert "0 B" not in done.stdout
    assert "orders-0 could not be read: Permission denied" in done.stdout
    assert OF_FILE in done.stdout
    assert OF_DIRECTORY in done.stdout
    assert REMEDY in done.stdout
    only = keytail("describe", "--log-dirs", log_dir, "--partitions", "orders-1", *flags, "--output", "json")
    assert only.returncode == 1
    [row] = json.loads(only.stdout)
    assert row["slugs"] == ["permission-denied"]


@pytest.mark.parametrize("command", ["plan", "compact", "lookup", "rebuild-index"])
def test_each_command_reports_the_owner(command: str, log_dir: Path) -> None:
    flags = {
        "plan": ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact"),
        "compact": ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact"),
        "lookup": ("--offset", "1"),
        "rebuild-index": (),
    }[command]
    done = keytail(command, "--log-dirs", log_dir, *flags)
    assert done.returncode == 3, done.stderr
    assert OF_FILE in done.stdout
    assert OF_DIRECTORY in done.stdout
    assert "Run as the user that owns" not in done.stdout


def test_the_error_for_a_file_in_an_unreadable_directory_names_the_directory(log_dir: Path) -> None:
    done = keytail("dump", log_dir / "orders-1" / SEGMENT)
    assert done.returncode == 1
    assert "the directory orders-1 belongs to user root (uid 0), mode 0700" in done.stderr


def test_other_errors_do_not_report_an_owner(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        LOCAL.stat(str(tmp_path / "absent"))
    assert "belongs to" not in str(caught.value)
