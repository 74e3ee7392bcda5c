"""Implements `--ledger PATH` for runs that change files: records the intent of a run and, unless it is killed, its
outcome.

Spark writes the ledger if the run has a Spark session; if not, the deltalake package writes it. If that package is not
installed, or the path is a URI of remote storage, a session is started only for the ledger: the credentials and the
commit protocol of remote storage are settings of Spark.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from keytail import __version__
from keytail.acting_user import as_caller
from keytail.cli import options as o
from keytail.cli.flags import FromFlags
from keytail.cli.masking import masked, masked_arguments
from keytail.cli.outside import refuse_in_log_dirs
from keytail.cli.stopping import Stopped
from keytail.errors import ErrorText, in_words
from keytail.extras import DELTA, HISTORY, Extra, installed
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.ended import SparkEnded
from keytail.run.rows import RECORDED, ResultRow
from keytail.run.spark.delta import require_delta, session_settings
from keytail.run.spark.stores import checked_uri, is_remote, is_uri, local_path

if TYPE_CHECKING:
    from keytail.cli.configuration import Configuration
    from keytail.ledger.write import Ledger
    from keytail.run.engine import Engine

_PACKAGES = ("pyspark", "delta-spark", "deltalake", "numba", "numpy", "pyarrow")
# The key of the ledger's path in the conf of spark-submit, as in conf/spark-delta.conf; Spark accepts only keys that
# begin with `spark`.
_CONF_KEY = "spark.keytail.ledger"
R = TypeVar("R", bound=Any)
_STATUS = {0: "done", 3: "partly", 1: "failed"}


@dataclass(frozen=True)
class LedgerFlags:
    """The ledger flags of the command line: the path or URI of the ledger, and a folder with Delta's jars."""

    path: o.LedgerFlag = None
    jars: o.DeltaJars = None

    def checked(self, fs: FileSystem, log_dirs: Sequence[str]) -> LedgerFlags:
        """Return the flags with an absolute path, or with a checked URI. Raises UsageProblem if the ledger is in or
        contains a log dir, or if the URI is unsuitable."""
        if self.path is None:
            return self
        local = local_path(self.path)
        if local is None:
            return replace(self, path=checked_uri(self.path, "--ledger"))
        with as_caller():
            path = os.path.realpath(local)
        refuse_in_log_dirs(fs, path, log_dirs, "--ledger")
        return self if is_uri(self.path) else replace(self, path=path)

    def extra(self, has_session: bool) -> Extra:
        """Return the extra that is needed to write the ledger. `has_session` is True if the run has a Spark session."""
        by_spark = has_session or self.is_remote or (needs_spark() and not DELTA.missing())
        return DELTA if by_spark else HISTORY

    @property
    def is_remote(self) -> bool:
        """Whether only Spark can access the ledger, because it is not on a local path."""
        return self.path is not None and is_remote(self.path)

    def why_spark(self) -> str:
        """Return why Spark must be started to write the ledger of a run that does not use Spark otherwise, or "" if it
        need not be started."""
        if self.path is None:
            return ""
        if self.is_remote:
            return "the ledger is written by Spark, because its path is not local"
        if needs_spark():
            return "the ledger is written by Spark, because deltalake is not installed: pip install 'keytail[history]'"
        return ""

    def session_settings(self) -> dict[str, str]:
        """Return Delta's settings for a Spark session that this run starts; an empty dict if the run has no ledger."""
        if self.path is None:
            return {}
        return session_settings(self.jars, place=self.path)

    def in_session(self, engine: Engine, fs: FileSystem, log_dirs: Sequence[str]) -> LedgerFlags:
        """Return the flags, with the ledger in the conf of spark-submit's session if the flags have none. Raises
        UsageProblem if the session cannot write the ledger."""
        named = engine.session.sparkContext.getConf().get(_CONF_KEY)
        flags = self if self.path is not None or not named else replace(self, path=named).checked(fs, log_dirs)
        if flags.path is not None:
            require_delta(engine.session)
        return flags


LedgerByFlags = Annotated[LedgerFlags, FromFlags(LedgerFlags)]


def is_named_by(engine: Engine) -> bool:
    """Return whether the conf of spark-submit's session contains the path of a ledger."""
    return bool(engine.session.sparkContext.getConf().get(_CONF_KEY))


def needs_spark() -> bool:
    """Return whether Spark is needed to read and write ledgers, because deltalake is not installed."""
    return bool(HISTORY.missing())


def run_id_at(now_ms: int, run_id: str) -> str:
    """Return the id of a run in ledgers: the time `now_ms`, so that ids ascend, then `run_id`, the id in scratch names.
    """
    at = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC)
    return f"{at:%Y%m%dT%H%M%SZ}-{run_id}"


# The id of the present run, which the command line prints beside the rows. A context variable: see threads.py.
_run_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("run_id", default=None)


def set_run_id(run_id: str | None) -> None:
    """Set the id that `--output json-v1` reports for this run; None if the run has no id."""
    _run_id.set(run_id)


def current_run_id() -> str | None:
    """Return the id of this run; None if it has no id."""
    return _run_id.get()


@dataclass
class Recording:
    """Records a run in its ledger; without a ledger, it does nothing. The caller sets `rows` and `exit_status` before
    the run ends."""

    ledger: Ledger | None = None
    rows: Sequence[ResultRow] = ()
    exit_status: int = 1

    @property
    def lost(self) -> bool:
        """Whether the ledger lacks a result of completed work."""
        return self.ledger is not None and self.ledger.lost

    def intend(self, rows: Sequence[Any]) -> None:
        """Record the intents of a command that processes all its partitions in one bundle; `rows` are its planned rows.
        Raises KeytailError if the intents cannot be written."""
        if self.ledger is not None:
            self.ledger.intend(1, [_as_result(row) for row in rows])

    def end(self, rows: Sequence[Any], exit_status: int, made: Mapping[str, Sequence[int]] | None = None) -> None:
        """Record the results of a command that called `intend`. `made` has the meaning of the parameter in
        `Ledger.conclude`."""
        self.rows, self.exit_status = [_as_result(row) for row in rows], exit_status
        if self.ledger is not None:
            self.ledger.conclude(1, self.rows, made)

    def recorded(self, rows: Sequence[R]) -> list[R]:
        """Return the rows with `recorded` set: False if the ledger lacks a result (`lost`). Call this method after the
        run has tried to write its outcome."""
        return [replace(row, recorded=not self.lost) for row in rows]


def _as_result(row: Any) -> ResultRow:
    """Return the fields that a ledger records, from a partition's row of any command."""
    known: dict[str, Any] = {name: getattr(row, name, None) for name in RECORDED}
    return ResultRow(**known)


@dataclass(frozen=True)
class Run:
    """The facts about a run that a ledger records when the run begins. `run_id` is a result of `run_id_at`. `more` has
    additional values, which are recorded with the settings that were given.
    """

    command: str
    run_id: str
    now_ms: int
    log_dirs: Sequence[str]
    configuration: Configuration
    shared_storage: bool = False
    more: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def recording(
    flags: LedgerFlags, engine: Engine, run: Run, *, on_note: Callable[[str], None], fs: FileSystem = LOCAL
) -> Iterator[Recording]:
    """Open the ledger of one run, record the intent of the run, yield the recording, and record the outcome at its end.

    The caller holds the locks of the log dirs. Missing outcomes of earlier runs on the run's log dirs are added first.
    Raises KeytailError if the ledger cannot be opened or written; then the run must not change any file.
    """
    if flags.path is None:
        set_run_id(run.run_id)
        yield Recording()
        return
    from keytail.ledger.write import Ledger  # noqa: PLC0415 (brings in pyarrow, for runs with a ledger)
    ledger = Ledger(engine, flags.path, run.run_id, run.command, on_note=on_note)
    ledger.open()
    _repair(ledger, run.log_dirs, run.shared_storage, fs)
    ledger.begin(
        arguments=masked_arguments(sys.argv[1:]),
        log_dirs=list(run.log_dirs),
        versions=versions(),
        now_ms=run.now_ms,
        config={**given_settings(run.configuration), **run.more},
    )
    set_run_id(run.run_id)
    show = f"keytail history --ledger {masked(flags.path)} --run {run.run_id}"
    on_note(f"ledger: this is run {run.run_id}; to show it: {show}")
    made = Recording(ledger)
    try:
        yield made
    except (Stopped, SparkEnded) as stop:
        ledger.end(stop.rows or (), "interrupted", ErrorText("stopped" if isinstance(stop, Stopped) else stop.what))
        raise
    except BaseException as problem:
        text = in_words(problem) if isinstance(problem, MemoryError) else ErrorText(problem)
        ledger.end(made.rows, "failed", ErrorText(masked(text), text.slugs))
        raise
    ledger.end(made.rows, _STATUS[made.exit_status])


def _repair(ledger: Ledger, log_dirs: Sequence[str], shared_storage: bool, fs: FileSystem) -> None:
    """Add the missing outcomes of earlier runs. An error is only reported, because it must not prevent this run; the
    next run tries again to add the outcomes."""
    from keytail.ledger.repair import repair  # noqa: PLC0415 (brings in the kernels)
    from keytail.run.ended import first_line  # noqa: PLC0415 (as the line above)

    try:
        repaired = repair(ledger, log_dirs, shared_storage=shared_storage, fs=fs)
    except Exception as problem:
        ledger.on_note(f"ledger: missing outcomes of earlier runs could not be determined: {first_line(problem)}")
        return
    if repaired:
        ledger.on_note(f"ledger: {repaired} missing outcomes of earlier runs were determined from the disk")


@as_caller()
def versions() -> Mapping[str, str]:
    return {"keytail": __version__, "python": platform.python_version(), **installed(*_PACKAGES)}


def given_settings(configuration: Configuration) -> dict[str, str]:
    """Return the values of given settings by their names, for keys that keytail knows. Settings of the broker's file
    are named `broker NAME`, settings of flags `NAME`, or `TOPIC:NAME` if they are for one topic.

    Only the path of `--topic-configs` is included: the file may contain settings of thousands of topics. The value of
    `--broker-version` is also included.
    """
    of_broker = configuration.broker.items()
    given = {f"broker {name}": setting.value for name, setting in of_broker if setting.invalid is None}
    given |= {name: setting.value for name, setting in configuration.command_line.everywhere.items()}
    for topic, settings in configuration.command_line.by_topic.items():
        given |= {f"{topic}:{name}": setting.value for name, setting in settings.items()}
    if configuration.topic_configs.path:
        given["--topic-configs"] = configuration.topic_configs.path
    if configuration.broker_version is not None:
        given["--broker-version"] = str(configuration.broker_version)
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
