"""Prints the contents of files of a log dir line by line, and checks them.

The command takes no lock, changes nothing and does not use Spark. Lines are written to standard output immediately,
findings to standard error. As JSON, lines and findings are written to standard output, one object per line.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from functools import partial

from keytail.cli.streams import READER_GONE
from keytail.console import Unfailing, print_message
from keytail.dump.batch_lines import BOTH
from keytail.dump.command import Request
from keytail.dump.decoder_classes import ClassDecoder
from keytail.dump.files import DumpOptions, dump, expanded
from keytail.dump.report import Report
from keytail.errors import UsageProblem, visible_lines
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.kernels import compile_kernels


def run(request: Request, fs: FileSystem = LOCAL) -> int:
    """Dump to this process's standard output; return the exit status, which is 1 if there were findings other than
    gaps.

    Control characters of the data are escaped if `escape` is true, or if it is None and the output is a terminal, which
    would interpret them.
    """
    options, as_json = _options(request), request.output == "json"
    if not request.paths:
        raise UsageProblem(
            "no file is given", remedy="Pass files of a log dir, or a partition directory", slug="no-files-given"
        )
    stream = Unfailing.of(sys.stdout)
    stream.write("")  # fails if standard output is closed
    out: Callable[..., None] = partial(_or_lost, sys.stdout.buffer.write)
    if sys.stdout.isatty() if request.escape is None else request.escape:
        out = _escaping(out, as_json)
    report = Report(out, print_message, as_json=as_json)
    if any(path.endswith(names.LOG) for path in expanded(fs, request.paths)):
        compile_kernels(["dump"])
    try:
        dumped = dump(fs, request.paths, options, report)
        _or_lost(sys.stdout.buffer.flush)
    except _OutputLost as lost:
        stream.give_up(lost.problem)
        if isinstance(lost.problem, BrokenPipeError):
            stream.take_problem()
            return READER_GONE
        return 0  # cli/streams.py reports the error
    if not dumped:
        raise UsageProblem(
            "none of the files has a type that can be dumped",
            remedy="Pass segments, their indexes, snapshots, checkpoints or partition.metadata",
            slug="no-dumpable-file",
        )
    return 1 if report.wrong else 0


def _options(request: Request) -> DumpOptions:
    return DumpOptions(
        print_data_log=request.print_data_log,
        deep_iteration=request.deep_iteration,
        skip_record_metadata=request.skip_record_metadata,
        max_bytes=request.max_bytes,
        index_checks=request.checks,
        decoder=request.decoder.text if request.decoder is not None else None,
        decoded=request.decoder.decoded if isinstance(request.decoder, ClassDecoder) else BOTH,
        wanted=request.wanted,
    )


class _OutputLost(Exception):
    """Raised when standard output fails. This class is no OSError, because an OSError would mean an error of the dumped
    file."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(problem)
        self.problem = problem


def _or_lost(work: Callable[..., object], *given: object) -> None:
    try:
        work(*given)
    except OSError as problem:
        raise _OutputLost(problem) from problem


def _escaping(out: Callable[..., None], as_json: bool) -> Callable[..., None]:
    """Return a sink that writes to `out` with control characters as text (errors.visible_lines)."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return lambda data: out(visible_lines(decoder.decode(data), as_json=as_json).encode())
