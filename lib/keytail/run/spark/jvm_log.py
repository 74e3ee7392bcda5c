"""Filters the output of Spark's JVM: omits lines that every healthy start prints, and all output once a stop has begun.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from keytail.run.ended import HELD_BACK_S

# Lines that a healthy start prints on standard error before any logging configuration is read, and the output of
# Delta's VACUUM.
_START_NOISE = re.compile(
    rb"WARNING: Using incubator modules|Picked up (_?JAVA|JDK_JAVA)_|Using Spark's default log4j|"
    rb"Setting default log level|To adjust logging level use|Deleted \d+ files and directories in a total of"
)


class JvmLog:
    """The output of one JVM. After a call of `silence`, no more output is passed on."""

    def __init__(self) -> None:
        self.withheld: list[bytes] = []
        self._silenced = threading.Event()
        self._also: re.Pattern[bytes] | None = None

    def silence(self) -> None:
        """Discard all further output. Called when a stop begins: then cancelled work and the shutdown print long
        messages that no logging level suppresses."""
        self._silenced.set()

    def withhold(self, lines: re.Pattern[bytes]) -> None:
        """Collect those lines of the start that match `lines` in `withheld`, and do not print them."""
        self._also = lines

    @contextlib.contextmanager
    def of_start(self) -> Iterator[None]:
        """Pass on the output of the JVM that is launched while the context is open, to standard error, without the
        lines that every healthy start prints.

        The JVM inherits its descriptors when it is launched and keeps them: the pipe exists until the JVM ends.
        """
        started = threading.Event()
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        real_out, real = os.dup(1), os.dup(2)
        os.dup2(writer, 1)  # standard output is for rows
        os.dup2(writer, 2)
        os.close(writer)
        threading.Thread(target=self._pass_on, args=(reader, real, started), daemon=True).start()
        try:
            yield
        finally:
            started.set()
            sys.stderr.flush()
            os.dup2(real_out, 1)
            os.close(real_out)
            os.dup2(real, 2)

    def redirect(self, session: Any) -> None:
        """Redirect the standard error of spark-submit's JVM, which keytail did not start, through this process.

        If the redirection is impossible, the JVM keeps its standard error. The JVM's log is also redirected if the
        appender of the log has the setting `follow`.
        """
        reader, writer = os.pipe()
        real, started = os.dup(2), threading.Event()
        started.set()
        threading.Thread(target=self._pass_on, args=(reader, real, started), daemon=True).start()
        with contextlib.suppress(Exception):  # there is no /proc, or the JVM is already ending
            java = session.sparkContext._jvm.java
            stream = java.io.FileOutputStream(f"/proc/{os.getpid()}/fd/{writer}")
            java.lang.System.setErr(java.io.PrintStream(stream, True))
        os.close(writer)  # the thread ends with the JVM, or now after an error

    def _pass_on(self, reader: int, real: int, started: threading.Event) -> None:
        """Write lines without a delay while the JVM starts, and later with a delay: the signal that ends a run may
        reach the JVM and its workers a moment before it reaches the driver."""
        begun_so_far = b""  # an incomplete line
        while data := os.read(reader, 1 << 16):
            if started.is_set() and not self._silenced.is_set():
                self._silenced.wait(HELD_BACK_S)
            if self._silenced.is_set():
                begun_so_far = b""
                continue
            whole, newline, begun_so_far = (begun_so_far + data).rpartition(b"\n")
            for line in (whole + newline).splitlines(keepends=True):
                if _START_NOISE.match(line):
                    continue
                if self._also is not None and not started.is_set() and self._also.match(line):
                    self.withheld.append(line)
                    continue
                write(real, line)
        os.close(reader)
        if begun_so_far and not self._silenced.is_set():
            write(real, begun_so_far)


def write(fd: int, data: bytes) -> None:
    """Write the data, or discard it after an error. The caller must go on reading the JVM's pipe: if the pipe is full,
    the JVM waits forever."""
    with contextlib.suppress(OSError):
        os.write(fd, data)
