"""Parses the pages of the repository into blocks of commands, the output that they show, and marks.

A command block is fenced with `sh`, or is any other block with a line that is a shell command. Marks are comments above
a block, which a reader of the rendered page does not see:

    <!-- not run: WHY -->     the block is not run; a test that WHY names runs something similar
    <!-- status 1 -->         its last command ends with this exit status; the default is 0
    <!-- given: NAME -->      the host is prepared again, by the function of this name in `prepared.py`
    <!-- spark -->            the block requires a Spark session
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILT = {"target", "build", "dist", "node_modules"}
_FENCE = re.compile(r"^```(\w*)(?: .*)?$")
_MARK = re.compile(r"<!-- (.*?) -->", re.DOTALL)
_WORDS = r"keytail|make|spark-submit|spark-sql|pip|python[\d.]*|pytest|docker|podman|venv-pack|conda-pack|airflow"
_COMMAND = re.compile(rf"^\s*(?:\w+=\S* )*(?:[\w$./*]+/)?(?:{_WORDS})(?= [^:]| *$)")
_JOB = re.compile(r"\bjobs/\w+\.py\b")


@dataclass(frozen=True)
class Block:
    """A block of a page. `line` counts from 1; `printed` is the block of text that follows the commands, with only
    marks in between.
    """

    page: str
    line: int
    kind: str
    text: str
    marks: tuple[str, ...] = ()
    printed: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_commands(self) -> bool:
        lines = self.text.splitlines()
        return self.kind == "sh" or (
            self.kind in ("", "bash", "indented") and any(_COMMAND.match(line) or _JOB.search(line) for line in lines)
        )

    def mark(self, name: str) -> str | None:
        """Return the text after `name` in a mark, "" if there is none, or None if there is no such mark."""
        for item in self.marks:
            if match := re.fullmatch(rf"{name}(?::? (.*))?", " ".join(item.split())):
                return match[1] or ""
        return None


@dataclass
class _Reading:
    page: str
    marks: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


@functools.cache
def pages() -> tuple[str, ...]:
    """Return the paths of all pages from the root of the repository."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name not in _BUILT]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in files if name.endswith(".md")]
    return tuple(sorted(found))


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> list[Block]:
    """Return the blocks of `page` in order; a `text` block directly after commands has their output."""
    found: list[Block] = []
    for block, follows in _raw(page):
        if block.kind == "text" and follows and found and found[-1].kind == "sh" and found[-1].printed is None:
            last = found.pop()
            found.append(Block(last.page, last.line, last.kind, last.text, last.marks, block.text))
        else:
            found.append(block)
    return found


def _raw(page: str) -> Iterator[tuple[Block, bool]]:
    """Yield each block, and whether only blank lines separate it from the block before it."""
    lines = text_of(page).splitlines()
    marks: list[str] = []
    follows, at = False, 0
    while at < len(lines):
        line, start = lines[at], at
        if fence := _FENCE.match(line.lstrip()):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            yield Block(page, start + 1, fence[1], "\n".join(lines[at + 1 : end]) + "\n", tuple(marks)), follows
            marks, follows, at = [], True, end + 1
        elif line.lstrip().startswith("<!--"):
            end = next(n for n in range(at, len(lines)) if "-->" in lines[n])
            marks += _MARK.findall("\n".join(lines[at : end + 1]))
            at = end + 1
        elif line.startswith("    ") and _begins_code(lines, at):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            yield Block(page, start + 1, "indented", "\n".join(lines[start:at]).rstrip() + "\n", tuple(marks)), follows
            marks, follows = [], True
        else:
            if line.strip():
                marks, follows = [], False
            at += 1


def _begins_code(lines: list[str], at: int) -> bool:
    """Return whether a block of code begins here, after a blank line. The next paragraph of a list item looks the same,
    but does not begin with a command.
    """
    return at == 0 or not lines[at - 1].strip()


def commands(text: str) -> list[str]:
    """Return the commands of a block, each as one line: continuations are joined, comments and blank lines omitted."""
    joined = re.sub(r" *\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def squeezed(text: str) -> str:
    """Return the text without trailing blanks, empty lines, and the widths of columns."""
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def find_in_order(parts: list[str], printed: str) -> str | None:
    """Return None if `parts` occur in `printed` in this order, or else the first part that does not."""
    at = 0
    for part in parts:
        found = printed.find(part, at)
        if found < 0:
            return part
        at = found + len(part)
    return None
