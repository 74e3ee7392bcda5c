"""Pages as a real browser shows them: on a phone and on a screen, in light and dark mode, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import browser
from tests.report.case import pages_to_look_at

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return pages_to_look_at()


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_no_errors_in_a_browser(theme: browser.Theme, pages: dict[str, str]) -> None:
    looked = browser.look_at(list(pages.values()), WIDTHS, theme)
    assert looked.console == []
    assert len(looked.found) == len(pages) * len(WIDTHS)
    names = list(pages)
    for one in looked.found:
        about = (names[one["page"]], one["width"])
        assert one["scroll"] <= one["width"], (about, one["wide"])
        assert one["wide"] == [], about
        assert one["loaded"] == [], about
        assert one["cut"] == [], about
        assert one["least_text"] >= 10, about
        assert one["dark"] == (theme == "dark"), about
        assert one["first_screen"] < 800 or about[0] == "evil", "verdict and what to do fit on a phone"
        assert one["headline"], about
        if about[0] != "nothing":
            assert one["sorted"], about
        if about[0] in ("small", "large"):
            assert one["filtered"] == 1, about
    papers = {one["paper"] for one in looked.found}
    assert papers == {"rgb(251, 251, 249)" if theme == "light" else "rgb(20, 22, 26)"}


def test_the_browser_would_have_reported_errors(tmp_path: Path) -> None:
    """The checks of the test above fail if a page is wrong."""
    wrong = (
        "<!doctype html><title>t</title><header></header><h1>h</h1><div style='width: 2000px'>w</div>"
        "<script src='http://127.0.0.1:9/x.js'></script><script>throw new Error('told')</script>"
    )
    looked = browser.look_at([wrong], [390], "light")
    assert looked.found[0]["scroll"] > 390
    assert looked.found[0]["wide"]
    assert looked.found[0]["loaded"]
    assert any("told" in line for line in looked.console)
