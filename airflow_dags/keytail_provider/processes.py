"""The process of a command: its input, its output as it arrives, and its end. ssh.py defines the process of a command
on another host."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Protocol


class NotStarted(Exception):
    """The process could not be started; `status` is the exit status of a shell or ssh(1) in this case."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Process(Protocol):
    """A process whose standard output is written to a file, and whose standard error is read; or both are read."""

    def write(self, data: bytes) -> None: ...
    def close_input(self) -> None: ...
    def read(self, timeout_s: float) -> bytes | None:
        """Return output; None if there is no output within this time; b"" if there will be no more output."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""

    def kill(self) -> None: ...
    def close(self) -> None: ...


class Local:
    """A process of this host, with a process group of its own."""

    def __init__(self, words: Sequence[str], output: IO[bytes] | None) -> None:
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as problem:  # a program of a prefix, or this host has no shell
            raise NotStarted(127, f"{words[0]}: {problem.strerror}") from None
        stream = self._process.stderr or self._process.stdout
        assert stream is not None and self._process.stdin is not None
        self._stream, self._input = stream, self._process.stdin

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the process has ended already; its status shows why
            self._input.write(data)
            self._input.flush()

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def read(self, timeout_s: float) -> bytes | None:
        ready, _, _ = select.select([self._stream], [], [], timeout_s)
        return os.read(self._stream.fileno(), 1 << 16) if ready else None

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.close_input()
        self._stream.close()
