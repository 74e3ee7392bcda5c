"""Lists the codecs of Kafka: their numbers, names and levels; imports no codec library, since planning and `--help` use
this module.

A new codec needs a row here, a module beside this one (an `Implementation` of `format/compression.py`), and its number
in `kernels/batch_header.py`; if kernels are to decompress it, a branch in `kernels/opening/plain.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Codec:
    """One codec. `levels` are the levels that Kafka's configuration allows; `default_level` is Kafka's default, which
    is allowed even if `levels` does not contain it, or 0 for a codec without levels."""

    name: str
    levels: range = range(0)
    default_level: int = 0

    @property
    def level_key(self) -> str:
        """The topic setting of the level."""
        return f"compression.{self.name}.level"


NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
# The codecs by number.
TABLE = (
    Codec("none"),
    Codec("gzip", range(1, 10), -1),
    Codec("snappy"),
    Codec("lz4", range(1, 18), 9),
    Codec("zstd", range(-131_072, 23), 3),
)
CODECS = tuple(codec.name for codec in TABLE)


def codec_name(number: int) -> str:
    """Return the name of a codec, or `codec N` for an unknown codec."""
    return CODECS[number] if number < len(CODECS) else f"codec {number}"
