"""The listing is retried if a broker may be running, and only then."""

from __future__ import annotations

import pytest

from keytail.errors import CorruptLog, KeytailError
from keytail.log.listed import retry_beside_broker


def failing(problems: list[Exception]) -> list[str]:
    left = iter(problems)

    def look() -> str:
        calls.append("look")
        for problem in left:
            raise problem
        return "seen"

    calls: list[str] = []
    calls.append(retry_beside_broker(look, clean_shutdown=False))
    return calls


def test_a_listing_that_a_broker_disturbed_is_retried() -> None:
    assert failing([]) == ["look", "seen"]
    assert failing([FileNotFoundError(), CorruptLog("shorter")]) == ["look", "look", "look", "seen"]


def test_after_three_attempts_the_last_problem_is_reported() -> None:
    with pytest.raises(CorruptLog, match="third"):
        failing([FileNotFoundError(), OSError(), CorruptLog("third"), CorruptLog("fourth")])
    with pytest.raises(ZeroDivisionError):
        failing([ZeroDivisionError()])


def test_without_a_running_broker_a_problem_is_reported_immediately() -> None:
    problems = iter([KeytailError("first"), KeytailError("second")])

    def look() -> None:
        raise next(problems)

    with pytest.raises(KeytailError, match="first"):
        retry_beside_broker(look, clean_shutdown=True)
