"""An engine that runs the stages of a fan-out in this process, one task after the other, and shuffles cells through
files.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keytail.log.fs import LOCAL, FileSystem

_HEAD = struct.Struct("<qq")


@dataclass
class InProcess:
    """Writes cells to `directory`. With `rng`, runs tasks in random order, and some of them twice."""

    directory: Path
    fs: FileSystem = LOCAL
    rng: random.Random | None = None
    shuffled_bytes: int = 0
    largest_cell: int = 0
    stages: list[tuple[str, int]] = field(default_factory=list)
    _attempts: Iterator[int] = field(default_factory=itertools.count)

    def run(self, name: str, function: Callable[..., Any], payloads: Sequence[Any]) -> list[Any]:
        self.stages.append((name, len(payloads)))
        answers: dict[int, Any] = {}
        for number in self._order(len(payloads)):
            answers[number] = function(self.fs, payloads[number], self._attempt())
        return [answers[number] for number in range(len(payloads))]

    def shuffle(
        self,
        name: str,
        emit: Callable[..., Any],
        payloads: Sequence[Any],
        shards: int,
        take: Callable[..., Any],
        context: Any,
    ) -> list[Any]:
        self.stages.append((f"{name}: {shards} shards", len(payloads)))
        self.directory.mkdir(parents=True, exist_ok=True)
        where: list[list[tuple[int, int, int, int]]] = [[] for _ in range(shards)]
        done: set[int] = set()
        with (self.directory / "cells").open("w+b") as file:
            for number in self._order(len(payloads)):
                for cell in emit(self.fs, payloads[number], self._attempt()):
                    assert 0 <= cell.shard < shards
                    if number in done:
                        continue  # of a task that runs twice, the second output is discarded
                    where[cell.shard].append((cell.order, number, file.tell(), len(cell.data)))
                    file.write(cell.data)
                    self.shuffled_bytes += len(cell.data)
                    self.largest_cell = max(self.largest_cell, len(cell.data))
                done.add(number)

            def cells(shard: int) -> Iterator[tuple[int, bytes]]:
                for order, _, position, size in sorted(where[shard]):
                    file.seek(position)
                    yield order, file.read(size)

            answers = {}
            for shard in self._order(shards):
                answers[shard] = take(self.fs, context, shard, cells(shard), self._attempt())
        return [answers[shard] for shard in range(shards)]

    def _attempt(self) -> str:
        return f"i{next(self._attempts)}"

    def _order(self, n: int) -> list[int]:
        numbers = list(range(n))
        if self.rng is not None:
            numbers += [number for number in numbers if self.rng.random() < 0.2]
            self.rng.shuffle(numbers)
        return numbers
