"""The command line in a fork of the process of the tests: everything that a process of its own has, except the start of
Python and the imports, which take a second. Spark cannot be started in it."""

from __future__ import annotations

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

from keytail import telling
from keytail.app.cli import main

CLOSED = "closed"


def keytail(
    *arguments: str | Path, streams: Mapping[int, int | str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`streams`: a standard descriptor to the path or descriptor that it leads to, or CLOSED; others are captured."""
    words = list(map(str, arguments))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _be_the_command_line(words, {0: os.devnull, 1: out.fileno(), 2: err.fileno()} | dict(streams or {}), variables)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), *texts)


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
        logging.getLogger().handlers.clear()  # pytest's
        telling.speak(telling.Manner())
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
    """As Python opens it when it starts: None where the descriptor is closed."""
    return None if streams[fd] == CLOSED else open(fd, mode, buffering=1 if fd == 2 else -1, closefd=False)
