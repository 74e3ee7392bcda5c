"""The driver receives the progress of its own tasks while they run, and no task fails because it is reported."""

from __future__ import annotations

import gc
import json
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.log import meter
from keytail.log.fs import LOCAL
from keytail.run import watching
from keytail.run.processes import Processes
from keytail.run.spark.engine import SparkEngine
from keytail.run.watching import (
    HERE,
    LOOPBACK,
    Channel,
    DriverAddress,
    TaskProgress,
    Watch,
    current_channel,
    send_to,
    sending_progress,
)


@pytest.fixture
def reports() -> list[TaskProgress]:
    return []


@pytest.fixture
def watch(reports: list[TaskProgress]) -> Iterator[Watch]:
    with Watch(HERE, reports.append) as made:
        yield made


def read_slowly(path: str, attempt: str) -> int:
    """Read `path` twice, 2.4 s apart, so that even a slow machine reports progress; return the number of bytes."""
    with sending_progress(path, attempt, "first"):
        size = len(LOCAL.read_at(path, 0, 1000))
        with meter.during("second"):
            time.sleep(2.4)
            size += len(LOCAL.read_at(path, 0, 1000))
    return size


# The phases and bytes that read_slowly may report.
POSSIBLE_PROGRESS = {("first", 0), ("first", 1000), ("second", 1000), ("second", 2000), ("first", 2000)}


def _file(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.write_bytes(bytes(1000))
    return str(path)


def _wait_for(on_result: list[TaskProgress], count: int) -> None:
    last_s = time.monotonic() + 60
    while sum(report.is_over for report in on_result) < count:
        assert time.monotonic() < last_s, on_result
        time.sleep(0.01)


@pytest.mark.long
def test_processes_report_their_progress(reports: list[TaskProgress], watch: Watch, tmp_path: Path) -> None:
    paths = [_file(tmp_path, "t-0"), _file(tmp_path, "t-1"), _file(tmp_path, "t-2")]
    with Processes(2) as workers:
        assert workers.driver_address == HERE
        outcomes = workers.run_bundle(paths, read_slowly)
    assert all(outcome.problem is None for outcome in outcomes)
    _wait_for(reports, 3)
    for name in ("t-0", "t-1", "t-2"):
        of_one = [report for report in reports if report.name == name]
        *during, last = [(report.phase, report.read_bytes) for report in of_one]
        assert ("second", 1000) in during
        assert set(during) <= POSSIBLE_PROGRESS
        assert last == ("first", 2000)
        assert [report.is_over for report in of_one] == [False] * len(during) + [True]
        assert len({report.attempt for report in of_one}) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.driver.host": "b1"}, ("b1", "b1")),
        ({"spark.driver.host": "b1", "spark.driver.bindAddress": "0.0.0.0"}, ("b1", "0.0.0.0")),
        ({"spark.driver.host": "[fe80::1]"}, ("fe80::1", "fe80::1")),
        ({}, HERE),
    ],
)
def test_on_a_cluster_the_driver_listens_at_sparks_address(settings: dict[str, str], expected: tuple[str, str]) -> None:
    context = SimpleNamespace(master="spark://m:7077", getConf=lambda: settings)
    assert SparkEngine(SimpleNamespace(sparkContext=context)).driver_address == expected


def test_the_driver_may_listen_at_another_address_than_tasks_connect_to(
    reports: list[TaskProgress], tmp_path: Path
) -> None:
    """Debian's /etc/hosts maps a host's own name to 127.0.1.1, where no other host can reach it."""
    with Watch(DriverAddress("127.0.1.1", "0.0.0.0"), reports.append) as made:
        assert made.channel.host == "127.0.1.1"
        read_slowly(_file(tmp_path, "t-0"), "a")
        _wait_for(reports, 1)


@pytest.mark.spark
def test_tasks_of_spark_report_their_progress(
    spark: Any, reports: list[TaskProgress], watch: Watch, tmp_path: Path
) -> None:
    paths = [_file(tmp_path, "t-0"), _file(tmp_path, "t-1")]
    engine = SparkEngine(spark)
    assert engine.driver_address == HERE
    engine.run_bundle(paths, read_slowly, name="compact t-0 and 1 more")
    _wait_for(reports, 2)
    for name in ("t-0", "t-1"):
        seen = {(report.phase, report.read_bytes) for report in reports if report.name == name}
        assert {("second", 1000), ("first", 2000)} <= seen <= POSSIBLE_PROGRESS
    send_to(None)  # the progress of the next task is not sent
    before = len(reports)
    engine.run_bundle(paths[:1], read_slowly, name="unwatched")
    time.sleep(0.2)
    assert len(reports) == before
    store = spark._jsparkSession.sparkContext().statusStore()
    descriptions = {"compact t-0 and 1 more", "unwatched"}
    jobs = [job for job in _all_of(store.jobsList(None)) if _text(job.description()) in descriptions]
    assert {_text(job.description()) for job in jobs} == descriptions
    for job in jobs:
        stage = store.lastStageAttempt(int(job.stageIds().head()))
        assert _text(stage.description()) == _text(job.description())


def _text(option: Any) -> str:
    return str(option.get()) if option.isDefined() else ""


def _all_of(found: Any) -> Iterator[Any]:
    for number in range(found.size()):
        yield found.apply(number)


def test_messages_not_sent_by_a_task_of_the_run_are_ignored(reports: list[TaskProgress], watch: Watch) -> None:
    channel = watch.channel
    report = json.dumps(["t-0", "a", "map", 7, False]).encode()
    good, hostile = watching._with_code(report, channel.key), report.replace(b"t-0", b"t-1")
    code, other = good[: -len(report)], watching._with_code(hostile, bytes(len(channel.key)))
    bad = [hostile, bytes(len(code)) + hostile, code[:-1] + hostile, code + hostile, other, report, code[:-1] + report]
    bad += [b"", code, good[:-1], code + b"7", good + b" ", b"\xff" * 3000, b"[" * 3000]
    bad += [watching._with_code(text, channel.key) for text in (b"", b"7", report[:-1] + b", 1]")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for data in (*bad, good):
            out.sendto(data, (channel.host, channel.port))
    last_s = time.monotonic() + 60
    while not reports and time.monotonic() < last_s:
        time.sleep(0.01)
    assert reports == [TaskProgress("t-0", "a", "map", 7)]


def test_an_intercepted_message_does_not_allow_forging_another(
    reports: list[TaskProgress], watch: Watch, tmp_path: Path
) -> None:
    """Between hosts, anybody on the network path may read the messages."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.settimeout(60)
        send_to(replace(watch.channel, port=listener.getsockname()[1]))
        try:
            with sending_progress(str(tmp_path / "t-0"), "a", "map"):
                data = listener.recv(4096)
        finally:
            send_to(None)
    forged = data.replace(b"t-0", b"t-1")
    assert forged != data
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for item in (forged, data):
            out.sendto(item, (watch.channel.host, watch.channel.port))
    last_s = time.monotonic() + 60
    while not reports and time.monotonic() < last_s:
        time.sleep(0.01)
    assert [report.name for report in reports] == ["t-0"]
    assert watch.channel.key not in data
    assert repr(watch.channel.key) not in repr(watch.channel)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 9), ("127.0.0.1", 0), ("no-such-host.invalid", 9)])
def test_a_task_whose_driver_does_not_listen_continues(host: str, port: int, tmp_path: Path) -> None:
    path = _file(tmp_path, "t-0")
    send_to(Channel(host, port, b"key"))
    try:
        assert read_slowly(path, "a") == 2000
        with pytest.raises(ZeroDivisionError), sending_progress(path, "b"):
            1 / 0
    finally:
        send_to(None)
    assert current_channel() is None


def test_a_task_looks_up_the_name_of_the_driver_once(
    reports: list[TaskProgress], watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated look-ups would delay the task if name resolution is slow."""
    asked: list[Any] = []

    def find(host: str, port: int, **how: Any) -> list[Any]:
        asked.append(host)
        return socket_getaddrinfo("127.0.0.1", port, **how)

    socket_getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr("socket.getaddrinfo", find)
    send_to(Channel("driver.example", watch.channel.port, watch.channel.key))
    try:
        read_slowly(_file(tmp_path, "t-0"), "a")
    finally:
        send_to(None)
    _wait_for(reports, 1)
    assert len(reports) > 1
    assert asked == ["driver.example"]


def test_a_watch_that_finds_no_port_leaves_no_socket() -> None:
    """192.0.2.1 is not an address of any machine."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="assign"):
            Watch(DriverAddress(LOOPBACK, "192.0.2.1"), print)
        gc.collect()
    assert [str(item.message) for item in reported if issubclass(item.category, ResourceWarning)] == []


def test_a_watch_ends_immediately_and_leaves_no_open_port(reports: list[TaskProgress]) -> None:
    started_s = time.monotonic()
    for _ in range(20):
        with Watch(HERE, reports.append) as made:
            assert current_channel() == made.channel
        assert current_channel() is None
    assert time.monotonic() - started_s < 10  # without waking the thread, each watch would take a second
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
        again.bind((made.channel.host, made.channel.port))
