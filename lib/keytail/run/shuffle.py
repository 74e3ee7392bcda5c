"""Defines the unit of data that one stage of a job passes to the next stage through a shuffle of Spark."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """Packed bytes, the shard that receives them, and the number by which the cells of the shard are sorted."""

    shard: int
    order: int
    data: bytes
