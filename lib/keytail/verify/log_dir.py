"""Verifies a log dir itself: finds what keeps a broker from loading any of its partitions."""

from __future__ import annotations

import os

from keytail.errors import CorruptLog, is_denied
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import FileSystem
from keytail.log.log_dirs import CHECKPOINTS, foreign_dirs
from keytail.verify.findings import Finding, Findings


def verify_log_dir(fs: FileSystem, path: str) -> tuple[Finding, ...]:
    """Check the checkpoints of the log dir and the names of its directories. Raises OSError if it cannot be listed."""
    findings = Findings(path)
    for name in foreign_dirs(fs.scan(path)):
        findings.add("foreign-directory", name)
    for name in CHECKPOINTS:
        try:
            read_offsets(fs, os.path.join(path, name))
        except CorruptLog as problem:
            findings.add("checkpoint-unreadable", name, reason=problem.what)
        except OSError as problem:
            if is_denied(problem):  # the survey of the log dir reports it
                continue
            findings.add("unreadable", name, reason=problem.strerror or str(problem))
    return tuple(findings.found)
