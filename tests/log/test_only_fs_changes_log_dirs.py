"""The check in tests/conftest.py detects changes of log dirs by modules other than log/fs.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keytail.log.fs import LOCAL
from tests import conftest


def _in_keytail(source: str, **values: object) -> None:
    """Run a statement as if it were part of a module of the package."""
    exec(compile(source, conftest.PACKAGE + "compact/somewhere.py", "exec"), {"os": os, **values})


@pytest.mark.parametrize(
    "statement",
    [
        "open(path, 'ab')",
        "os.open(path, os.O_RDWR)",
        "os.rename(path, path + '.x')",
        "os.replace(path, path + '.x')",
        "os.unlink(path)",
        "os.link(path, path + '.x')",
        "os.symlink('/x', path + '.x')",
        "os.truncate(path, 0)",
        "os.mkdir(path + '.x')",
        "os.utime(path)",
        "os.chmod(path, 0o600)",
        "open(os.path.dirname(os.path.dirname(path)) + '/checkpoint', 'w')",
        "os.mkdir(os.path.dirname(os.path.dirname(path)) + '/work')",
    ],
)
def test_a_change_by_another_module_is_detected(statement: str, tmp_path: Path) -> None:
    path = _partition(tmp_path) / "00000000000000000000.log"
    with pytest.raises(AssertionError, match=r"only log/fs\.py may"):
        _in_keytail(statement, path=str(path))
    assert conftest.watch.violations
    conftest.watch.violations.clear()
    assert path.exists()


def test_reading_and_changes_elsewhere_are_allowed(tmp_path: Path) -> None:
    path = _partition(tmp_path) / "00000000000000000000.log"
    _in_keytail("open(path, 'rb').close()", path=str(path))
    outside = tmp_path / "outside"
    outside.mkdir()
    _in_keytail("open(path, 'w').close()", path=str(outside / "report.json"))


def test_changes_by_fs_are_allowed(tmp_path: Path) -> None:
    path = _partition(tmp_path)
    _in_keytail("LOCAL.unlink(path)", path=str(path / "00000000000000000000.log"), LOCAL=LOCAL)


def test_a_registered_dir_needs_no_partition(
    tmp_path_factory: pytest.TempPathFactory, register_log_dir: Callable[[Path], None]
) -> None:
    log_dir = tmp_path_factory.mktemp("logs")
    _in_keytail("open(path, 'w').close()", path=str(log_dir / "a"))
    register_log_dir(log_dir)
    with pytest.raises(AssertionError, match=r"only log/fs\.py may"):
        _in_keytail("open(path, 'w').close()", path=str(log_dir / "b"))
    conftest.watch.violations.clear()


def _partition(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "orders-0"
    path.mkdir(parents=True)
    (path / "00000000000000000000.log").touch()
    return path
