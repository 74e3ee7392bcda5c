"""Defines the few classes of errors that keytail raises. An error has the problem, the place of the problem and a
remedy.

The class determines the status of the partition's row: `CorruptLog` gives `corrupt`, `Refused` gives `refused`, any
other `KeytailError` gives `failed`. `UsageProblem` ends the run with exit status 2.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable

_OUT_OF_ROOM = "Free space on this file system or lower --max-scratch-bytes, then run again"
_NOT_ALLOWED = (
    "Give this file or directory the owner and mode of the files beside it (chown, chmod), or run as the user that "
    "owns the files. If started as root, keytail works as the owner of the log dirs, without root's rights there"
)
_FULL = ("no-space", _OUT_OF_ROOM)
PERMISSION_DENIED = "permission-denied"
_DENIED = (PERMISSION_DENIED, _NOT_ALLOWED)
# Slug and remedy for errors of the operating system.
OF_SYSTEM = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EIO: (
        "input-output-error",
        "The disk or its file system has errors: see the kernel log, and repair or replace it before you start a "
        "broker on it. Then run again",
    ),
    errno.EROFS: (
        "read-only-file-system",
        "The file system is mounted read-only, usually by the kernel after an error: see the kernel log, fix the "
        "cause, then run again",
    ),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EMFILE: (
        "too-many-open-files",
        "Raise the limit of open files (ulimit -n) or run fewer tasks at a time, then run again",
    ),
    errno.ENFILE: (
        "too-many-open-files", "The host has too many open files: stop other programs on it, then run again"
    ),
}
_UNKNOWN = ("file-system-error", "Check the file system and its permissions, then run again")


# The remedies for a partition whose bytes are damaged, each with its condition.
CORRUPT_HELP = {
    "re-fetch": "If another replica is in sync: stop the broker, move this partition's directory out of the log dir "
    "and start the broker, which fetches the partition again",
    "truncate": "If only the end of the log is incomplete, after a crash: `keytail rebuild-index --truncate` truncates "
    "it as the broker would",
    "salvage": "If no other replica has the data: `keytail salvage --to DIR` saves the valid batches and lists what is "
    "lost",
}
CORRUPT_REMEDY = ". ".join(["Nothing was changed", *CORRUPT_HELP.values()])


def without_remedy(text: str) -> str:
    """Return a message without its remedy, for a line of progress: the row of the partition has the whole message."""
    remedy = text.remedy if isinstance(text, ErrorText) else ""
    return text.replace(f". {remedy}", "") if remedy else without_corrupt_remedy(text)


def without_corrupt_remedy(text: str) -> str:
    """Return a message without CORRUPT_REMEDY, which is long, for a place that prints it once for several messages."""
    return text.replace(f". {CORRUPT_REMEDY}", "")


WRITTEN_TO = "Another process writes there: find and stop it, then run again"
REPORT_IT = "This is a bug in keytail: keep a copy of the files and of the output of this run, and report it"


# Control characters, direction marks and zero-width characters: they control a terminal, or make its text misleading.
_UNSEEN = [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F)]
_UNSEEN += [*range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)]
_VISIBLE = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    for code in _UNSEEN
}
# Escapes for whole lines, which keep their line ends and tabs; in JSON lines, only JSON's own escapes are valid.
_VISIBLE_IN_LINES = {code: text for code, text in _VISIBLE.items() if chr(code) not in "\n\t"}
_VISIBLE_IN_JSON = {code: json.dumps(chr(code))[1:-1] for code in _VISIBLE_IN_LINES} | {0x7F: "\\u007f"}


def visible(text: str) -> str:
    """Return `text` as one line for a terminal, with unsafe characters escaped: file names may contain any character.
    """
    # Translate is called only if necessary: it is slow, and tables have many cells
    return text if text.isprintable() else text.translate(_VISIBLE)


def visible_lines(text: str, *, as_json: bool = False) -> str:
    """Return lines of output for a terminal, with unsafe characters escaped, except line ends and tabs.

    With `as_json` the lines are JSON: the escapes are JSON's, and the values remain the same.
    """
    return text.translate(_VISIBLE_IN_JSON if as_json else _VISIBLE_IN_LINES)


_IN_BRACKETS = re.compile(r" \[([a-z0-9]+(?:-[a-z0-9]+)+)\]")


class ErrorText(str):
    """A message about errors, with their slugs: `slugs` contains each slug once, in the order of the text.

    Slugs are not parsed from the text, since a file name in it may look like a slug. `+` and `joined` keep the slugs,
    but lose the remedy; f-strings lose both.
    """

    slugs: tuple[str, ...]
    remedy: str  # the remedy of the exception, as it is in the text
    stored_fields = ("text", "slugs")

    def __new__(cls, message: object = "", slugs: Iterable[str] = ()) -> ErrorText:
        """`message` is an exception or a string, which may have slugs of its own."""
        text = message if isinstance(message, str) else str(message)
        made = super().__new__(cls, text)
        made.slugs = tuple(dict.fromkeys((*slugs_of(text), *slugs)))
        made.remedy = getattr(message, "remedy", None) or ""
        return made

    def __add__(self, after: str) -> ErrorText:
        return ErrorText(f"{self}{after}", (*self.slugs, *slugs_of(after)))

    def __radd__(self, before: str) -> ErrorText:
        return ErrorText(f"{before}{self}", (*slugs_of(before), *self.slugs))

    def __reduce__(self) -> tuple:
        return ErrorText, (self.text, self.slugs)

    @property
    def text(self) -> str:
        return str(self)


def slugs_of(text: str) -> tuple[str, ...]:
    """Return the slugs of the errors in a message."""
    return text.slugs if isinstance(text, ErrorText) else ()


NO_ERROR = ErrorText()


def joined(texts: Iterable[str]) -> ErrorText:
    """Return the non-empty messages of `texts` as one message, separated by semicolons."""
    texts = [text for text in texts if text]
    return ErrorText("; ".join(texts), (slug for text in texts for slug in slugs_of(text)))


def stored(text: str) -> str:
    """Return the text of a message for a file or table without a field for slugs. Words in brackets that look like
    slugs, but are not slugs, are escaped."""
    return _IN_BRACKETS.sub(lambda found: found[0] if found[1] in slugs_of(text) else f" \\{found[0][1:]}", text)


def of_stored(text: str) -> ErrorText:
    """Return a message, with its slugs, from the text that `stored` returned."""
    return ErrorText(text, _IN_BRACKETS.findall(text))


def refusal(text: str, *, slug: str, remedy: str = "") -> ErrorText:
    """Return the reason for a refused row, followed by its slug in brackets, as in error messages."""
    made = ErrorText(f"{text}{f'. {remedy}' if remedy else ''} [{slug}]", (*slugs_of(text), slug))
    made.remedy = remedy
    return made


class KeytailError(Exception):
    """An error that keytail detects and explains.

    `what` is one sentence, an ErrorText if it contains the messages of other errors; `path`, `byte_position` and
    `offset` are the place; `remedy` is what to do next. `slug` is the name of the error for programs, such as
    `unknown-topic-settings`: unlike the message, it never changes. A subclass may define a default slug.
    """

    default_slug: str | None = None

    def __init__(
        self,
        what: str,
        *,
        path: str | None = None,
        byte_position: int | None = None,
        offset: int | None = None,
        remedy: str | None = None,
        slug: str | None = None,
    ) -> None:
        self.what = what
        self.path = path
        self.byte_position = byte_position
        self.offset = offset
        self.remedy = remedy
        self.slug = slug or self.default_slug
        super().__init__(what, path, byte_position, offset, remedy, slug)

    @property
    def what_and_where(self) -> str:
        """The problem and its place, without the remedy and the slug."""
        where = []
        if self.path is not None:
            where.append(visible(str(self.path)))
        if self.byte_position is not None:
            where.append(f"byte position {self.byte_position}")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        return self.what + (f" ({', '.join(where)})" if where else "")

    def __str__(self) -> str:
        text = self.what_and_where
        text += f". {self.remedy}" if self.remedy else ""
        if not self.slug:
            return text
        return ErrorText(text, [self.slug]) if text.endswith(f" [{self.slug}]") else refusal(text, slug=self.slug)

    def __reduce__(self) -> tuple:
        # Child processes send these errors to the driver; the default pickling would lose keyword-only arguments.
        return (_rebuild, (type(self), self.what, self.path, self.byte_position, self.offset, self.remedy, self.slug))


def _rebuild(
    kind: type[KeytailError],
    what: str,
    path: str | None,
    byte_position: int | None,
    offset: int | None,
    remedy: str | None,
    slug: str | None,
) -> KeytailError:
    return kind(what, path=path, byte_position=byte_position, offset=offset, remedy=remedy, slug=slug)


class CorruptLog(KeytailError):
    """Bytes on disk are invalid in their format, or contradict each other."""


class Refused(KeytailError):
    """keytail does not process the state of a partition, file or host; nothing was changed."""


class UsageProblem(KeytailError):
    """The user's request cannot be understood, or names something that does not exist."""


class UnsafeFile(OSError):
    """A file that is not opened because of its type or owner. `remedy` is what to do."""

    remedy = ""
    slug = "unsafe-file"


class SymbolicLink(UnsafeFile):
    """A symbolic link that is not followed: it is below a log dir, or another user may have created it."""

    slug = "symbolic-link"
    remedy = (
        "Find out what created the link and why. Replace it with the file or directory itself; for a log dir or "
        "another directory that you name, give the path that the link points to. Then run again"
    )


class NotRegular(UnsafeFile):
    """A directory, FIFO, socket or device where a regular file is expected."""

    slug = "not-a-regular-file"
    remedy = "Find out what created the file, move it elsewhere, then run again"


class ForeignFile(UnsafeFile):
    """A file whose owner is not its directory's owner: root must not read it on behalf of that owner."""

    slug = "foreign-file"
    remedy = (
        "The file may be a hard link to a file outside of the log dir: find out what it is. If it belongs there, give "
        "it the owner of its directory (chown); if not, remove this link. Then run again"
    )


# The medium or its file system cannot return bytes that were written: EIO, and checksum errors of ext4, XFS and btrfs.
_LOST_BYTES = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)


def is_loss(error: OSError) -> bool:
    """Return whether an error of reading means that bytes of the file are lost. All other errors (access denied, too
    many open files) imply nothing about the file's contents."""
    return error.errno in _LOST_BYTES


def is_denied(error: OSError) -> bool:
    """Return whether the system denied access, by owner and mode."""
    return error.errno in (errno.EACCES, errno.EPERM) and not isinstance(error, UnsafeFile)


def of_system(error: OSError, where: str = "") -> KeytailError:
    """Return a KeytailError for an error of the operating system; `where` is appended to its message."""
    slug, remedy = OF_SYSTEM.get(error.errno or 0, _UNKNOWN)
    if isinstance(error, UnsafeFile):
        slug, remedy = error.slug, error.remedy
    return KeytailError(
        f"{error.strerror or error}{where}",
        path=error.filename if isinstance(error.filename, str) else None,
        remedy=remedy,
        slug=slug,
    )


def out_of_memory() -> KeytailError:
    """Return the error for a MemoryError, which does not mean that the data that were being read are damaged."""
    return KeytailError(
        f"out of memory on host {os.uname().nodename}",
        remedy="Lower --map-memory or the number of concurrent tasks (--master 'local[2]'), then run again",
        slug="out-of-memory",
    )


# The errors that a row or a message explains. Any other exception is a mistake of the program.
EXPLAINED = (KeytailError, OSError, MemoryError)
Explained = KeytailError | OSError | MemoryError


def explained(problem: Explained) -> KeytailError:
    """Return a KeytailError for an error of any of these types, with place, remedy and slug as far as they are
    known."""
    if isinstance(problem, MemoryError):
        return out_of_memory()
    return of_system(problem) if isinstance(problem, OSError) else problem


def in_words(problem: Explained) -> ErrorText:
    """Return the message of an error of any of these types, with place, remedy and slug as far as they are known."""
    return ErrorText(explained(problem))
