"""`--output json-v1` prints one object, with the exit status of the process, however a run ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from keytail.cli import rows as show
from keytail.cli.envelope import EnvelopeError, now_ms
from keytail.cli.stopping import Stopped
from keytail.doctor.command import CheckRow
from keytail.errors import KeytailError
from keytail.run.ended import SparkEnded
from tests.command_line import Run

V1 = ("--output", "json-v1")
DESCRIBE = "keytail.describe.driver.describe"
VERIFY = "keytail.verify.driver.verify"


def ending(problem: BaseException, row: Any = None) -> Any:
    """Return a command's function that reports a row, if there is one, and ends with the error."""

    def run(request: Any, on_row: Any = None) -> Any:
        if row is not None:
            on_row(row)
        raise problem

    return run


def failed(run: Run, log_dir: Path, command: str = "describe", *more: str) -> dict[str, Any]:
    done = run(command, "--log-dirs", log_dir, *more, *V1)
    made = json.loads(done.stdout)
    assert made["exit_status"] == done.exit_code
    return made


def test_wrong_usage_is_an_object_with_its_slug(run: Run, log_dir: Path) -> None:
    before_ms = now_ms()
    made = failed(run, log_dir, "describe", "--quiet", "--verbose")
    assert before_ms <= made["start_ms"] <= made["end_ms"] <= now_ms()
    assert (made["exit_status"], made["command"], made["rows"]) == (2, "describe", [])
    assert made["error"] == {
        "slug": "conflicting-flags", "message": "--quiet and --verbose cannot be combined",
        "remedy": "Give only one of them",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compact", "--nosuch", *V1), "No such option: --nosuch. Did you mean --now?"),
        (("compact", "--output=json-v1", "--log-dirs"), "Option '--log-dirs' requires an argument."),
        (("compact", *V1, "--now", "soon"), "Invalid value for '--now'"),
        (("export", "--output", "table", *V1), "Missing option '--to'"),
        (("compact", *V1, "--output", "json", "--nosuch"), ""),
        (("compact", "--output=json", "--nosuch"), ""),
        (("compact", "--nosuch", "--output"), ""),
        (("dump", "--nosuch", *V1), ""),
        (("nosuch", *V1), ""),
        (("export",), ""),
    ],
)
def test_an_error_of_the_syntax_is_an_object_if_it_is_requested(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    before_ms, done, after_ms = now_ms(), run(*words), now_ms()
    assert done.exit_code == 2
    assert "Error" in done.stderr
    if not message:
        assert done.stdout == ""
        return
    made = json.loads(done.stdout)
    assert (made["command"], made["exit_status"], made["rows"], made["run_id"]) == (words[0], 2, [], None)
    assert made["error"].pop("message").startswith(f"the command line is invalid: {message}")
    remedy = f"Run `keytail {words[0]} -h`, which lists the flags"
    assert made["error"] == {"slug": "invalid-command-line", "remedy": remedy}
    assert before_ms <= made["start_ms"] <= made["end_ms"] <= after_ms


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (KeytailError("a", path="/x", offset=7, remedy="Do b", slug="c-d"), ("c-d", "a (/x, offset 7)", "Do b")),
        (KeytailError("a"), (None, "a", "")),
        (OSError(28, "No space left on device", "/x"), ("no-space", "No space left on device (/x)", None)),
        (MemoryError(), ("out-of-memory", None, None)),
    ],
)
def test_an_error_is_in_the_object(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch, problem: Any, expected: tuple[str | None, ...]
) -> None:
    monkeypatch.setattr(DESCRIBE, ending(problem))
    made = failed(run, log_dir)
    assert (made["exit_status"], made["rows"]) == (1, [])
    for found, wanted in zip(made["error"].values(), expected, strict=True):
        assert found == wanted or (wanted is None and found)


def test_a_stopped_run_has_the_rows_that_it_reported(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = CheckRow("a check", "ok", "")
    monkeypatch.setattr(VERIFY, ending(Stopped(15), row))
    made = failed(run, log_dir, "verify")
    assert (made["exit_status"], [item["check"] for item in made["rows"]]) == (143, ["a check"])
    assert made["error"]["slug"] is None
    assert made["error"]["message"] == "interrupted by SIGTERM: 1 ok"
    assert "again" in made["error"]["remedy"]
    monkeypatch.setattr(VERIFY, ending(SparkEnded(), row))
    made = failed(run, log_dir, "verify")
    assert (made["exit_status"], made["error"]["slug"], len(made["rows"])) == (1, "spark-ended", 1)
    monkeypatch.setattr(VERIFY, ending(KeytailError("a"), row))
    assert len(failed(run, log_dir, "verify")["rows"]) == 1


def test_the_exit_status_includes_the_files_of_the_run(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file is written after the rows are known."""

    def fail(path: str, write: object) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr("keytail.cli.quarantine.write_whole", fail)
    made = failed(run, log_dir, "verify", "--rows-file", str(tmp_path / "rows.json"))
    assert (made["exit_status"], made["error"], len(made["rows"])) == (1, None, 3)


@pytest.mark.parametrize("count", [0, 2, show.MAX_DRAWN + 1])
def test_objects_with_many_rows_are_valid(count: int) -> None:
    rows = [CheckRow(str(number), "ok", "") for number in range(count)]
    file = io.StringIO()
    show.write_json(rows, file, {"version": 1, "error": EnvelopeError("a-b", "c", "")})
    made = json.loads(file.getvalue())
    assert [row["check"] for row in made["rows"]] == [row.check for row in rows]
    assert made["error"] == {"slug": "a-b", "message": "c", "remedy": ""}
