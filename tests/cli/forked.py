"""Runs the command line in a fork of the test process: a separate process that does not spend a second on imports.

Spark cannot be started in it, and `history` and `report --ledger` cannot run in it, because deltalake's runtime does
not survive a fork.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from keytail import console
from keytail.main.main import app, main
from tests.log_dirs import random_records, write_log_dir
from tests.no_spark import without_spark

CLOSED = "closed"


def keytail(
    *arguments: str | Path, streams: Mapping[int, int | str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line, and return its result. `streams` maps standard descriptors to paths, descriptors or CLOSED;
    other streams are captured.
    """
    words = list(map(str, arguments))
    _load_kernels()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            captured: dict[int, int | str] = {0: os.devnull, 1: out.fileno(), 2: err.fileno()}
            _be_the_command_line(words, captured | dict(streams or {}), variables)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), *texts)


@functools.cache
def _load_kernels() -> None:
    """Load the kernels once in this process, so that each fork and each of its workers has them."""
    with tempfile.TemporaryDirectory() as folder, without_spark():
        log_dir = write_log_dir(Path(folder) / "logs", {"orders-0": random_records(0, 100)})
        config = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
        for command in (("compact", *config, "--execute"), ("verify",)):
            CliRunner().invoke(app, [*command, "--log-dirs", str(log_dir)])


def _be_the_command_line(words: list[str], streams: Mapping[int, int | str], variables: Mapping[str, str]) -> None:
    status = 1
    try:
        for fd, target in streams.items():
            if target == CLOSED:
                os.close(fd)
            else:
                os.dup2(os.open(target, os.O_RDWR) if isinstance(target, str) else target, fd)
        sys.stdin, sys.stdout, sys.stderr = (_stream(fd, "w" if fd else "r", streams) for fd in range(3))
        os.environ.update(variables)
        for name in [name for name in os.environ if name.startswith(("PYSPARK_", "SPARK_"))]:
            del os.environ[name]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger().handlers.clear()  # removes the handlers of pytest
        console.set_output_style(console.OutputStyle())
        main(words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)


def _stream(fd: int, mode: str, streams: Mapping[int, int | str]) -> Any:
    """Return a stream as Python opens it at its start, or None if the descriptor is closed."""
    return None if streams[fd] == CLOSED else open(fd, mode, buffering=1 if fd == 2 else -1, closefd=False)
