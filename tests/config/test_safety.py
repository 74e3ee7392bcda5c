"""If several values of a setting are possible, a value that allows the fewest removals is used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.config.keys import KEYS, Value
from keytail.config.resolve import safest_value

LARGER_IS_SAFER = {key.name for key in KEYS.values() if key.safer == "larger"}
RETENTION = {key.name for key in KEYS.values() if key.safer == "longer"}
COMPACT, DELETE, BOTH, NEITHER = ("compact",), ("delete",), ("compact", "delete"), ()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("cleanup.policy", [DELETE, COMPACT], NEITHER),
        ("cleanup.policy", [COMPACT, DELETE], NEITHER),
        ("cleanup.policy", [COMPACT, BOTH], COMPACT),
        ("cleanup.policy", [BOTH, COMPACT], COMPACT),
        ("cleanup.policy", [DELETE, BOTH], DELETE),
        ("cleanup.policy", [BOTH, ("delete", "compact")], ("delete", "compact")),
        ("cleanup.policy", [NEITHER, COMPACT], NEITHER),
        ("cleanup.policy", [COMPACT, NEITHER], NEITHER),
        ("delete.retention.ms", [5, 3], 5),
        ("min.compaction.lag.ms", [0, 7, 3], 7),
        ("max.compaction.lag.ms", [9, 8], 9),
        ("min.cleanable.dirty.ratio", [0.5, 0.01], 0.5),
        ("producer.id.expiration.ms", [1, 2], 2),
        ("retention.ms", [1, 2], 2),
        ("retention.ms", [-1, 2], -1),
        ("retention.ms", [2, -1], -1),
        ("retention.bytes", [-1, 0], -1),
        ("remote.storage.enable", [True, False], True),
        ("remote.storage.enable", [False, True], True),
        ("remote.storage.enable", [False, False], False),
        ("segment.bytes", [5, 3, 4], 4),
        ("internal.segment.bytes", [None, 3], 3),
        ("internal.segment.bytes", [3, None], None),
        ("compression.type", ["zstd", "lz4"], "lz4"),
        ("message.format.version", ["0.9.0", "0.10.2-IV0", "2.8"], "0.9.0"),
        ("message.format.version", ["2.8", None, "0.11.0"], "0.11.0"),
        ("message.format.version", [None, None], None),
    ],
)
def test_the_safest_of_several_values_is_chosen(name: str, values: list[Value], expected: Value) -> None:
    assert safest_value(name, values) == expected


POLICIES = st.permutations(["compact", "delete"]).flatmap(
    lambda items: st.integers(0, 2).map(lambda count: tuple(items[:count]))
)
OF_KIND: dict[str, st.SearchStrategy] = {
    "int": st.integers(-2, 10),
    "long": st.integers(-2, 10),
    "double": st.floats(0, 1),
    "boolean": st.booleans(),
    "string": st.sampled_from(["a", "b"]),
    "version": st.sampled_from(["0.10.2", "0.9.0", "2.8"]),
}


@st.composite
def possible_values(draw: st.DrawFn) -> tuple[str, list[Value]]:
    name = draw(st.sampled_from(sorted(key.name for key in KEYS.values())))
    kind = KEYS[name].kind
    values = POLICIES if name == "cleanup.policy" else OF_KIND.get(kind, st.just(("x",)))
    return name, draw(st.lists(values, min_size=1, max_size=5))


def removes_no_more(name: str, item: Value, other: Value) -> bool:
    """Return whether `other` permits every removal that `item` permits."""
    if name == "cleanup.policy":
        assert isinstance(item, tuple)
        assert isinstance(other, tuple)
        return set(item) <= set(other)
    if name == "remote.storage.enable":
        return bool(item) or not other
    if name in RETENTION | LARGER_IS_SAFER:
        endless = name in RETENTION
        low, high = (float("inf") if endless and v < 0 else v for v in (other, item))  # type: ignore[operator, union-attr]
        return low <= high
    return True


@given(possible_values())
def test_the_safest_value_removes_no_more_than_any_other(doubt: tuple[str, list[Value]]) -> None:
    name, values = doubt
    chosen = safest_value(name, values)
    assert all(removes_no_more(name, chosen, value) for value in values)
    assert name == "cleanup.policy" or chosen in values


@given(possible_values())
def test_the_order_of_values_matters_only_for_settings_that_affect_no_removal(
    doubt: tuple[str, list[Value]],
) -> None:
    name, values = doubt
    assert safest_value(name, values[:1]) == values[0]
    assert safest_value(name, values * 2) == safest_value(name, values)
    if name in LARGER_IS_SAFER or name == "remote.storage.enable":
        assert safest_value(name, values[::-1]) == safest_value(name, values)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] <= pair[1]), min_size=1))
def test_the_safest_minimum_lag_is_not_above_the_safest_maximum_lag(pairs: list[tuple[int, int]]) -> None:
    low = safest_value("min.compaction.lag.ms", [pair[0] for pair in pairs])
    high = safest_value("max.compaction.lag.ms", [pair[1] for pair in pairs])
    assert isinstance(low, int)
    assert isinstance(high, int)
    assert low <= high
