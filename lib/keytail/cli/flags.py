"""Derives the flags of a command from the declaration of its request.

A request is a dataclass. Each field of a request is one of these:

- a flag: its annotation contains a typer.Option or a typer.Argument;
- made from flags: its annotation contains FromFlags with a function. The function's parameters are declared like the
  fields of a request; a parameter that is neither a flag nor made from flags gets the field of that name;
- neither: the field has its default, unless the caller gives a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

T = TypeVar("T")


@dataclass(frozen=True)
class FromFlags:
    """Marks a field whose value is returned by `make`, a function whose parameters are flags."""

    make: Callable[..., Any]


@dataclass(frozen=True)
class _Input:
    """One field of a request, or one parameter of a function that makes a field."""

    name: str
    annotation: Any
    default: Any  # inspect.Parameter.empty if there is no default
    is_flag: bool
    made_by: FromFlags | None

    @property
    def is_declared(self) -> bool:
        return self.is_flag or self.made_by is not None


def flags_of(source: Callable[..., Any], only: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the flags of a request's class by name, as parameters of a function from which Typer derives flags.

    `only` names the fields whose flags are wanted; if it is empty, all flags are returned. A flag that the functions of
    several fields declare is listed at the first of these fields.
    """
    found: dict[str, inspect.Parameter] = {}
    for item in _inputs(source):
        if only and item.name not in only:
            continue
        if item.made_by is not None:
            flags = flags_of(item.made_by.make)
        elif item.is_flag:
            kind = inspect.Parameter.KEYWORD_ONLY
            flags = {item.name: inspect.Parameter(item.name, kind, default=item.default, annotation=item.annotation)}
        else:
            continue
        found = found | {name: flag for name, flag in flags.items() if name not in found}
    return found


def request_of(kind: type[T], flags: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> T:
    """Return the request of class `kind` for the values of flags. A flag without a value has its default. `given` are
    values of fields that are not flags."""
    inputs = {item.name: item for item in _inputs(kind)}
    fields = {name: value for name, value in (given or {}).items() if name in inputs}

    def field(name: str) -> Any:
        if name not in fields:
            fields[name] = made(inputs[name])
        return fields[name]

    def made(item: _Input) -> Any:
        if item.is_flag:
            return flags.get(item.name, item.default)
        if item.made_by is None:
            raise TypeError(f"{item.name} of {kind} is neither a flag nor given")
        return item.made_by.make(
            **{each.name: made(each) if each.is_declared else field(each.name) for each in _inputs(item.made_by.make)}
        )

    return kind(**{name: field(name) for name, item in inputs.items() if item.is_declared or name in fields})


def _inputs(source: Callable[..., Any]) -> Iterator[_Input]:
    """Yield the fields of a request, or the parameters of a function. Also sets the metavar of switches for Typer."""
    hints = get_type_hints(source, include_extras=True)
    for name, parameter in inspect.signature(source).parameters.items():
        marks = get_args(hints[name])[1:] if get_origin(hints[name]) is Annotated else ()
        is_flag = False
        for mark in marks:
            if isinstance(mark, OptionInfo | ArgumentInfo):
                is_flag = True
                if get_args(hints[name])[0] in (bool, bool | None):
                    mark.metavar = ""  # a switch has no value; without this, Typer prints <bool>
        made_by = next((mark for mark in marks if isinstance(mark, FromFlags)), None)
        yield _Input(name, hints[name], parameter.default, is_flag, made_by)
