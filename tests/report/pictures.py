"""Writes pictures of reports for visual checks: `python -m tests.report.pictures DIR [PAGE.html ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.report import browser
from tests.report.case import pages_to_inspect

WIDTHS = (390, 1280)
HEIGHT = 3600


def main(folder: str, *given: str) -> None:
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    pages = {Path(path).stem: Path(path).read_text() for path in given} or pages_to_inspect()
    for name, text in pages.items():
        (directory / f"{name}.html").write_text(text)
        for width in WIDTHS:
            for theme in browser.THEMES:
                picture = directory / f"{name}-{width}-{theme}.png"
                browser.screenshot(directory / f"{name}.html", picture, width, HEIGHT, theme)
                print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
