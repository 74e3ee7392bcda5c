"""Real runs, each in a separate session. One process of a run, or all of them, are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.compact.test_command import KEYTAIL
from tests.run.test_submit import JOB, ROOT, SUBMIT

LONGEST_S = 600.0


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str


@dataclass
class Run:
    """A `keytail` or `spark-submit` process, with all processes that it starts. They share its session, but not its
    group.
    """

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def members(self) -> list[Process]:
        """Return the running processes."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(Process(int(folder.name), int(fields[1]), command))
        return found

    def jvm(self) -> int:
        return next(item.pid for item in self.members() if "org.apache.spark.deploy.SparkSubmit" in item.command)

    def driver(self) -> int:
        """Return the Python process that runs the command."""
        found = [
            item.pid
            for item in self.members()
            if item.command.partition(" ")[0].rpartition("/")[2].startswith("py")
            and "pyspark.daemon" not in item.command
            and ("keytail" in item.command or "jobs/" in item.command)
        ]
        return max(found)

    def workers(self) -> list[int]:
        """Return the Python workers: a daemon forks them, so that they have its command line."""
        daemons = [item for item in self.members() if "pyspark.daemon" in item.command]
        return [item.pid for item in daemons if item.parent in {other.pid for other in daemons}]

    def wait(self, there: Callable[[], object]) -> bool:
        """Wait until the condition is true or the run has ended, and return whether it was true during the run."""
        last_s = time.monotonic() + LONGEST_S
        while not there():
            assert time.monotonic() < last_s, f"the condition did not become true: {self.error_text()}"
            if self.has_ended:
                return False
            time.sleep(0.002)
        return True

    def end(self) -> int:
        """Wait until all processes have ended, and return the exit status."""
        status = self.process.wait(timeout=LONGEST_S)
        last_s = time.monotonic() + 60
        while left := self.members():
            assert time.monotonic() < last_s, f"processes of the run are still running: {left}"
            time.sleep(0.02)
        return status

    def error_text(self) -> str:
        return self.errors.read_text(errors="replace")[-4000:]

    def kill_all(self) -> None:
        """Kill the process group, then, by id, the processes of the session that are in other groups."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for item in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(item.pid, signal.SIGKILL)
        self.process.wait()


def start(flags: Sequence[str], work_dir: Path, *, submitted: bool = False, name: str = "compact") -> Run:
    """Start a run on two cores, and return it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if submitted:
        command = [str(SUBMIT), "--master", "local[2]", str(JOB), *flags]
    else:
        command = [str(KEYTAIL), name, *flags, "--master", "local[2]"]
    work_dir.mkdir(parents=True, exist_ok=True)
    output, errors = work_dir / "stdout", work_dir / "stderr"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
    return Run(process, output, errors)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def has_open(pid: int, directory: Path) -> bool:
    """Return whether a process has a file below `directory` open."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(f"{directory}{os.sep}"):
                    return True
    return False
