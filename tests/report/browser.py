"""A headless Chromium without a network, and its reports about pages.

It is Debian's `chromium` (apt-get install chromium), or the program in $CHROMIUM. If it is missing, tests in a
browser are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-default-apps", "--disable-extensions",
    "--hide-scrollbars", "--disable-dev-shm-usage",
    # All requests of a page end here: no server listens at this port, and no name is resolved.
    "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
)  # fmt: skip

# Every page is in a frame of each width; media queries use the frame as the window. The results replace the body of
# this document, which is then dumped.
_PROBE = """<!doctype html><meta charset="utf-8"><body><script>
const pages = %(pages)s, widths = %(widths)s, found = [];
const look = (frame, number, width) => {
  const page = frame.contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll("body *")].filter((one) =>
    !one.closest(".wide, pre, svg, details:not([open]), .names") && one.getBoundingClientRect().right > width + 0.5);
  const cut = [...page.querySelectorAll("svg")].filter((svg) => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].some((text) => {
      const one = text.getBoundingClientRect();
      const across = one.left < box.left - 1 || one.right > box.right + 1;
      return across || one.top < box.top - 1 || one.bottom > box.bottom + 1;
    });
  });
  const small = [...page.querySelectorAll("svg text")].map((one) => one.getBoundingClientRect().height);
  const table = page.querySelector("#partitions table");
  let sorted = null, filtered = null;
  if (table) {
    const name = (row) => row.cells[0].textContent;
    table.tHead.rows[0].cells[0].click();
    const down = [...table.tBodies[0].rows].map(name);
    table.tHead.rows[0].cells[0].click();
    const up = [...table.tBodies[0].rows].map(name);
    sorted = up.length === down.length && up.join() === [...down].reverse().join();
    const filter = page.querySelector("#partitions .filter");
    if (filter) {
      filter.value = up[0];
      filter.dispatchEvent(new frame.contentWindow.Event("input"));
      filtered = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
    }
  }
  found.push({
    page: number, width, scroll: root.scrollWidth, wide: wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 200)),
    cut: cut.map((one) => one.getAttribute("aria-label")), least_text: Math.min(...small, 99),
    dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((one) => one.name),
    headline: page.querySelector("h1").textContent, first_screen: page.querySelector("header").offsetHeight,
    sorted, filtered, alerts: frame.contentWindow.alerts ?? 0,
  });
  if (found.length === pages.length * widths.length) {
    document.body.textContent = "";
    const pre = document.body.appendChild(document.createElement("pre"));
    pre.id = "found";
    pre.textContent = JSON.stringify(found);
  }
};
pages.forEach((text, number) => widths.forEach((width) => {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  frame.onload = () => look(frame, number, width);
  frame.srcdoc = text;
  document.body.append(frame);
}));
</script>"""


@dataclass(frozen=True)
class Inspection:
    """The results of the pages. `console` has messages about errors of the pages and violations of their security
    policy.
    """

    found: list[dict[str, Any]]
    console: list[str]


def chromium() -> str:
    """Return the path of the browser. Skips the test, or fails, if there is none."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail("KEYTAIL_NO_SKIP=1, but there is no browser: apt-get install chromium")
        pytest.skip("no browser: apt-get install chromium")
    return path


def inspect_pages(pages: Sequence[str], widths: Sequence[int], theme: Theme) -> Inspection:
    """Return the results for every page at every width."""
    texts = json.dumps(pages).replace("</", "<\\/").replace("<!--", "<\\!--")
    with tempfile.TemporaryDirectory(prefix="keytail-browser-") as folder:
        probe = Path(folder) / "probe.html"
        probe.write_text(_PROBE % {"pages": texts, "widths": json.dumps(widths)})
        done = _run(folder, theme, "--dump-dom", f"file://{probe}")
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-3000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Inspection(json.loads(html.unescape(found[1])), console)


def screenshot(page: Path, picture: Path, width: int, height: int, theme: Theme) -> None:
    with tempfile.TemporaryDirectory(prefix="keytail-browser-") as folder:
        _run(folder, theme, f"--window-size={width},{height}", f"--screenshot={picture}", f"file://{page}")


def _run(folder: str, theme: Theme, *arguments: str) -> subprocess.CompletedProcess[str]:
    dark = ["--force-dark-mode"] if theme == "dark" else []
    command = [chromium(), *_FLAGS, *dark, f"--user-data-dir={folder}/profile", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
