"""The errors keytail raises: few kinds, each with what, where, why it matters and what to do next.

A caller tells them apart by what becomes of the partition: `CorruptLog` gives the row status `corrupt`,
`Refused` gives `refused`, any other `KeytailError` gives `failed`; `UsageProblem` ends the run with status 2.
"""

from __future__ import annotations


class KeytailError(Exception):
    """An error that keytail explains itself.

    `what` is one sentence; `path`, `byte_position` and `offset` say where; `remedy` says what to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | None = None,
        byte_position: int | None = None,
        offset: int | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.path = path
        self.byte_position = byte_position
        self.offset = offset
        self.remedy = remedy
        super().__init__(what, path, byte_position, offset, remedy)

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(str(self.path))
        if self.byte_position is not None:
            where.append(f"byte position {self.byte_position}")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        text = self.what + (f" ({', '.join(where)})" if where else "")
        return text + (f". {self.remedy}" if self.remedy else "")

    def __reduce__(self) -> tuple:
        # Keyword-only arguments would be lost by the default pickling; these cross from Spark workers.
        return (_rebuild, (type(self), self.what, self.path, self.byte_position, self.offset, self.remedy))


def _rebuild(
    kind: type[KeytailError],
    what: str,
    path: str | None,
    byte_position: int | None,
    offset: int | None,
    remedy: str | None,
) -> KeytailError:
    return kind(what, path=path, byte_position=byte_position, offset=offset, remedy=remedy)


class CorruptLog(KeytailError):
    """Bytes on disk are not what the format allows, or contradict each other."""


class Refused(KeytailError):
    """The state is one that keytail does not act on; nothing was changed."""


class UsageProblem(KeytailError):
    """What the user asked for cannot be understood or does not exist."""
