"""Commands that root starts on log dirs of another user work as that user.

Root's rights are used only for paths that the caller named outside the log dirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from keytail import acting_user
from keytail.errors import Refused, UsageProblem
from keytail.log.fs import FileSystem
from keytail.log.owner import work_as_owner
from tests import owned
from tests.cli.forked import keytail
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.owned import (
    BROKER,
    OTHER,
    ROOT_ONLY,
    foreign,
    give,
    ids_as,
    ids_of,
    open_directory,
    private_directory,
    python,
)

pytestmark = ROOT_ONLY

NOTE = f"started as root; working as user id {BROKER}, the owner of"
COMPACT = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
EXPIRE = ("--topics-have-no-overrides", "--now", "1800000000000")
LONGEST_S = 120


@dataclass
class Case:
    """A log dir of the broker's user, a directory that only root can access, and one that the broker's user can write
    to.
    """

    home: Path
    log_dir: Path
    private: Path
    own: Path

    def secret(self) -> Path:
        path = self.private / "secret"
        path.write_text("KNOWN-TO-ROOT\n")
        path.chmod(0o600)
        return path


@pytest.fixture
def case() -> Iterator[Case]:
    with open_directory() as home:
        partitions = {f"orders-{n}": random_records(n, 400) for n in range(2)}
        log_dir = write_log_dir(home / "logs", partitions)
        give(log_dir, BROKER)
        own = home / "own"
        own.mkdir()
        give(own, BROKER)
        private = private_directory(home / "private")
        (private / "server.properties").write_text("log.cleaner.delete.retention.ms=1000\n")
        yield Case(home, log_dir, private, own)


def until(is_true: Callable[[], object], what: str) -> None:
    last_s = time.monotonic() + LONGEST_S
    while not is_true():
        assert time.monotonic() < last_s, what
        time.sleep(0.02)


@pytest.mark.long
def test_commands_work_as_the_owner_and_write_to_a_directory_that_only_root_can_write(case: Case) -> None:
    (case.log_dir / "orders-0" / "00000000000000000000.index").unlink()
    given = ("--log-dirs", case.log_dir)
    config = ("--config", case.private / "server.properties")

    def files(name: str) -> tuple[str | Path, ...]:
        flags = ("--report", "--rows-file", "--quarantine-report")
        return tuple(word for flag in flags for word in (flag, case.private / f"{name}{flag}"))

    backup = case.own / "backup"
    runs: list[tuple[str | Path, ...]] = [
        ("rebuild-index", *given, *config, "--execute", *files("rebuild-index")),
        ("plan", *given, *config, *COMPACT, "--report", case.private / "plan--report"),
        ("compact", *given, *config, *COMPACT, "--keep-originals", backup, "--execute", *files("compact")),
        ("verify", *given, *config, *files("verify")),
        ("describe", *given, *config, *COMPACT),
        ("lookup", *given, *config, "--offset", "5"),
        ("dump", case.log_dir / "orders-0" / "leader-epoch-checkpoint"),
        ("doctor", *given),
        ("salvage", *given, *config, "--to", case.own / "saved", "--execute"),
        ("audit", "--replica", case.log_dir, "--replica", case.own / "saved", "--report", case.private / "audit"),
    ]
    for command in runs:
        # Two of the commands run in a new interpreter, which loads modules while it works as the owner.
        done = (owned.keytail if command[0] in ("compact", "verify") else keytail)(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert done.stderr.count(NOTE) == 1, (command, done.stderr)
    for name in ("rebuild-index", "compact", "verify"):
        assert json.loads((case.private / f"{name}--rows-file").read_text())
        assert "<html" in (case.private / f"{name}--report").read_text()
    [run_id] = {item.name for item in backup.iterdir()}
    undone = keytail("undo", "--originals", backup, "--run", run_id, "--execute")
    assert (undone.returncode, undone.stderr.count(NOTE)) == (0, 1), undone.stderr
    expired = keytail("expire", *given, *config, *EXPIRE, "--execute", "--unsafe-clock")
    assert NOTE in expired.stderr
    forgotten = keytail("undo", "--originals", backup, "--run", run_id, "--forget", "--execute")
    assert forgotten.returncode == 0, forgotten.stderr
    assert not (backup / run_id).exists()
    assert foreign(case.log_dir, BROKER) == foreign(case.own, BROKER) == []
    assert foreign(case.private, 0) == []


@pytest.mark.long
def test_a_ledger_is_written_to_a_directory_that_only_root_can_write(case: Case) -> None:
    """In this test, threads of the deltalake package write the ledger; in run/test_owner.py, Spark does."""
    flags = ("--log-dirs", case.log_dir, "--execute", "--ledger", case.private / "ledger")
    for command in (("rebuild-index", *flags), ("compact", *COMPACT, *flags), ("compact", *COMPACT, *flags)):
        done = owned.keytail(*command)
        assert done.returncode == 0, done.stderr
        assert "Spark" not in done.stderr.replace("running without Spark", "")
    reported = owned.keytail("history", "--ledger", case.private / "ledger", "--output", "json")
    assert [run["status"] for run in json.loads(reported.stdout)] == ["done"] * 3
    assert foreign(case.log_dir, BROKER) == []
    assert foreign(case.private, 0) == []


def test_the_files_in_an_output_dir_belong_to_the_owner(case: Case) -> None:
    done = keytail("compact", "--log-dirs", case.log_dir, *COMPACT, "--output-dir", case.own / "copy", "--execute")
    assert done.returncode == 0, done.stderr
    assert (case.own / "copy" / "orders-0").is_dir()
    assert foreign(case.own, BROKER) == []


def test_directories_that_the_owner_cannot_write_are_refused_before_any_work(case: Case) -> None:
    before = snapshot(case.home)
    given = ("--log-dirs", case.log_dir)
    (case.home / "of-root").mkdir(mode=0o755)
    for directory in (case.private, case.home / "of-root"):
        for command in (
            ("compact", *given, *COMPACT, "--keep-originals", directory / "kept", "--execute"),
            ("compact", *given, *COMPACT, "--output-dir", directory / "copy", "--execute"),
            ("salvage", *given, "--to", directory / "saved", "--execute"),
        ):
            done = keytail(*command)
            assert done.returncode == 1, (command, done.stderr)
            assert f"user id {BROKER} cannot write to the directory of --" in done.stderr
            assert f"({directory})" in done.stderr
            assert "chown" in done.stderr
    assert snapshot(case.home) == before


def test_symbolic_links_of_the_owner_are_not_followed(case: Case) -> None:
    secret = case.secret()
    (case.log_dir / "cleaner-offset-checkpoint").symlink_to(secret)
    partition = case.log_dir / "orders-0"
    for name in ("leader-epoch-checkpoint", "00000000000000000000.log"):
        (partition / name).unlink()
        (partition / name).symlink_to(secret)
    give(case.log_dir, BROKER)
    given = ("--log-dirs", case.log_dir, "--output", "json")
    for command in (
        ("plan", *given, *COMPACT),
        ("compact", *given, *COMPACT, "--execute"),
        ("verify", *given),
        ("describe", *given, *COMPACT),
        ("rebuild-index", *given, "--execute"),
        ("dump", partition / "leader-epoch-checkpoint"),
        ("dump", partition / "00000000000000000000.log", "--print-data-log"),
    ):
        done = keytail(*command)
        assert "KNOWN-TO-ROOT" not in done.stdout + done.stderr, command
        assert NOTE in done.stderr
    assert secret.read_text() == "KNOWN-TO-ROOT\n"
    assert secret.stat().st_uid == 0


def test_several_owners_are_refused(case: Case) -> None:
    other = write_log_dir(case.home / "other", {"orders-0": random_records(1, 100)})
    give(other, OTHER)
    mixed = write_log_dir(case.home / "mixed", {"orders-0": random_records(1, 100), "users-0": random_records(2, 100)})
    give(mixed / "users-0", BROKER)
    for arguments in (
        ("verify", "--log-dirs", f"{case.log_dir},{other}"),
        ("verify", "--log-dirs", mixed),
        ("audit", "--replica", case.log_dir, "--replica", other),
        ("plan", "--log-dirs", case.log_dir, *COMPACT, "--replica", other),
    ):
        done = keytail(*arguments)
        assert done.returncode == 1, (arguments, done.stderr)
        assert "Run keytail once for each owner" in done.stderr
        assert "keytail works as the owner of the log dirs, which must be the same user" in done.stderr


def test_a_log_dir_of_root_with_partitions_of_another_user_is_processed_as_that_user(case: Case) -> None:
    os.chown(case.log_dir, 0, 0)
    case.log_dir.chmod(0o755)
    done = keytail("verify", "--log-dirs", case.log_dir)
    assert done.returncode == 0, done.stderr
    assert NOTE in done.stderr


def test_a_log_dir_that_its_owner_cannot_reach_is_refused(case: Case) -> None:
    moved = case.private / "logs"
    case.log_dir.rename(moved)
    done = keytail("verify", "--log-dirs", moved)
    assert done.returncode == 1
    assert f"user id {BROKER} cannot read this directory ({moved})" in done.stderr


def test_a_partition_of_root_in_the_owners_log_dir_is_refused_with_a_remedy(case: Case) -> None:
    partition = case.log_dir / "orders-1"
    for item in (partition, *partition.iterdir()):
        os.chown(item, 0, 0)
        item.chmod(0o755)
    done = keytail("compact", "--log-dirs", case.log_dir, *COMPACT, "--execute", "--output", "json")
    assert done.returncode == 3, done.stderr
    [_, refused] = json.loads(done.stdout)
    assert refused["status"] == "refused"
    why = f"keytail was started as root and works as user id {BROKER}, but the files belong to user root"
    assert why in refused["error"]


def test_a_log_dir_of_root_is_processed_as_root(case: Case) -> None:
    give(case.log_dir, 0)
    done = keytail("verify", "--log-dirs", case.log_dir)
    assert done.returncode == 0
    assert "started as root" not in done.stderr


TASKS = """
import json, os, sys
from pathlib import Path
from keytail.acting_user import as_caller
from keytail.log.fs import LOCAL
from keytail.log.owner import work_as_owner
from keytail.run.processes import Processes
def task(path, attempt):
    with as_caller():
        as_root = Path(path).read_text()
    try:
        as_owner = Path(path).read_text()
    except PermissionError:
        as_owner = None
    return Path("/proc/self/status").read_text(), as_root, as_owner
work_as_owner(LOCAL, [sys.argv[1]])
with Processes(2) as workers:
    found = [one.value for one in workers.run_bundle([sys.argv[2]] * 3, task)]
print(json.dumps([Path("/proc/self/status").read_text(), found]))
"""


def test_processes_work_as_the_owner(case: Case) -> None:
    driver, found = python(TASKS, case.log_dir, case.secret())
    assert ids_of(driver) == ids_as(BROKER)
    for status, as_root, as_owner in found:
        assert ids_of(status) == ids_as(BROKER)
        assert (as_root, as_owner) == ("KNOWN-TO-ROOT\n", None)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread may have ended
            for child in listing.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.long
def test_workers_of_a_compaction_run_as_the_owner_and_end_with_a_killed_driver(case: Case) -> None:
    write_log_dir(case.home / "more", {"orders-0": random_records(7, 5_000)})
    give(case.home / "more", BROKER)
    command = [sys.executable, "-m", "keytail", "compact", "--log-dirs", str(case.home / "more"), *COMPACT]
    run = subprocess.Popen([*command, "--execute", "--throttle", "40k"], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(descendants(run.pid)) >= 2 or run.poll() is not None, "no task began")
        workers = descendants(run.pid)
        assert len(workers) >= 2, "the run ended too early"
        for pid in (run.pid, *workers):
            ids = ids_of(Path(f"/proc/{pid}/status").read_text())
            # The fourth of the ids, that of file access, is root's while the thread imports modules.
            assert (ids["Uid"][:3], ids["Gid"][:3], ids["Groups"]) == ([0, BROKER, 0], [0, BROKER, 0], [BROKER])
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    until(lambda: not any(map(is_there, workers)), "workers outlive the driver")


@pytest.mark.long
def test_numba_reads_no_settings_from_the_owners_directory(case: Case) -> None:
    """Numba looks for a settings file in the current directory; with the key chrome_trace, it writes that file when the
    process ends.
    """
    secret = case.secret()
    (case.log_dir / ".numba_config.yaml").write_text(f"chrome_trace: {secret}\ndisable_jit: 1\n")
    command = [sys.executable, "-m", "keytail", "verify", "--log-dirs", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=case.log_dir)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert secret.read_text() == "KNOWN-TO-ROOT\n"


def test_a_backup_of_another_user_changes_nothing_in_a_log_dir_of_root(case: Case) -> None:
    """The owner of a backup can edit what its manifest states about the log dir."""
    backup = case.home / "backup"
    backup.mkdir()
    done = keytail("compact", "--log-dirs", case.log_dir, *COMPACT, "--keep-originals", case.own, "--execute")
    assert done.returncode == 0, done.stderr
    [run] = [path for path in case.own.iterdir() if path.is_dir()]
    run.rename(backup / run.name)
    give(case.log_dir, 0, 0o755)
    before = snapshot(case.log_dir)
    done = keytail("undo", "--originals", backup, "--run", run.name, "--execute")
    assert done.returncode != 0
    assert "which must be the same user for all" in done.stderr, done.stderr
    assert snapshot(case.log_dir) == before


def test_a_directory_of_root_with_partitions_of_the_broker_is_processed_as_the_broker(case: Case) -> None:
    """The directory can be a mount point that the broker's group can write to; keytail's files belong to the broker."""
    os.chown(case.log_dir, 0, BROKER)
    case.log_dir.chmod(0o775)
    os.chown(case.log_dir / "replication-offset-checkpoint", 0, BROKER)
    done = keytail("compact", "--log-dirs", case.log_dir, *COMPACT, "--execute", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert NOTE in done.stderr
    assert (case.log_dir / "cleaner-offset-checkpoint").stat().st_uid == BROKER


def test_a_log_dir_that_is_missing_when_its_owner_is_determined_ends_the_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory could reappear immediately, and would then be processed as root."""
    away = case.home / "away"
    looks = iter(range(100))

    class Vanishing(FileSystem):
        def stat(self, path):
            if path == str(case.log_dir) and next(looks) < 2:
                raise FileNotFoundError(2, "No such file or directory", path)
            return super().stat(path)

    assert not away.exists()
    with pytest.raises(UsageProblem, match="no such log dir"):
        work_as_owner(Vanishing(), [str(case.log_dir)])
    acting_user.give_back()


def test_a_log_dir_whose_owner_changes_while_it_is_determined_is_refused(case: Case) -> None:
    looks = iter(range(100))

    class Changing(FileSystem):
        def stat(self, path):
            found = super().stat(path)
            return replace(found, uid=BROKER + 1) if path == str(case.log_dir) and next(looks) < 1 else found

    with pytest.raises(Refused, match=r"the owner of the log dir changed"):
        work_as_owner(Changing(), [str(case.log_dir)])
    acting_user.give_back()
