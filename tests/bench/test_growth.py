"""The curves of tiny logs, the page with curves, and the committed tables."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.bench import growth, growth_report, petabyte
from tests.bench.growth import KAFKA, KAFKA_SMALL, TASK, TASK_SMALL
from tests.interop.conftest import kafka  # noqa: F401 (skips, with the reason, where there is no Kafka)

MEASURED = Path(__file__).with_name("growth.json")


@pytest.mark.interop
@pytest.mark.spark
@pytest.mark.usefixtures("kafka")
@pytest.mark.soak("test_bench.py: the runs and their figures")
def test_every_curve_has_points_and_adds_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth.os, "cpu_count", lambda: 1)  # each number of cores needs a session
    figures = tmp_path / "growth.json"
    figures.write_text('{"curves": {"cores": "as it was"}}')
    flags = ["--quick", "--runs=1", "--seed=5", f"--json={figures}", f"--dir={tmp_path}"]
    curves = ["records", "keys", "segments", "partitions", "unique", "checkpoint"]
    assert growth.main([*flags, f"--curves={','.join(curves)}"]) == 0
    found = json.loads(figures.read_text())["curves"]
    assert found.pop("cores") == "as it was"
    assert list(found) == curves
    for name, sides in {
        "records": {KAFKA, TASK}, "keys": {KAFKA, TASK}, "segments": {KAFKA, TASK},
        "partitions": {KAFKA, "keytail on local[1]"}, "unique": {KAFKA, TASK, KAFKA_SMALL, TASK_SMALL},
    }.items():  # fmt: skip
        for point in found[name]["points"]:
            assert set(point["sides"]) == sides
            assert all(0 < seconds < 600 for side in point["sides"].values() for seconds in side["seconds"])
    records, segments = found["records"]["points"], found["segments"]["points"]
    assert [point["records"] for point in records] == list(growth.QUICK.records)
    assert records[2]["log_bytes"] == pytest.approx(4 * records[0]["log_bytes"], rel=0.02)
    assert [point["segments"] for point in segments] == pytest.approx([1, 8], abs=1)
    assert segments[0]["log_bytes"] == segments[1]["log_bytes"]
    assert [point["log_bytes"] for point in found["partitions"]["points"]] == pytest.approx([1.17e6] * 2, rel=0.05)
    rounds = [
        [point["sides"][side]["rounds"] for side in (KAFKA_SMALL, TASK_SMALL)] for point in found["unique"]["points"]
    ]
    assert [kafkas for kafkas, _ in rounds] == [[1], [3]], "9,811 keys fit into a map of 9,830, 19,633 do not"
    assert all(ours >= kafkas for kafkas, ours in rounds), "keytail's map has room for fewer keys while it grows"
    assert list(tmp_path.iterdir()) == [figures]


def _curve(xs: list[int], seconds_of: Any, sides: tuple[str, ...] = (KAFKA, TASK), **more: Any) -> dict[str, Any]:
    points = []
    for x in xs:
        values = {side: seconds_of(x) * (n + 1) for n, side in enumerate(sides)}
        of_sides = {
            side: {"seconds": [s, s * 2, s], "cpu_seconds": [s], "records_after": [x], "peak_bytes": [x << 20],
                   "before_bytes": [1 << 20], "rounds": [x], "replace_s": [x * 0.001], "survey_s": [x * 0.002]}
            for side, s in values.items()
        }  # fmt: skip
        points.append({"x": x, "records": x, "log_bytes": x * 10**9, "segments": x, "sides": of_sides})
    facts = {"cpu": "<cpu>", "cores": "2", "memory": "1 GiB", "system": "L", "load_at_start": "0.1"}
    message = {"machine": facts, "load_at_end": "0.2", "date": "2020-01-01 00:00 UTC", "seed": 7, "runs": 3}
    return {"title": "A & B", "x": "x", "points": points, "command": "python <it>", **message, **more}


def _found() -> dict[str, Any]:
    found = {name: _curve([1, 2, 4], lambda x: 0.5 + 3.0 * x) for name in growth_report.SECTIONS}
    found["cores"] = _curve([1, 2], lambda x: 8.0 / x, ("keytail on Spark",))
    found["partitions"] = _curve([1, 10], lambda x: 1 + 0.01 * x, (KAFKA, "keytail on local[1]"))
    found["checkpoint"] = _curve([1000, 10_000], lambda x: x * 1e-6, ("keytail's driver",))
    return {"curves": found}


class _Page(HTMLParser):
    """Collects the resources, ids and open tags of a page, and its text by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.ids, self.open, self.cells = [], [], [], []
        self.raw = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "path", "use"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                self.asked.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)
        if self.open and self.open[-1] == "pre":
            self.raw += data


def test_the_page_needs_no_other_file_and_contains_every_number() -> None:
    found = _found()
    text = growth_report.page(found)
    seen = _Page()
    seen.feed(text)
    assert seen.open == []
    assert all(link.startswith("#") for link in seen.asked), "the page must not load other files"
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert len(seen.ids) == len(set(seen.ids))
    assert {link[1:] for link in seen.asked} | set(re.findall(r"url\(#([\w-]+)\)", text)) <= set(seen.ids)
    assert json.loads(seen.raw) == found
    drawings = "".join(re.findall(r"<svg.*?</svg>", text))
    assert drawings.count("<svg") == len(found["curves"]) + 1
    assert not re.findall(r"#\w{3,6}\b", drawings), "drawings must use only colours of the page"
    for curve in found["curves"].values():
        assert curve["date"] in text
        for point in curve["points"]:
            for side in point["sides"].values():
                assert f"{side['seconds'][0]:.3f}" in seen.cells
                assert f"{side['seconds'][1]:.3f}" in seen.cells
    assert "<cpu>" not in text and "&lt;cpu&gt;" in text
    assert text.count("seed 7, 3 runs, load 0.1 at start, 0.2 at end") == len(found["curves"])


@pytest.mark.parametrize(("power", "words"), [(1, "Linear in bytes."), (1.05, "Linear in"), (1.2, "Not linear in")])
def test_the_page_states_whether_cost_is_linear(power: float, words: str) -> None:
    found = {"curves": {"records": _curve([1, 10, 20, 40], lambda x: 2.0 * x**power)}}
    assert f'<p class="lead">{words}' in growth_report.page(found)


def test_linear_and_quadratic_growth_are_distinguished() -> None:
    fixed, slope, _ = growth_report.cost_of_bytes(_curve([1, 2, 50], lambda x: 0.5 + 3.0 * x)["points"], KAFKA)
    assert (fixed, slope) == pytest.approx((0.5, 3.0))
    for power in (1, 2):
        points = _curve([1, 10, 20, 40], lambda x, power=power: 2.0 * x**power)["points"]
        assert growth_report.cost_of_bytes(points, KAFKA)[2] == pytest.approx(power)


def test_a_petabyte_is_the_product_of_measurements_and_assumptions() -> None:
    assumed = petabyte.Assumed(machines=(10,), cores=10, disk_bytes_per_s=1e9, partitions_per_log_dir=5_500)
    measured = petabyte.Measured.of(_found(), assumed)
    assert measured.kafka_cpu_s_a_gb == pytest.approx(3.0)
    assert measured.cpu_s_a_gb == pytest.approx(6.0)
    assert measured.replace_s_per_segment == pytest.approx(0.001)
    assert measured.survey_s_per_partition == pytest.approx(0.002)
    assert measured.rest_s_per_partition == pytest.approx(0.02)
    assert measured.checkpoint_s == pytest.approx(0.0055)
    text = petabyte.tables(measured, assumed)
    assert "| 10 | 16.7 h |" in text, "a million GB at 6 s each on a hundred cores"
    assert "| 61.1 h |" in text, "2.2 PB at 10 GB/s"
    assert "listing all partitions, one after the other | 3 min" in text
    assert "python <it> --json growth.json" in text


def test_the_committed_page_has_the_committed_figures() -> None:
    assumed = petabyte.Assumed()
    text = petabyte.tables(petabyte.Measured.of(json.loads(MEASURED.read_text()), assumed), assumed)
    page = petabyte.PAGE.read_text()
    assert petabyte.written(page, text) == page, "generate it again: python -m tests.bench.petabyte growth.json --write"
