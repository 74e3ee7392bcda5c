"""Numbers outside the range of a flag are usage errors, and never cause a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from keytail.cli import options as o
from keytail.cli.options import parse_time
from keytail.errors import UsageProblem
from keytail.main.main import app
from tests.command_line import Run
from tests.log_dirs import BASE_MS

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
LAST_MS = 253_402_300_799_999
BEYOND = [str(2**63), str(2**64), "9" * 30, "9" * 5000]


def _flags(wanted: Any) -> list[tuple[str, str]]:
    kinds = [
        (name, item.opts[0], item.type_descriptor) for name, command in COMMANDS.items() for item in command.params
    ]
    return [(name, flag) for name, flag, kind in kinds if wanted(kind)]


SIZES = _flags(lambda kind: kind.parameter_info.parser is o.size_bytes)
NUMBERS = [flag for flag in _flags(lambda kind: kind.annotation is int) if flag not in SIZES]


def test_the_number_flags_are_found() -> None:
    assert {("plan", "--now"), ("dump", "--from-offset"), ("lookup", "--offset"), ("audit", "--examples")} <= {*NUMBERS}
    assert {("compact", "--map-memory"), ("import", "--segment-bytes")} <= {*SIZES}
    assert {flag for _, flag in _flags(lambda kind: kind.annotation is float)} == {"--deadline"}


@pytest.mark.parametrize("text", ["-1", *BEYOND, "1.5", "x", ""])
@pytest.mark.parametrize(("command", "flag"), NUMBERS)
def test_a_number_outside_its_range_is_a_usage_error(run: Run, command: str, flag: str, text: str) -> None:
    done = run(command, flag, text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert isinstance(done.exception, SystemExit)
    assert flag in done.stderr
    assert "is not a whole number from" in " ".join(done.stderr.split())


@pytest.mark.parametrize("text", ["-1", *BEYOND, "99999999t", "9e9", "x", "", "1.5.5", "nan", "inf"])
@pytest.mark.parametrize(("command", "flag"), SIZES)
def test_an_invalid_size_is_a_usage_error(run: Run, command: str, flag: str, text: str) -> None:
    done = run(command, flag, text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert isinstance(done.exception, SystemExit)
    assert flag in done.stderr


@pytest.mark.parametrize("text", ["-1", *BEYOND, "nan", "inf", "1e3", "x", ""])
def test_an_invalid_deadline_is_a_usage_error(run: Run, text: str) -> None:
    done = run("compact", "--deadline", text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "invalid number of minutes" in " ".join(done.stderr.split())


def test_sizes_are_exact() -> None:
    assert o.size_bytes(str(2**63 - 1)) == 2**63 - 1
    assert o.size_bytes("8388607t") == 8388607 << 40
    assert (o.size_bytes("1.5GiB"), o.size_bytes("0.1k"), o.size_bytes("512 m")) == (3 << 29, 102, 512 << 20)
    for text in ("8388608t", "9223372036854775807.5", "99999999t"):
        with pytest.raises(typer.BadParameter, match=r"invalid size .*: use 0 to 9223372036854775807 bytes"):
            o.size_bytes(text)


@pytest.mark.parametrize("now", ["0", "1", str(BASE_MS), str(LAST_MS)])
@pytest.mark.parametrize("command", ["plan", "compact", "expire", "describe"])
def test_any_time_in_the_range_is_accepted(run: Run, log_dir: Path, command: str, now: str) -> None:
    flags = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
    flags += ("--topic-config", "retention.ms=1", "--topic-config", "delete.retention.ms=9223372036854775807")
    done = run(command, "--log-dirs", log_dir, *flags, "--now", now)
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code in (0, 1, 3)
    assert "orders-0" in done.stdout


@pytest.mark.parametrize("bound", [0, 2**63 - 1])
def test_any_offset_and_position_in_the_range_is_accepted(run: Run, log_dir: Path, bound: int) -> None:
    log = log_dir / "orders-0" / f"{100:020d}.log"
    for flags in (
        ("dump", log, "--from-offset", bound),
        ("dump", log, "--to-offset", bound),
        ("dump", log, "--from-position", bound),
        ("dump", log, "--to-position", bound),
        ("dump", log, "--max-bytes", bound),
        ("lookup", "--log-dirs", log_dir, "--offset", bound),
        ("lookup", "--log-dirs", log_dir, "--timestamp", bound),
        ("plan", "--log-dirs", log_dir, "--map-memory", bound),
        ("compact", "--log-dirs", log_dir, "--max-scratch-bytes", bound),
    ):
        done = run(*map(str, flags))
        assert "No such option" not in done.stderr, flags
        assert isinstance(done.exception, SystemExit | None), (flags, done.exception)


@pytest.mark.parametrize("text", ["-1", *BEYOND])
def test_a_time_outside_the_range_is_a_usage_error(run: Run, log_dir: Path, text: str) -> None:
    with pytest.raises(UsageProblem, match=r"\[time-out-of-range\]"):
        parse_time(text)
    done = run("lookup", "--log-dirs", log_dir, "--timestamp", text)
    assert done.exit_code == 2


@pytest.mark.parametrize("number", ["-1", *BEYOND, "2147483648", "\u0663"])
@pytest.mark.parametrize("command", ["plan", "verify", "describe", "lookup"])
def test_an_invalid_partition_number_is_a_usage_error(run: Run, log_dir: Path, command: str, number: str) -> None:
    more = ("--offset", "0") if command == "lookup" else ()
    done = run(command, "--log-dirs", log_dir, "--partitions", f"orders-{number}", *more)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2


@pytest.mark.parametrize("number", [*BEYOND, "-2", "x"])
def test_an_invalid_topic_setting_is_a_usage_error(run: Run, log_dir: Path, number: str) -> None:
    for key in ("segment.bytes", "retention.ms", "min.cleanable.dirty.ratio"):
        done = run("plan", "--log-dirs", log_dir, "--topic-config", f"orders:{key}={number}")
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code == 2, (key, number)
