"""A NameNode and a DataNode of HDFS in separate processes, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from keytail.run.spark.stores import hadoop_version
from tests.interop.broker import JVM_FLAGS, tool
from tests.interop.kafka import TARGET, compiling, fetched_jars
from tests.ports import free_ports

_START_LIMIT_S = 300
_STATE = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
_CLASSES = {"namenode": "namenode.NameNode", "datanode": "datanode.DataNode"}


class Hdfs:
    """Starts and stops the processes; the NameNode keeps its ports and its files."""

    def __init__(self, folder: Path) -> None:
        self.port, self._http_port = free_ports(2)
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        version = hadoop_version()
        with compiling():
            jars = fetched_jars(Path(__file__).with_name("hdfs.xml"), TARGET / f"hadoop-{version}" / "jars", version)
        self._class_path = os.pathsep.join(map(str, sorted(jars.glob("*.jar"))))

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        settings = {
            "fs.defaultFS": f"hdfs://127.0.0.1:{self.port}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http_port}",
            "dfs.namenode.name.dir": f"file://{self._folder}/namenode",
            "dfs.namenode.safemode.extension": "0",
            "dfs.datanode.data.dir": f"file://{self._folder}/datanode",
            "dfs.replication": "1",
            **{f"dfs.datanode.{kind}address": "127.0.0.1:0" for kind in ("", "http.", "ipc.")},
        }
        command = [
            *(tool("java"), "-Xmx256m", *JVM_FLAGS, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
            *("-cp", self._class_path, f"org.apache.hadoop.hdfs.server.{_CLASSES[name]}"),
            *(word for key, value in settings.items() for word in ("-D", f"{key}={value}")),
        ]
        with self._output(name).open("ab") as output:
            self._running[name] = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
        return self._running[name]

    def stop(self, name: str) -> None:
        self._running[name].kill()
        self._running.pop(name).wait()

    def wait_until_ready(self) -> None:
        """Wait until the DataNode has registered and the NameNode allows writing."""
        give_up = time.monotonic() + _START_LIMIT_S
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/{_STATE}") as response,
            ):
                state = response.read().decode()
                if '"NumLiveDataNodes" : 1' in state and '"FSState" : "Operational"' in state:
                    return
            for name, process in self._running.items():
                assert process.poll() is None, f"the {name} has ended: {self._output(name).read_text()[-2000:]}"
            assert time.monotonic() < give_up, "HDFS does not start"
            time.sleep(0.1)

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.out"


@contextlib.contextmanager
def hdfs_server() -> Iterator[Hdfs]:
    with tempfile.TemporaryDirectory() as folder:
        server = Hdfs(Path(folder))
        try:
            assert server.start("namenode", "-format", "-nonInteractive").wait() == 0
            server.start("namenode")
            server.start("datanode")
            server.wait_until_ready()
            yield server
        finally:
            server.close()
