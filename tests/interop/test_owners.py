"""Compaction of log dirs of a broker that runs as another user. A run of root works as the broker's user, and the
broker starts on the result; any other user is refused before the first write, with the user to run as. These tests
require root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import from_wire
from tests.interop.broker_story import complaints, keytail, latest_by_key, repairs, start_client
from tests.log_dirs import random_records, write_log_dir
from tests.owned import BROKER, OTHER, ROOT_ONLY, give

pytestmark = [
    pytest.mark.interop,
    ROOT_ONLY,
]

# The interpreter may be readable by root only, so a dry run imports everything before root privileges are dropped.
AS_ANOTHER = """
import json, os, sys
from typer.testing import CliRunner
from keytail.main.main import app
uid, commands = int(sys.argv[1]), json.loads(sys.argv[2])
runner = CliRunner()
for command in commands[:: len(commands) // 2]:
    runner.invoke(app, [word for word in command if word != "--execute"])
import keytail.compact.execution, keytail.rebuild_index.tasks, pwd, grp
os.setgroups([]); os.setgid(uid); os.setuid(uid)
done = [runner.invoke(app, command) for command in commands]
print(json.dumps([[one.exit_code, f'{one.output}{one.exception!r}'] for one in done]))
"""


def run_as(uid: int, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Return the exit status of each command and its output."""
    command = [sys.executable, "-c", AS_ANOTHER, str(uid), json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(status, text) for status, text in json.loads(done.stdout)]


def owners(path: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(item.relative_to(path)): (item.stat().st_uid, item.stat().st_gid, item.stat().st_mode & 0o777)
        for item in [path, *path.rglob("*")]
    }


def everything(path: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return the metadata of all files and directories; times of directories change even if a file is created and
    removed.
    """
    found = {str(item): item.stat() for item in [path, *path.rglob("*")]}
    return {name: (facts.st_mtime_ns, facts.st_ino, facts.st_uid, facts.st_size) for name, facts in found.items()}


@pytest.fixture
def open_dir(fast_dir: Path) -> Path:
    """Yield a directory that other users can enter, unlike those of pytest."""
    fast_dir.chmod(0o755)
    return fast_dir


@pytest.mark.one_of("a broker starts after another command")
def test_a_broker_of_another_user_starts_after_a_compaction_by_root(open_dir: Path) -> None:
    log_dir = golden.unpack(open_dir)
    give(log_dir, BROKER)
    given = ("--log-dirs", log_dir, "--config", log_dir.parent / "server.properties", *golden.topic_config_arguments())
    rows = keytail("compact", *given, "--topic-list", "zstd,none,transactional", "--execute")
    assert {row["status"] for row in rows} == {"compacted"}
    right = {(BROKER, BROKER, 0o750), (BROKER, BROKER, 0o640)}
    assert {name: owner for name, owner in owners(log_dir).items() if owner not in right} == {}
    work = open_dir / "work"
    work.mkdir()
    os.chown(work, BROKER, BROKER)
    broker = Broker(log_dir, work, uid=BROKER)
    partitions = [(row["topic"], row["partition"]) for row in rows]
    with start_client() as client, broker:
        client.connect(broker)
        served = client.consume(partitions)
        assert client.produce("new", "zstd", 0, [(1, b"k", b"v")])
    before = [from_wire(row) for row in golden.record_rows() if (row[0], row[1]) in partitions]
    newest, newest_before = latest_by_key(served), latest_by_key(before)
    kept = {key: item for key, item in newest_before.items() if item.value is not None}
    assert {key: newest.get(key) for key in kept} == kept
    assert complaints(broker.log_lines()) == []
    assert repairs(broker.log_lines()) == []


def test_another_user_is_refused_before_the_first_write(open_dir: Path) -> None:
    commands, what = [], []
    for command in ("compact", "rebuild-index"):
        for mode in (0o755, 0o777):
            for has_lock in (False, True):
                log_dir = open_dir / f"logs-{len(commands)}"
                write_log_dir(log_dir, {"orders-0": random_records(1, 400)})
                next((log_dir / "orders-0").glob("*.index")).unlink()
                if has_lock:
                    (log_dir / ".lock").touch()
                give(log_dir, BROKER, mode)
                policy = ["--topic-config", "orders:cleanup.policy=compact", "--topics-have-no-overrides"]
                policy = policy if command == "compact" else []
                commands.append([command, "--log-dirs", str(log_dir), *policy, "--output", "json", "--execute"])
                what.append((command, mode, has_lock))
    before = everything(open_dir)
    for (status, message), case in zip(run_as(OTHER, commands), what, strict=True):
        assert status == 1, (case, message)
        assert f"Run as user id {BROKER}" in message, (case, message)
    assert everything(open_dir) == before
