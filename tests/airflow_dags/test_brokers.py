"""The inventory of brokers: its contents, and that each error in it is reported with Connection, broker and key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.airflow_dags.conftest import DAGS

WHERE = "the Connection k"


def test_the_example_of_the_page_is_valid(inventory: Any) -> None:
    page = (DAGS / "README.md").read_text()
    [example] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    first, second = inventory.brokers_of(json.loads(example), WHERE)
    assert (first.name, second.name) == ("b1", "b2")
    assert first.commands["stop"] == ("sudo", "-n", "systemctl", "stop", "kafka")
    assert first.command("verify", "--master", "local[2]") == (
        "/opt/keytail/bin/keytail", "verify", "--config", "/etc/kafka/server.properties", "--topic", "orders|users",
        "--master", "local[2]", "--output", "json",
    )  # fmt: skip


def test_omitted_keys_have_defaults(inventory: Any) -> None:
    [only] = inventory.brokers_of({"brokers": [{"name": "b", "log_dirs": ["/a", "/b c"]}]}, WHERE)
    assert only == inventory.Broker("b", log_dirs=("/a", "/b c"))
    assert only.command("plan") == ("keytail", "plan", "--log-dirs", "/a,/b c", "--output", "json")


A = {"name": "a", "config": "/c"}


@pytest.mark.parametrize(
    ("brokers", "message"),
    [
        ([], "has no broker"),
        (3, "has no broker"),
        ({"name": "b"}, "has no broker"),
        (["b"], "has no broker"),
        ([{"config": "/c"}], "broker 1 has no name"),
        ([{"name": " ", "config": "/c"}], "broker 1 has no name"),
        ([A, {"name": "a", "config": "/d"}], "two brokers are named 'a'"),
        ([{**A, "host": "x"}], r"broker 1 \(a\): unknown key 'host'; the keys are name"),
        ([{"name": "a"}], "neither config.*nor log_dirs"),
        ([{"name": "a", "log_dirs": []}], "neither config.*nor log_dirs"),
        ([{"name": "a", "config": ""}], "config must be a string"),
        ([{"name": "a", "config": 7}], "config must be a string"),
        ([{"name": "a", "log_dirs": "/a"}], "log_dirs must be a list of words"),
        ([{"name": "a", "log_dirs": ["/a,/b"]}], "absolute path without a comma"),
        ([{"name": "a", "log_dirs": ["a"]}], "absolute path without a comma"),
        ([{**A, "on_host": "sh -c"}], "on_host must be a list of words"),
        ([{**A, "flags": ["--topic", 3]}], "flags must be a list of words"),
        ([{**A, "commands": ["x"]}], "commands must be an object"),
        ([{**A, "commands": {"stop": "x"}}], r"commands\.stop must be a list"),
    ],
)
def test_an_error_is_reported(inventory: Any, brokers: Any, message: str) -> None:
    with pytest.raises(inventory.InventoryError, match=message) as problem:
        inventory.brokers_of({"brokers": brokers}, WHERE)
    assert str(problem.value).startswith(WHERE)


def test_an_extra_of_another_kind_is_reported(inventory: Any) -> None:
    for extra, message in (([], "must be an object"), ({"broker": [A]}, "unknown key 'broker'"), ({}, "has no broker")):
        with pytest.raises(inventory.InventoryError, match=message):
            inventory.brokers_of(extra, WHERE)
