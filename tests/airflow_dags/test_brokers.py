"""The inventory of brokers: its contents, and that each error in it is reported with file, broker and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import DAGS


def test_the_sample_is_valid(inventory: Any) -> None:
    first, second = inventory.brokers(str(DAGS / "keytail_brokers.sample.toml"))
    assert (first.name, second.name) == ("b1", "b2")
    assert first.on_host[-1] == "kafka@b1.example"
    assert first.commands["stop"] == ("sudo", "-n", "systemctl", "stop", "kafka")
    assert first.command("verify", "--master", "local[2]") == (
        "/opt/keytail/bin/keytail", "verify", "--config", "/etc/kafka/server.properties", "--topic", "orders|users",
        "--master", "local[2]", "--output", "json",
    )  # fmt: skip


def test_omitted_keys_have_defaults(inventory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.toml"
    path.write_text('[[broker]]\nname = "b"\nlog_dirs = ["/a", "/b c"]\n')
    monkeypatch.setenv("KEYTAIL_BROKERS", str(path))
    [only] = inventory.brokers()
    assert only == inventory.Broker("b", log_dirs=("/a", "/b c"))
    assert only.command("plan") == ("keytail", "plan", "--log-dirs", "/a,/b c", "--output", "json")
    assert inventory.broker("b") == only
    with pytest.raises(inventory.InventoryError, match=r"no broker 'x'; it has b"):
        inventory.broker("x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no broker"),
        ("broker = 3", "has no broker"),
        ("[broker]\nname = 'b'", "has no broker"),
        ("x = [", "cannot be read as TOML"),
        ("# für b1, not in UTF-8", "cannot be read as TOML"),
        ("brokers = 1", "unknown key 'brokers'"),
        ("[[broker]]\nconfig = '/c'", "broker 1 has no name"),
        ("[[broker]]\nname = ' '\nconfig = '/c'", "broker 1 has no name"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\n[[broker]]\nname = 'a'\nconfig = '/d'", "two brokers are named 'a'"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\nhost = 'x'", r"broker 1 \(a\): unknown key 'host'; the keys are name"),
        ("[[broker]]\nname = 'a'", "neither config.*nor log_dirs"),
        ("[[broker]]\nname = 'a'\nlog_dirs = []", "neither config.*nor log_dirs"),
        ("[[broker]]\nname = 'a'\nconfig = ''", "config must be a string"),
        ("[[broker]]\nname = 'a'\nconfig = 7", "config must be a string"),
        ("[[broker]]\nname = 'a'\nlog_dirs = '/a'", "log_dirs must be a list of words"),
        ("[[broker]]\nname = 'a'\nlog_dirs = ['/a,/b']", "absolute path without a comma"),
        ("[[broker]]\nname = 'a'\nlog_dirs = ['a']", "absolute path without a comma"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\non_host = 'ssh b1'", "on_host must be a list of words"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\nflags = ['--topic', 3]", "flags must be a list of words"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\ncommands = ['x']", "commands must be a table"),
        ("[[broker]]\nname = 'a'\nconfig = '/c'\ncommands = {stop = 'x'}", r"commands\.stop must be a list"),
    ],
)
def test_an_error_is_reported(inventory: Any, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "b.toml"
    path.write_text(text, "latin-1")
    with pytest.raises(inventory.InventoryError, match=message) as problem:
        inventory.brokers(str(path))
    assert str(path) in str(problem.value)


def test_a_missing_file_is_reported(inventory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYTAIL_BROKERS", str(tmp_path / "none.toml"))
    with pytest.raises(inventory.InventoryError, match="Set KEYTAIL_BROKERS"):
        inventory.brokers()
