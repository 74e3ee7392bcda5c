"""The JVM of Spark sessions that keytail starts: its start, its private directories, its output and its end.

A process has at most one JVM of pyspark, which keeps running when a session is stopped. `SparkContext._gateway` refers
to this JVM and, if keytail started it, also to its `Jvm` object, so this module has no global state. A JVM that other
code of this process started, as in a notebook, is used but never ended.
"""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from keytail.acting_user import as_caller, popen_as_caller
from keytail.run.spark.isolation import LocalDirs, configured_parents, environment_of_children, safe_environment
from keytail.run.spark.jvm_log import JvmLog


class Jvm:
    """A JVM that pyspark starts in the context `starting`. Raises KeytailError if its private directories cannot be
    created.

    The directories are removed by `end`, or at the end of this process.
    """

    def __init__(self) -> None:
        self.log = JvmLog()
        with as_caller():
            self._dirs = LocalDirs(configured_parents())
        self._processes: list[subprocess.Popen[Any]] = []
        self._is_ended = False
        atexit.register(self._remove_dirs)

    @property
    def temporary(self) -> str:
        return self._dirs.paths[0]

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Return the context in which pyspark starts the JVM, with `popen`. After an error, the JVM is ended."""
        try:
            with environment_of_children(safe_environment(self._dirs.paths)), self.log.of_start():
                yield
            _pyspark().SparkContext._gateway.keytail_jvm = self
        except BaseException:
            self.end()
            raise

    def popen(self, *arguments: Any, **options: Any) -> Any:
        """Start the JVM's process for pyspark, and return it. The JVM runs as the user that started this process,
        because it reads packages and writes tables."""
        process = popen_as_caller(*arguments, **options)
        self._processes.append(process)
        if self._is_ended:  # another thread was interrupted during the start
            process.kill()
        return process

    def end(self) -> None:
        """End the JVM and remove its files. The JVM's session must have been stopped or abandoned."""
        self._is_ended = True
        for process in self._processes:
            process.kill()
            process.wait()
        context = _pyspark().SparkContext
        if getattr(context._gateway, "proc", None) in self._processes:
            context._gateway = context._jvm = None  # the next session starts another JVM
        self._remove_dirs()

    @as_caller()
    def _remove_dirs(self) -> None:
        atexit.unregister(self._remove_dirs)
        self._dirs.remove()


def has_jvm() -> bool:
    """Return whether this process already has a JVM of pyspark, which it or spark-submit started."""
    return "pyspark" in sys.modules and _pyspark().SparkContext._gateway is not None


def has_session() -> bool:
    """Return whether a Spark session is active in this process."""
    return "pyspark" in sys.modules and _pyspark().SparkContext._active_spark_context is not None


def jvm_of_keytail() -> Jvm | None:
    """Return the JVM of this process if keytail started it; otherwise None."""
    return getattr(_pyspark().SparkContext._gateway, "keytail_jvm", None) if has_jvm() else None


def end_jvm() -> None:
    """End the JVM of this process if keytail started it; otherwise do nothing."""
    if (jvm := jvm_of_keytail()) is not None:
        jvm.end()


def _pyspark() -> Any:
    import pyspark  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    return pyspark
