"""The flags that every command has for output on standard error."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from keytail.cli.options import RUN, one_of, size_bytes
from keytail.errors import UsageProblem
from keytail.limits import MAX_RECORD_VARIABLE
from keytail.telling import Level, Manner, say, speak

_PANEL = "Output on standard error"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


_FLAGS = {
    "quiet": (
        Annotated[
            bool,
            typer.Option("--quiet", "-q", help="Print only warnings and errors.", rich_help_panel=_PANEL),
        ],
        False,
    ),
    "verbose": (
        Annotated[
            bool,
            typer.Option(
                "--verbose", "-v", rich_help_panel=_PANEL,
                help="Print a line for each partition and each of its phases, for any number of partitions.",
            ),
        ],
        False,
    ),
    "log_format": (
        Annotated[
            LogFormat,
            typer.Option(
                "--log-format", metavar="text|json", parser=one_of(LogFormat),
                help="Format; json: one object per line with time, level, message and figures, for log collectors.",
                rich_help_panel=_PANEL,
            ),
        ],
        LogFormat.text,
    ),
}

# Commands that decompress record blocks also have this flag.
_OPENING_VERBS = {
    "compact", "verify", "describe", "lookup", "dump", "audit", "rebuild_index", "expire", "export", "salvage"
}  # fmt: skip
_OPENING_FLAGS = {
    "max_record_bytes": (
        Annotated[
            int | None,
            typer.Option(
                "--max-record-bytes", metavar="SIZE", parser=size_bytes,
                help="Largest uncompressed record that is held in memory; larger ones are refused. A task uses up to "
                "five times this size. Default: 64m.",
                rich_help_panel=RUN,
            ),
        ],
        None,
    ),
}


def spoken(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the command with these flags added, and applied when it runs."""
    opens = verb.__name__ in _OPENING_VERBS
    hints = get_type_hints(verb, include_extras=True)
    own = [one.replace(annotation=hints[one.name]) for one in inspect.signature(verb).parameters.values()]
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in ({**_OPENING_FLAGS, **_FLAGS} if opens else _FLAGS).items()
    ]

    for one in (*own, *added):
        _name_no_type(one.annotation)

    def run(
        *args: Any,
        quiet: bool = False,
        verbose: bool = False,
        log_format: LogFormat = LogFormat.text,
        max_record_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        speak(Manner(quiet and not verbose, verbose, log_format is LogFormat.json))
        if quiet and verbose:
            raise UsageProblem(
                "--quiet and --verbose exclude each other", remedy="Give only one of them", slug="conflicting-flags"
            )
        if max_record_bytes is not None:
            os.environ[MAX_RECORD_VARIABLE] = str(max(max_record_bytes, 1))
        if verbose:
            _pass_on_logging()
        verb(*args, **kwargs)

    run.__name__, run.__doc__, run.__module__ = verb.__name__, verb.__doc__, verb.__module__
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
    return run


def _name_no_type(annotation: Any) -> None:
    """Remove the type from the help of a flag that takes no value, where Typer would print <bool>."""
    kind, *facts = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    for fact in facts:
        if kind in (bool, bool | None) and isinstance(fact, OptionInfo):
            fact.metavar = ""


class _Told(logging.Handler):
    """Prints records of the standard library's logging that keytail emits, in the manner of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "warning" if record.levelno >= logging.WARNING else "detail"
        say(f"keytail: {record.getMessage()}", level, logger=record.name)


def _pass_on_logging() -> None:
    logger = logging.getLogger("keytail")
    logger.setLevel(logging.DEBUG)
    if not any(isinstance(one, _Told) for one in logger.handlers):
        logger.addHandler(_Told())

