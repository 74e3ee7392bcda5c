"""The flags of a command are the fields of its request; functions make further fields from flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from keytail.cli.flags import FromFlags, flags_of, request_of

Name = Annotated[str | None, typer.Option("--name", help="A name.")]
Loud = Annotated[bool, typer.Option("--loud", help="In capitals.")]
Times = Annotated[int, typer.Option("--times", help="How often.")]


def _greeting(name: Name = None, loud: Loud = False) -> str:
    text = f"hello {name or 'world'}"
    return text.upper() if loud else text


def _farewell(greeting: str, name: Name = None) -> str:
    return f"{greeting}, and goodbye {name}"


@dataclass(frozen=True)
class Request:
    farewell: Annotated[str, FromFlags(_farewell)]
    greeting: Annotated[str, FromFlags(_greeting)]
    times: Times = 1
    submitted: bool = False


def test_flags_come_from_fields_and_from_functions_that_make_fields() -> None:
    flags = flags_of(Request)
    assert list(flags) == ["name", "loud", "times"]  # a flag that two functions need is listed once
    assert [flag.default for flag in flags.values()] == [None, False, 1]


def test_flags_can_be_limited_to_some_fields() -> None:
    assert list(flags_of(Request, only=("greeting",))) == ["name", "loud"]


def test_a_function_gets_flags_and_fields_in_any_order() -> None:
    request = request_of(Request, {"name": "ann", "loud": True, "times": 3}, {"submitted": True, "unknown": 1})
    assert request == Request("HELLO ANN, and goodbye ann", "HELLO ANN", 3, submitted=True)


def test_a_flag_without_a_value_has_its_default() -> None:
    assert request_of(Request, {}) == Request("hello world, and goodbye None", "hello world")


def _shouted(words: str) -> str:
    return words.upper()


@dataclass(frozen=True)
class Incomplete:
    """Has no field `words`, which the function needs."""

    shouted: Annotated[str, FromFlags(_shouted)]


def test_an_argument_of_a_function_must_be_a_flag_or_a_field() -> None:
    with pytest.raises(KeyError, match="words"):
        request_of(Incomplete, {})
