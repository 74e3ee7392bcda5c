"""Files that the user of a run may not read: every command refuses them, and none reports them as damaged."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keytail.cli.configuration import read_configuration
from keytail.errors import UsageProblem
from keytail.format.producers import encode_snapshot
from tests.cli.forked import keytail
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.owned import BROKER, OTHER, ROOT_ONLY, give, open_directory

pytestmark = ROOT_ONLY

COMPACT = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
EXPIRE = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=delete")
STEM = f"{100:020d}"
CLOSED = [f"{STEM}.log", f"{STEM}.index", f"{STEM}.timeindex", f"{200:020d}.snapshot", "leader-epoch-checkpoint"]


def _log_dir(path: Path, partitions: int) -> Path:
    names = [f"orders-{n}" for n in range(partitions)]
    log_dir = write_log_dir(path, {name: random_records(n, 400) for n, name in enumerate(names)})
    for name in names:
        (log_dir / name / f"{200:020d}.snapshot").write_bytes(encode_snapshot([]))
    give(log_dir, BROKER)
    return log_dir


@pytest.fixture
def home() -> Iterator[Path]:
    with open_directory() as path:
        _log_dir(path / "logs", 2)
        (path / "own").mkdir()
        give(path / "own", BROKER)
        yield path


def test_every_command_refuses_a_partition_with_a_file_that_it_may_not_read(home: Path) -> None:
    """Each partition except the last has a different unreadable file."""
    log_dir, own = _log_dir(home / "more", len(CLOSED) + 1), home / "own"
    before = snapshot(log_dir)
    closed = {f"orders-{n}": name for n, name in enumerate(CLOSED)}
    for partition, name in closed.items():
        (log_dir / partition / name).chmod(0)
    given = ("--log-dirs", log_dir, "--output", "json")
    for command in (
        ("plan", *given, *COMPACT),
        ("compact", *given, *COMPACT, "--execute", "--partitions", ",".join(closed)),
        ("verify", *given),
        ("salvage", *given, "--to", own / "dry"),
        ("salvage", *given, "--to", own / "saved", "--execute"),
        ("rebuild-index", *given, "--execute"),
        ("expire", *given, *EXPIRE, "--execute"),
    ):
        done = keytail(*command)
        rows = {f"{row['topic']}-{row['partition']}": row for row in json.loads(done.stdout)}
        assert done.returncode != 0, command
        for partition, name in closed.items():
            row = rows[partition]
            assert row["status"] == "refused", (command, row)
            for text in (f"{name}", "mode 0000", f"works as user id {BROKER}", "chown, chmod", "[permission-denied]"):
                assert text in row["error"], (command, row["error"])
            assert "findings" not in row or not row["findings"]
        if command[0] not in ("compact", "expire"):  # compact does not select it; expire does not know its retention
            assert rows[f"orders-{len(CLOSED)}"]["status"] != "refused", command
    assert {item.name for item in own.rglob("*")} & {*closed} == set()
    after = snapshot(log_dir)
    for partition in closed:
        assert {name: data for name, data in after.items() if name.startswith(f"{partition}/")} == {
            name: data for name, data in before.items() if name.startswith(f"{partition}/")
        }


@pytest.mark.parametrize("name", ["replication-offset-checkpoint", "recovery-point-offset-checkpoint"])
def test_an_unreadable_checkpoint_is_the_only_reported_reason(home: Path, name: str) -> None:
    log_dir = home / "logs"
    (log_dir / name).chmod(0)
    given = ("--log-dirs", log_dir, "--output", "json")
    for command in (("plan", *given, *COMPACT), ("salvage", *given, "--to", home / "own" / "saved", "--execute")):
        for row in json.loads(keytail(*command).stdout):
            assert row["status"] == "refused"
            assert row["error"].count("[") == row["error"].count("[permission-denied]") == 1, row["error"]
            assert "--high-watermark" not in row["error"]
    [of_log_dir, *others] = json.loads(keytail("verify", *given).stdout)
    assert (of_log_dir["topic"], of_log_dir["status"]) == (None, "refused")
    assert "[permission-denied]" in of_log_dir["error"]
    assert {row["status"] for row in others} == {"sound"}


def test_plan_counts_the_files_of_another_user_and_doctor_names_the_first(home: Path) -> None:
    log_dir = home / "logs"
    for file in sorted((log_dir / "orders-0").glob("*.index")):
        os.chown(file, OTHER, OTHER)
        file.chmod(0o600)
    [row, other] = json.loads(keytail("plan", "--log-dirs", log_dir, *COMPACT, "--output", "json").stdout)
    assert (row["status"], other["status"]) == ("refused", "would-compact")
    assert "4 files of the partition cannot be read" in row["error"]
    assert f"{0:020d}.index" in row["error"]
    found = _access_check(log_dir)
    assert found["status"] == "fail"
    assert "cannot read 4 files in 1 partitions" in found["found"]
    assert f"{log_dir}/orders-0/{0:020d}.index" in found["found"]
    assert "chown, chmod" in found["remedy"]
    give(log_dir, BROKER)
    assert _access_check(log_dir)["status"] == "ok"


def _access_check(log_dir: Path) -> dict[str, str]:
    rows = json.loads(keytail("doctor", "--log-dirs", log_dir, "--output", "json").stdout)
    return next(row for row in rows if row["check"] == f"{log_dir}: access")


def test_a_plan_and_a_run_refuse_files_of_a_group_that_the_user_is_not_in(home: Path) -> None:
    log_dir = home / "logs"
    for item in (log_dir / "orders-0", *(log_dir / "orders-0").iterdir()):
        os.chown(item, BROKER, OTHER)
        item.chmod(0o755)
    for flags in ((), ("--execute",)):
        done = keytail("compact", "--log-dirs", log_dir, *COMPACT, *flags, "--output", "json")
        [row, _] = json.loads(done.stdout)
        assert row["status"] == "refused"
        assert f"works as user id {BROKER}, which is not in the group id {OTHER} of the files" in row["error"]
        assert "chgrp" in row["error"] and "usermod -aG" in row["error"] and "or root" not in row["error"]
        assert "[files-of-another-group]" in row["error"]


def test_read_only_commands_report_files_that_they_may_not_read(home: Path) -> None:
    log_dir = home / "logs"
    (log_dir / "orders-0" / CLOSED[0]).chmod(0)
    described = keytail("describe", "--log-dirs", log_dir, *COMPACT)
    assert "unreadable" in described.stdout
    [row, _] = json.loads(keytail("lookup", "--log-dirs", log_dir, "--offset", "5", "--output", "json").stdout)
    assert (row["status"], row["slugs"]) == ("refused", ["permission-denied"])
    assert "keytail verify" not in row["error"]


def test_the_error_for_an_unreadable_settings_file_names_its_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UsageProblem, match="Run as a user that may read the file"):
        read_configuration(config=str(tmp_path / "server.properties"))
