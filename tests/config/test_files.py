"""A broker's properties file is parsed as in Java, and its secrets are never printed."""

from __future__ import annotations

import pytest

from keytail.cli.configuration import Configuration
from keytail.cli.selection import chosen_log_dirs
from keytail.config.files import log_dirs, parse_meta_properties, parse_server_properties
from keytail.config.resolve import from_broker
from keytail.errors import UsageProblem


def test_only_known_keys_are_kept() -> None:
    data = b"""
# a comment
listeners=PLAINTEXT://:9092
ssl.keystore.password=hunter2
sasl.jaas.config=org.apache... password="hunter2";
log.dirs = /data/a, /data/b
log.segment.bytes: 2000000
log.retention.hours 24
"""
    assert parse_server_properties(data, "f") == {
        "log.dirs": "/data/a, /data/b",
        "log.segment.bytes": "2000000",
        "log.retention.hours": "24",
    }


def test_files_are_parsed_with_the_syntax_of_java() -> None:
    data = rb"""log.dirs=/a,\
    /b\u00e9
! also a comment
log\u002esegment.bytes=2000000
log.roll.hours=1
log.roll.hours=2
""" + "log.dir=/été\n".encode("latin-1")
    kept = parse_server_properties(data, "f")
    assert kept == {
        "log.dirs": "/a,/bé",
        "log.segment.bytes": "2000000",
        "log.roll.hours": "2",
        "log.dir": "/été",
    }


def test_an_invalid_file_is_reported_but_not_quoted() -> None:
    with pytest.raises(UsageProblem) as problem:
        parse_server_properties(b"password=hunter2\\u12x\n", "/etc/server.properties")
    assert "invalid properties file: " in str(problem.value)
    assert "/etc/server.properties" in str(problem.value)
    assert "hunter2" not in str(problem.value)
    assert problem.value.__cause__ is None
    assert problem.value.__suppress_context__


def test_a_value_of_a_config_provider_is_refused() -> None:
    with pytest.raises(UsageProblem, match=r"log\.roll\.hours refers to a config provider.* \(f\)"):
        from_broker(parse_server_properties(b"log.roll.hours=${file:/etc/x:hours}\n", "f"), "f")
    assert parse_server_properties(b"ssl.key.password=${file:/etc/x:p}\n", "f") == {}


def test_log_dirs_of_a_config_provider_are_an_error_only_if_they_are_used() -> None:
    broker = from_broker(parse_server_properties(b"log.dirs=${file:/etc/x:dirs}\nlog.dir=/a\n", "f"), "f")
    assert chosen_log_dirs(["/logs"], Configuration(broker=broker)) == ("/logs",)
    with pytest.raises(UsageProblem, match=r"log\.dirs refers to a config provider.* \(f\)"):
        chosen_log_dirs([], Configuration(broker=broker))


@pytest.mark.parametrize(
    ("texts", "dirs"),
    [
        ({}, ()),
        ({"log.dir": "/a"}, ("/a",)),
        ({"log.dirs": "/b, /c", "log.dir": "/a"}, ("/b", "/c")),
        ({"log.dirs": "/b,,/c,"}, ("/b", "/c")),
    ],
)
def test_log_dirs_takes_precedence_over_log_dir(texts, dirs) -> None:
    assert log_dirs(from_broker(texts, "f")) == dirs


def test_the_broker_of_a_log_dir_is_read() -> None:
    assert parse_meta_properties(b"#\nversion=1\nnode.id=12\ncluster.id=x\n", "m") == (1, 12, "x")
    assert parse_meta_properties(b"version=0\nbroker.id=3\n", "m") == (0, 3, None)  # with ZooKeeper
    assert parse_meta_properties(b"version=1\n", "m") == (1, None, None)
    for name in ("node.id", "version"):
        with pytest.raises(UsageProblem, match=rf"invalid {name} 'one': it must be a number \(m\)"):
            parse_meta_properties(f"{name}=one".encode(), "m")


def test_the_broker_of_a_properties_file_is_read() -> None:
    assert from_broker({"node.id": "3"}, "f")["node.id"].value == 3
    assert from_broker({"broker.id": "4"}, "f")["node.id"].value == 4
