"""Checks the arguments of `keytail.api`, and converts them to values of requests."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeAlias, TypeVar, get_args

from keytail.cli.options import LONG_MAX, parse_time
from keytail.errors import UsageProblem
from keytail.source.options import Bound

# An offset, or a time with a time zone, which stands for the offset of the first record at or after it.
Position: TypeAlias = int | datetime
# One position for all partitions, or one position for each partition, by names such as "orders-0".
Positions: TypeAlias = Position | Mapping[str, Position]

T = TypeVar("T")


def names_of(argument: str, names: str | Iterable[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise invalid_argument(argument, found, "Give a name or several names as strings")
    return found


def chosen_names(argument: str, names: str | Iterable[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    if not (found := names_of(argument, names)):
        raise invalid_argument(argument, found, "Give at least one name, or None for all")
    return found


def bound_of(argument: str, given: Positions | None, default: int) -> Bound:
    """Return the bound of a read for the argument `given`; for None, the bound is the offset `default`."""
    if given is None:
        return Bound(False, default)
    if not isinstance(given, Mapping):
        return Bound(*number_of(argument, given))
    of = {}
    for name, position in given.items():
        topic, dash, number = name.rpartition("-")
        if not dash or not number.isdecimal():
            raise invalid_argument(argument, name, "Give the names of partitions, such as orders-0")
        of[topic, int(number)] = number_of(argument, position)
    kinds = {is_time for is_time, _ in of.values()}
    if len(kinds) != 1:
        raise invalid_argument(argument, given, "Give offsets for all partitions, or times for all")
    return Bound(kinds.pop(), of={partition: number for partition, (_, number) in of.items()})


def number_of(argument: str, position: Position) -> tuple[bool, int]:
    """Return whether a position is a time, and the offset or the time in ms."""
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise invalid_argument(argument, position, "Give a datetime with a time zone")
        return True, parse_time(position.isoformat(), argument)
    try:
        offset = operator.index(position)  # accepts integers of NumPy, too
    except TypeError:
        offset = -1
    if isinstance(position, bool) or not 0 <= offset <= LONG_MAX:
        raise invalid_argument(argument, position, "Give an offset from 0 on, or a datetime with a time zone")
    return False, offset


def one_of(argument: str, value: T, kind: Any) -> T:
    if value not in get_args(kind):
        raise invalid_argument(argument, value, f"Give {' or '.join(get_args(kind))}")
    return value


def invalid_argument(argument: str, value: object, remedy: str) -> UsageProblem:
    return UsageProblem(
        f"invalid value {value!r} of the argument {argument}",
        remedy=remedy,
        slug="invalid-argument",
    )
