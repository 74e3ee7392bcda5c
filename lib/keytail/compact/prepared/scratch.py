"""Recognises the scratch files of preparations by their names. Importing this module loads no kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from keytail.format import names
from keytail.log.fs import FileSystem

RUN_ID_PREFIX = "p"  # first character of the id of a preparing run; other run ids are hexadecimal


def is_record(name: str) -> bool:
    """Return whether `name` is the file name of the record of a preparation."""
    parsed = names.parse_file_name(name)
    return parsed.kind == "scratch" and parsed.suffix == names.PREPARED


def is_prepared(name: str) -> bool:
    """Return whether `name` is the file name of a scratch file of a preparing run."""
    parsed = names.parse_file_name(name)
    return parsed.kind == "scratch" and parsed.run_id.startswith(RUN_ID_PREFIX)


def bytes_of(fs: FileSystem, path: str, files: Sequence[str]) -> int:
    """Return the total size in bytes of these files of a partition directory; files that no longer exist are ignored.
    """
    found = 0
    for name in files:
        with contextlib.suppress(FileNotFoundError):
            found += fs.size(os.path.join(path, name))
    return found
