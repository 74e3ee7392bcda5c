"""The benchmark on a small log: it has figures for every side and the result of Kafka, and finds a difference."""

import json

import pytest

from tests.bench import copies, dump, recover, run, shapes
from tests.bench.report import Figure
from tests.interop.conftest import kafka  # noqa: F401 (skips, with the reason, where there is no Kafka)

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("kafka")]

SMALL = [
    "--records=5000",
    "--batch-records=10",
    "--keys=500",
    "--segment-bytes=250000",
    "--runs=2",
    "--no-command",
]


def test_a_small_run_has_figures_and_the_result_of_kafka(tmp_path, capsys):
    """The log is compressed, unlike those of the next two tests."""
    report = tmp_path / "figures.json"
    status = run.main([*SMALL, "--codec=lz4", f"--dir={tmp_path}", f"--json={report}", "--seed=5"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "--seed=5" in printed
    assert "both left the same" in printed
    answer = json.loads(report.read_text())
    assert [figure["name"][:3] for figure in answer["figures"]] == ["Kaf", "(1)", "(2)", "(2)"]
    for figure in answer["figures"]:
        assert len(figure["seconds"]) == 2
        assert figure["min_s"] <= figure["median_s"] <= figure["max_s"]
    assert set(answer["figures"][2]["phases_median_s"]) >= {"map", "write", "prove", "replace"}
    assert answer["private_memory"]["peak_bytes"] < answer["private_memory"]["map_bytes"] + (512 << 20)
    assert 0 < answer["kafka_round"]["records_after"] <= 500
    assert list(tmp_path.iterdir()) == [report]


def test_a_result_that_differs_from_that_of_kafka_fails_the_run(tmp_path, capsys, monkeypatch):
    fresh_copy = copies.fresh_copy

    def remove_last_batch(source, target):
        copy = fresh_copy(source, target)
        if target.name == "task":  # remove the last batch, of which all records are retained, on keytail's side
            log = max(path for path in copy.glob("*/*.log") if path.stat().st_size)
            with log.open("r+b") as file:
                header = file.read(12)
                file.truncate(log.stat().st_size - 12 - int.from_bytes(header[8:], "big"))
        return copy

    monkeypatch.setattr(run, "fresh_copy", remove_last_batch)
    assert run.main([*SMALL, f"--dir={tmp_path}", "--seed=5"]) == 1
    assert "DIFFERS FROM KAFKA'S" in capsys.readouterr().out


def test_shapes_have_rows_with_limits_and_the_results_of_kafka(tmp_path, capsys):
    report = tmp_path / "figures.json"
    flags = ["--shapes=clean,zstd", "--scale=0.002", "--runs=1", "--seed=5"]
    flags += [f"--dir={tmp_path}", f"--json={report}"]
    assert shapes.main(flags) == 0, capsys.readouterr().out
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows] == ["clean", "zstd"]
    for row in rows:
        assert set(row["phase_limits_s"]) == {"map", "write", "prove"} <= set(row["phases_s"])
        assert 0 < row["limit_s"] and 0 < row["cpu_s"] and row["differences"] == []
    assert rows[0]["phases_s"]["check"] > 0  # the seconds that checking the clean section takes
    assert list(tmp_path.iterdir()) == [report]


def test_an_unknown_shape_is_reported(capsys):
    with pytest.raises(SystemExit):
        shapes.main(["--shapes=none,brotli"])
    assert "no shape brotli" in capsys.readouterr().err


def test_a_small_index_rebuild_has_figures_and_the_files_of_kafka(tmp_path, capsys):
    report = tmp_path / "figures.json"
    flags = ["--megabytes=2", "--runs=1", f"--dir={tmp_path}", f"--json={report}", "--seed=5"]
    assert recover.main(flags) == 0, capsys.readouterr().out
    answer = json.loads(report.read_text())
    assert [shape["batch_records"] for shape in answer["shapes"]] == [100, 1]
    for shape in answer["shapes"]:
        assert shape["differences"] == []
        assert [len(figure["seconds"]) for figure in shape["figures"]] == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [report]


def test_ratios_are_quotients_of_seconds():
    base, ours = Figure("theirs", [4.0, 6.0, 5.0]), Figure("ours", [1.0, 0.5, 2.0])
    assert ours.ratio(base) == 5.0
    assert ours.best_ratio(base) == 8.0


def test_dumps_are_measured_and_compared(capsys):
    assert dump.main(["--records=3000", "--runs=1"]) == 0
    out = capsys.readouterr().out
    assert "dump --output json" in out and "the text is Kafka's, byte for byte" in out
