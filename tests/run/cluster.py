"""A standalone Spark cluster of two workers on this machine, for tests of behaviour that only a cluster has.

Master and workers are separate processes, with one core each, started from the Spark of the installed pyspark. They
listen only on the loopback address. The workers use different names for it, because Spark runs no speculative copy
of a task on the host of its first attempt. The second worker has its own mounts and host name if the system allows a
test to create such namespaces; a path can then have other contents there (`Cluster.elsewhere`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

import keytail
from keytail.run.spark.java import require_java
from tests.class_archives import java_options, submit_options
from tests.ports import free_ports

SPARK_HOME = Path(pyspark.__file__).parent
ROOT = Path(__file__).parents[2]
PACKAGES = Path(keytail.__file__).parents[1]
HOSTS = ("127.0.0.1", "localhost")
LONGEST_START_S = 600.0
# The host name of the second worker.
ELSEWHERE = "elsewhere"
EXECUTOR = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
}
# As in conf/spark-defaults.conf; each cluster adds a secret.
SECURE = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
}
# Users other than root are root in a user namespace of their own.
_AS_ROOT = ["--user", "--map-root-user"] if os.geteuid() else []
_APART = ["unshare", *_AS_ROOT, "--mount", "--propagation", "private", "--uts"]


def _executor() -> dict[str, str]:
    return {**EXECUTOR, "spark.executor.extraJavaOptions": java_options()}


@dataclass
class Cluster:
    """A cluster. `url` is its --master; `work_dir` contains the files that its processes write."""

    work_dir: Path
    port: int
    ui_port: int
    namespaces: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def elsewhere(self, log_dir: Path, seen: Path) -> None:
        """Replace `log_dir` with `seen` for the second worker, and for all processes that it starts from now on."""
        assert self.namespaces
        inside = ["nsenter", *_AS_ROOT[:1], "--mount", "--target", str(self.processes[-1].pid)]
        subprocess.run([*inside, "mount", "--bind", str(seen), str(log_dir)], check=True)

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def environment(self, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a driver; `settings` are those of a spark-defaults.conf."""
        conf = self._conf("driver", {**_executor(), **self._secure, **(settings or {})})
        arguments = f"--properties-file {conf} pyspark-shell"
        return self._environment() | {"PYSPARK_SUBMIT_ARGS": arguments, "SPARK_SUBMIT_OPTS": submit_options()}

    @property
    def _secure(self) -> dict[str, str]:
        return {**SECURE, "spark.authenticate.secret": self.secret}

    def _conf(self, name: str, settings: Mapping[str, str]) -> Path:
        """Write a file that replaces spark-defaults.conf, without empty settings, and return its path.

        A folder for SPARK_CONF_DIR would be on the class path, and no JVM could then use the archive of its classes.
        """
        conf = self.work_dir / f"{name}.conf"
        conf.touch(mode=0o600)
        conf.write_text("".join(f"{key} {value}\n" for key, value in settings.items() if value))
        return conf

    def executors(self) -> list[int]:
        """Return the process ids of the executors' JVMs that are running."""
        workers = {process.pid for process in self.processes}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                words = (folder / "cmdline").read_bytes()
                if int(fields[1]) in workers and fields[0] not in "ZX" and b"ExecutorBackend" in words:
                    found.append(int(folder.name))
        return found

    def _environment(self) -> dict[str, str]:
        """Return the environment of the workers, which executors inherit so that their Python finds the tests."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
        return clean | {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.work_dir / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": java_options(),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(PACKAGES))),
        }

    def _start(self, name: str, *arguments: str, apart: bool = False) -> None:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}",
                   "--properties-file", str(self._conf("daemons", self._secure)), *arguments[1:]]  # fmt: skip
        if apart:
            command = [*_APART, "sh", "-c", f'hostname {ELSEWHERE} && exec "$@"', "sh", *command]
        with (self.work_dir / f"{name}.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.work_dir,
                start_new_session=True,
            )
        self.processes.append(process)

    def start(self) -> None:
        self._start("master", "master.Master", "--host", HOSTS[0], "--port", str(self.port),
                    "--webui-port", str(self.ui_port))  # fmt: skip
        for number, host in enumerate(HOSTS):
            work_dir = str(self.work_dir / f"worker-{number}")
            self._start(f"worker-{number}", "worker.Worker", "--host", host, "--cores", "1", "--memory", "1g",
                        "--webui-port", "0", "--work-dir", work_dir, self.url,
                        apart=self.namespaces and number == len(HOSTS) - 1)  # fmt: skip
        last_s = time.monotonic() + LONGEST_START_S
        while self._alive_workers() < len(HOSTS):
            logs = "\n".join(log.read_text()[-2000:] for log in self.work_dir.glob("*.txt"))
            assert all(process.poll() is None for process in self.processes), f"the cluster did not start: {logs}"
            assert time.monotonic() < last_s, f"the cluster does not start: {logs}"
            time.sleep(0.1)

    def _alive_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ui_port}/json/", timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError, KeyError):
            return 0

    def stop(self) -> None:
        """Kill all processes; executors are in their worker's process group."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def cluster(work_dir: Path) -> Iterator[Cluster]:
    """Yield a started cluster; stop it afterwards."""
    work_dir.mkdir(parents=True, exist_ok=True)
    made = Cluster(work_dir, *free_ports(2), namespaces=may_unshare())
    try:
        require_java()
        made.start()
        yield made
    finally:
        made.stop()


def may_unshare() -> bool:
    """Return whether this process may give another process its own mounts and host name."""
    with contextlib.suppress(OSError):
        return subprocess.run([*_APART, "hostname", ELSEWHERE], capture_output=True, check=False).returncode == 0
    return False
