"""Determines the owner of all log dirs of a run; tests/cli/test_owner.py tests the effects."""

from __future__ import annotations

import pytest

from keytail.errors import Refused
from keytail.log.owner import Owner, one_owner

ROOT, KAFKA, OTHER = Owner(0, 0, "/root"), Owner(1001, 1001, "/kafka"), Owner(1002, 1002, "/other")


@pytest.mark.parametrize(
    ("changed", "read", "expected"),
    [
        ([], [], None),
        ([ROOT], [ROOT], None),
        ([KAFKA], [], KAFKA),
        ([KAFKA, KAFKA], [ROOT, KAFKA], KAFKA),
        ([], [ROOT, KAFKA, ROOT], KAFKA),
    ],
)
def test_dirs_that_are_only_read_may_also_belong_to_root(
    changed: list[Owner], read: list[Owner], expected: Owner | None
) -> None:
    assert one_owner(changed, read) == expected


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        ([ROOT, KAFKA], []),
        ([KAFKA, ROOT], []),
        ([KAFKA, OTHER], []),
        ([ROOT], [KAFKA]),
        ([KAFKA], [OTHER]),
        ([], [KAFKA, ROOT, OTHER]),
    ],
)
def test_several_owners_are_refused_with_their_names_and_paths(changed: list[Owner], read: list[Owner]) -> None:
    with pytest.raises(Refused, match=r"belongs to .* and /.* to .*: if started as root"):
        one_owner(changed, read)
