"""Defines the kinds of rows' statuses. A command declares its statuses in its Command; many commands share
`FAILURES`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# `not done` and `failed` are failures; `notable` needs attention.
Kind = Literal["plain", "done", "skipped", "notable", "not done", "failed"]
_STYLES: dict[Kind, str] = {
    "done": "green", "skipped": "yellow", "notable": "bold yellow", "not done": "bold yellow", "failed": "bold red",
}  # fmt: skip


class Status(NamedTuple):
    meaning: str
    kind: Kind = "plain"


FAILURES = {
    "refused": Status("keytail does not act on this state; nothing was changed", "not done"),
    "corrupt": Status("damaged bytes, with file and position; nothing was changed", "failed"),
    "failed": Status("another error occurred (a disk error, a killed worker); run again", "failed"),
}
_kinds: dict[str, Kind] = {"skipped": "skipped"}


def declare(statuses: Mapping[str, Status]) -> None:
    """Register the kinds of a command's statuses. Raises ValueError for a status that another command declares with
    another kind.
    """
    for name, status in statuses.items():
        if _kinds.setdefault(name, status.kind) != status.kind:
            raise ValueError(f"status {name} has the kinds {_kinds[name]} and {status.kind}")


declare(FAILURES)


def kind_of(status: str) -> Kind:
    return _kinds.get(status, "plain")


def is_failure(status: str) -> bool:
    return kind_of(status) in ("not done", "failed")


def style_of(status: str) -> str:
    """Return the style in which rich prints a status; "" for no style."""
    return _STYLES.get(kind_of(status), "")


def styled(status: str) -> str:
    """Return a status as markup."""
    style = style_of(status)
    return f"[{style}]{status}[/]" if style else status


def exit_status_of(rows: Sequence[Any], failures: Collection[str] = tuple(FAILURES)) -> int:
    """Return 0 if no row has a status of `failures`, 3 if some rows have one, 1 if all rows have one."""
    failed = sum(row.status in failures for row in rows)
    return 0 if not failed else 1 if failed == len(rows) else 3
