"""The page of a report as a function of its facts: its order, grouping, masking of secrets, and escaping."""

from __future__ import annotations

import html
import json
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from keytail.cli.masking import HIDDEN, masked, masked_arguments, shown
from keytail.compact.detail import Part
from keytail.compact.map_phase.key_counts import HOTTEST, MAX_KEY_BYTES, KeyCounts
from keytail.errors import Refused
from keytail.report import drawings, keys, sums
from keytail.report.facts import Finding, Partition
from keytail.report.page import page
from keytail.run.rows import ResultRow
from tests.report.case import (
    EVIL,
    NOW_MS,
    compacted,
    corrupt,
    counts_of,
    refused,
    report_of,
    row,
    rows_of_a_cluster,
    with_odd_keys,
)

VOID = frozenset({"meta", "link", "br", "input"})


class Outline(HTMLParser):
    """Collects all elements with their attributes, and checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not (self.open and self.open[-1] in ("style", "script")):
            self.text.append(data)


def words_of(text: str) -> str:
    return " ".join(" ".join(Outline(text).text).split())


def one_of_each() -> list[ResultRow]:
    rng = random.Random(2)
    return [compacted(rng, "orders", 0), corrupt("orders", 1), refused("users", 0), row("logs", 0, "skipped", "why")]


def test_the_first_words_are_the_verdict_and_the_next_step() -> None:
    rows = [row("orders", 0, "skipped", "not due"), corrupt("orders", 1)]
    done = ResultRow("users", 0, "/d", "compacted", bytes_before=3 << 30, bytes_after=1 << 30)
    text = page(report_of([*rows, done]))
    header = re.search(r'<header class="(\w+)">(.*?)</header>', text, re.DOTALL)
    assert header is not None
    assert header[1] == "bad"
    message = words_of(f"<div>{header[2]}</div>")
    assert "Reclaimed 2.0 GiB of 3.0 GiB (66 %): 1 of 3 partitions compacted. 1 partition is not done." in message
    assert "Next: run keytail verify on the same partitions" in message


@pytest.mark.parametrize(
    ("fields", "statuses", "level", "words"),
    [
        ({}, ["compacted"], "good", "1 of 1 partition compacted."),
        ({"execute": False}, ["would-compact", "skipped"], "good", "1 of 2 partitions would be compacted"),
        ({"execute": False}, ["skipped"], "good", "No compaction is due in 1 partition. Nothing was changed."),
        ({}, ["clean"], "good", "Nothing was changed in 1 partition."),
        ({}, ["refused"], "bad", "Nothing was changed in 1 partition. 1 partition is not done."),
        ({"ended_early": "interrupted by SIGINT"}, ["compacted", "skipped"], "bad",
         "The run did not complete: interrupted by SIGINT. Reclaimed"),
        ({"command": "verify"}, ["sound", "sound"], "good", "No problems were found in 2 partitions"),
        ({"command": "verify"}, ["sound", "suspect"], "left", "1 of 2 partitions has findings (1 suspect)"),
        ({"command": "verify"}, ["damaged", "suspect"], "bad", "2 of 2 partitions have findings"),
        ({"command": "audit"}, ["alike"], "good", "The replicas of 1 partition are alike."),
        ({"command": "audit"}, ["alike", "differs"], "bad", "of 1 of 2 partitions are alike (1 differs)"),
        ({"command": "rebuild-index", "execute": False}, ["sound", "would-rebuild"], "left",
         "Index files of 1 of 2 partitions are missing or wrong."),
        ({"command": "rebuild-index"}, ["rebuilt", "failed"], "bad",
         "Index files of 1 of 2 partitions were rebuilt. 1 partition is not done."),
        ({"command": "expire"}, ["expired", "kept", "expired"], "good", "2 of 3 partitions expired."),
        ({"command": "expire"}, ["kept"], "good", "Nothing was changed in 1 partition."),
        ({"command": "history"}, ["compacted", "expired", "rebuilt", "rebuilt", "skipped"], "good",
         "2 of 5 partitions rebuilt, 1 compacted, 1 expired."),
        ({"command": "compact --prepare", "execute": False}, ["prepared", "skipped"], "good",
         "1 of 2 partitions prepared. 0 B will be reclaimed by compact --execute. No segment was changed."),
        ({"command": "compact --prepare", "execute": False}, ["skipped"], "good",
         "0 of 1 partition prepared. No segment was changed."),
        ({"exit_status": 1}, [], "bad", "There is no result for any partition."),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_statuses(
    fields: dict[str, object], statuses: list[str], level: str, words: str
) -> None:
    found = report_of([row("t", n, status, "") for n, status in enumerate(statuses)], **fields)
    assert sums.verdict(found)[0] == level
    assert words in sums.verdict(found)[1]
    assert html.escape(words, quote=True) in page(found)


def test_the_page_of_a_running_broker_does_not_mention_a_start() -> None:
    lost = Finding("error", "the file ends inside a batch", start_loses=True)

    def verdict_of(live: bool) -> str:
        item = Partition("t-0", "t", "/d", "damaged", findings=(lost,), row={"live": live})
        return sums.verdict(replace(report_of([], command="verify"), partitions=(item,)))[1]

    assert "would lose or hide records of 1 partition." in verdict_of(False)
    assert "would lose" not in verdict_of(True)


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("verify", "sound", "No action is needed."),
        ("verify", "suspect", ""),
        ("verify", "damaged", "The remedy is given with each reason below."),
        ("audit", "corrupt", "The remedy is given with each reason below; `keytail verify` reports"),
        ("plan", "clean", ""),
    ],
)
def test_the_next_step_follows_from_command_and_status(command: str, status: str, words: str) -> None:
    found = report_of([row("t", 0, status, "")], command=command, next_step="")
    assert sums.next_step(found).startswith(words)
    assert bool(sums.next_step(found)) == bool(words)
    assert ('<p class="next">' in page(found)) == bool(words)


def test_reasons_that_differ_only_in_names_and_numbers_are_grouped() -> None:
    rows = [refused(f"topic-{n % 7}", n) for n in range(3000)] + [corrupt("orders", 0)]
    rows += [row("orders", n, "skipped", "other words") for n in range(1, 3)]
    found = sums.reasons(report_of(rows).partitions)
    counted = [(reason.status, len(reason.names)) for reason in found]
    assert counted == [("corrupt", 1), ("refused", 3000), ("skipped", 2)]
    assert found[1].differ
    assert found[1].remedy == "A compaction removes such records only with --drop-keyless"
    assert found[1].remedy not in found[1].example
    text = page(report_of(rows))
    assert text.count('<article class="reason') == 3
    assert text.count("records without a key") == 1 + 3000, "a reason must occur once in the text, and in each raw row"
    assert "and 1,000 more" in text


def test_numbers_that_differ_in_meaning_are_not_lost() -> None:
    """The example is printed unchanged, with its own numbers."""
    text = words_of(page(report_of([refused("orders", 4)])))
    assert "the range to be cleaned has 5 records without a key (/var/kafka/d0/orders-4, offset 4)" in text
    assert "for example:" not in text


def test_rows_of_a_topic_are_summed() -> None:
    found = report_of(rows_of_a_cluster(400)).partitions
    topics = sums.by_topic(found)
    for name in ("bytes_before", "bytes_after", "records_before", "records_after"):
        assert sum(getattr(topic, name) or 0 for topic in topics) == sum(getattr(item, name) or 0 for item in found)
    assert sum(topic.partitions for topic in topics) == len(found)
    assert sum(topic.not_done for topic in topics) == sum(item.status in ("refused", "corrupt") for item in found)
    reclaimed = [topic.reclaimed_bytes or 0 for topic in topics]
    assert reclaimed == sorted(reclaimed, reverse=True)


def test_times_of_phases_are_summed() -> None:
    found = report_of([compacted(random.Random(1), "t", n) for n in range(5)]).partitions
    assert {name: seconds for name, seconds, _ in sums.phases(found)} == pytest.approx(
        {"check": 1.0, "map": 15.0, "write": 22.5, "prove": 11.25, "replace": 2.5}
    )


def test_names_and_errors_are_escaped() -> None:
    problem = Refused(EVIL, path=EVIL, remedy=EVIL)
    rows = [row(EVIL, 0, "refused", str(problem), problem), compacted(random.Random(1), EVIL, 1)]
    text = page(report_of(rows, host=EVIL, arguments=("keytail", EVIL), settings={EVIL: EVIL}, next_step=EVIL,
                          notes=(EVIL,), ended_early=EVIL, title=EVIL))  # fmt: skip
    outline = Outline(text)
    names = {tag for tag, _ in outline.elements}
    assert "img" not in names
    assert not any(key.startswith("on") for _, attributes in outline.elements for key in attributes)
    assert [tag for tag, _ in outline.elements].count("script") == 1
    for character in "\x1b\u202e":
        assert character not in text
    assert "\\x1b[31m\\u202e" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert any(">&lt;img src=x…&lt;b&gt;$x$&amp;amp;</text>" in picture for picture in pictures), (
        "text between dollar signs must not be set as mathematics"
    )


def test_names_that_are_not_text_are_escaped() -> None:
    text = page(report_of([row("caf\udce9", 0, "refused", "the name \udce9 and \x00 are odd")]))
    assert "caf\\udce9-0" in text
    text.encode()


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("s3a://AKIA:se/cret@bucket/x", "AKIA"),
        ("s3a://AKIA:with@hunter2@bucket/x", "hunter2"),
        ("https://a@b:hunter2@host/p", "hunter2"),
        ("s3a://AKIA:with@sl/hunter2@bucket/x", "hunter2"),
        ("s3a://AKIA:with,comma/hunter2@bucket/x", "hunter2"),
        ("abfss://user:hunter2@account.dfs.net/p", "hunter2"),
        ("jdbc:postgresql://db/x?user=a&password=hunter2&ssl=1", "hunter2"),
        ("fs.s3a.secret.key=hunter2", "hunter2"),
        ("fs.s3a.access.key: hunter2", "hunter2"),
        ('{"token": "hunter2"}', "hunter2"),
        ("sasl.jaas.config=hunter2", "hunter2"),
        ("https://host/p?X-Amz-Signature=hunter2&b=1", "hunter2"),
    ],
)
def test_secrets_are_hidden(text: str, hidden: str) -> None:
    assert hidden not in masked(text)
    assert HIDDEN in masked(text)
    everywhere = page(
        report_of([row("orders", 0, "failed", f"cannot reach {text}")], arguments=("keytail", "compact", text),
                  settings={"x": text}, next_step=text, notes=(text,), ended_early=text)
    )  # fmt: skip
    assert hidden not in everywhere


def test_values_that_are_not_secret_are_shown() -> None:
    plain = "/var/kafka/tokens-0: 3 records without a key, key-3=7, s3://bucket/prefix, mail@example"
    assert masked(plain) == plain
    assert masked_arguments(("compact", "--access-key", "hunter2", "--topic", "t")) == [
        "compact", "--access-key", HIDDEN, "--topic", "t",
    ]  # fmt: skip
    assert shown("two\nlines\x07") == "two\nlines\\x07"


@pytest.mark.soak("the other pages; the size is what takes the time")
def test_a_page_of_ten_thousand_partitions_is_small() -> None:
    rows = rows_of_a_cluster(10_000)
    text = page(report_of(rows))
    assert len(text) < 6_000_000
    outline = Outline(text)
    tags = [tag for tag, _ in outline.elements]
    assert tags.count("tr") < 3000, "tables must be truncated"
    assert tags.count("article") < 20
    raw = re.search(r'<pre class="raw">(.*?)</pre>', text, re.DOTALL)
    assert raw is not None
    found = json.loads(html.unescape(raw[1]))
    assert [(item["topic"], item["partition"]) for item in found] == [(item.topic, item.partition) for item in rows]
    assert "the first 500 of 10,000" in text


def test_the_page_loads_no_other_file() -> None:
    text = page(report_of(one_of_each()))
    for tag, attributes in Outline(text).elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, name, value)
        assert "url(" not in (attributes.get("style") or "").replace("url(#", "")
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in style.replace("url(#", "")
    assert "@import" not in style
    assert "default-src 'none'" in text
    assert not re.search(r"https?:", text), "no address may occur in the text"


def test_the_policy_allows_only_the_script_of_the_page() -> None:
    import base64
    import hashlib

    text = page(report_of(one_of_each()))
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.unescape(text)


def test_pictures_are_complete_and_use_the_colours_of_the_page() -> None:
    text = page(report_of(one_of_each()))
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 5
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for picture in pictures:
        ET.fromstring(picture)
        assert not re.search(r"#(?:0[abc]|0102)\w{4}\b", picture), "no placeholder may be left"
        for reference in re.findall(r'(?:url\(#|href="#)([^)"]+)', picture):
            assert reference in ids
    assert page(report_of(one_of_each())) == text, "the same facts must give the same page"


@pytest.mark.parametrize(("records", "kept", "number"), [(10, 0, 0), (10, 1, 0), (10, 2, 1), (10, 9, 4), (10, 10, 4),
                                                         (0, 0, 0), (None, None, None)])  # fmt: skip
def test_shares_of_live_records_have_five_colours(records: int | None, kept: int | None, number: int | None) -> None:
    assert drawings.live_class(Part(0, 1, 1, NOW_MS, records, kept)) == number


@pytest.mark.parametrize("fields", [{"command": "plan", "execute": False}, {"start_ms": 0, "end_ms": None}])
def test_a_page_without_partitions_is_written(fields: dict[str, object]) -> None:
    assert "There is no result for any partition" in page(report_of([], **fields))


def test_a_page_with_unusual_numbers_is_written() -> None:
    item = compacted(random.Random(1), "t", 1)
    assert item.detail is not None
    never = replace(item.detail, first_horizon_ms=2**63 - 1, last_horizon_ms=2**63 - 1, parts=(Part(0, 1, 1, -1),),
                    clean_bytes=0, dirty_bytes=0)  # fmt: skip
    empty = replace(item.detail, parts=(Part(0, 1, 0, 2**62),), horizon_batches=None, phases_s={})
    text = page(report_of([replace(item, detail=never), replace(item, detail=empty, bytes_before=0, bytes_after=0)]))
    assert "never" in text


# Keys


def counted(number: int, counts: KeyCounts) -> ResultRow:
    item = compacted(random.Random(1), f"topic-{number % 3}", number)
    assert item.detail is not None
    return replace(item, detail=replace(item.detail, key_counts=counts))


def test_hottest_keys_of_the_run_are_those_of_all_partitions() -> None:
    rng = random.Random(5)
    numbers = {n: [rng.choice([1, 2, rng.randrange(1, 5000)]) for _ in range(100)] for n in range(7)}
    rows = [counted(n, counts_of(of, f"topic-{n % 3}", n)) for n, of in numbers.items()]
    found = report_of([*rows, refused("users", 0)]).partitions
    every = sorted((number for of in numbers.values() for number in of), reverse=True)
    top = keys.hottest(found)
    assert [hot.records for _, hot in top] == every[:HOTTEST]
    for item, hot in top:
        assert numbers[int(item.name.rpartition("-")[2])][hot.offset // 100] == hot.records
    sizes = keys.by_size(found)
    assert (sum(item.keys for item in sizes), sum(item.records for item in sizes)) == (700, sum(every))
    for item in sizes:
        assert item.keys == sum(item.most // 2 < number <= item.most for number in every)
    text = page(report_of(rows))
    words = words_of(text)
    assert f"{sum(every):,} records of 700 keys in 7 partitions: {sum(every) - 700:,} of these records" in words
    [table] = re.findall(r'<table class="rows" data-name="hot_keys">(.*?)</table>', text, re.DOTALL)
    assert table.count("<tr>") == 1 + HOTTEST
    assert [hot.digest for _, hot in top] == re.findall(r"<td>([0-9a-f]{16})</td>", table)
    assert "hash of the key" in table
    assert "<th scope=\"col\">key</th>" not in table
    [topics] = re.findall(r'<table class="rows" data-name="topic_keys">(.*?)</table>', text, re.DOTALL)
    by_topic = [sum(sum(of) for n, of in numbers.items() if n % 3 == topic) for topic in range(3)]
    assert re.findall(r'data-v="([\d.]+)"', topics)[::4] == [str(number) for number in sorted(by_topic, reverse=True)]


def test_a_page_reports_that_each_key_has_one_record() -> None:
    text = page(report_of([counted(0, counts_of([1, 1, 1], "t", 0))]))
    assert "3 records of 3 keys in 1 partition: 0 of these records (0" in words_of(text)
    assert 'data-name="hot_keys"' not in text
    assert 'data-name="topic_keys"' not in text
    assert "sha256sum" not in text


def test_missing_key_counts_are_reported_only_if_they_were_requested() -> None:
    empty = counted(0, counts_of([], "t", 0))
    for rows in ([empty], [refused("users", 0)], []):
        assert 'id="keys"' not in page(report_of(rows))
    due = [row("t", 0, "would-compact", "")]
    for command in ("plan", "compact"):
        text = words_of(page(report_of(due, command=command, execute=False)))
        assert "The hottest keys are unknown, because a plan reads no records. compact --execute --report" in text
    assert "unknown, because a plan" not in page(report_of([row("t", 0, "sound", "")], command="verify", execute=False))


@pytest.mark.long
def test_shown_keys_are_escaped() -> None:
    text = page(report_of([with_odd_keys(compacted(random.Random(1), "t", 0))]))
    assert "Keys are shown because" in text
    outline = Outline(text)
    assert "img" not in {tag for tag, _ in outline.elements}
    for character in "\x1b\u202e":
        assert character not in text
    words = words_of(text)
    for shown_as in ('"customer-42"', '""', '"kätzchen"', f"hex {'00000007' * 4}", '"{{ keys }}\\u202e\\x0a"',
                     f'"{"k" * MAX_KEY_BYTES}… (5,000 bytes)', f"hex {'ff' * MAX_KEY_BYTES}… (999 bytes)",
                     "4,294,967,295 or more", f'"password={HIDDEN}'):  # fmt: skip
        assert shown_as in words, shown_as
    assert "hunter2" not in text
    assert "Keys are shown" not in page(report_of(one_of_each()))
