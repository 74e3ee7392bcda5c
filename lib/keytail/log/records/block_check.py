"""Checks the records of one compressed batch against its header, as a whole or in pieces."""

from __future__ import annotations

import numpy as np

from keytail.format.batch import CODEC_MASK
from keytail.format.codecs.errors import Buffer, TooLarge
from keytail.format.compression import decompress
from keytail.kernels.verify import batches as kernels
from keytail.log.records.pieces import WHOLE_BLOCK_BYTES, pieces


def check_block(
    data: Buffer,
    *,
    base: int,
    last: int,
    count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    attributes: int,
    state: np.ndarray,
) -> int:
    """Return 0, or a code of kernels/verify/codes.py with the place of the problem in `state` (int64[STATE_SIZE]).

    `data` is the compressed block; the other arguments are fields of the batch's header.

    Raises the errors of `RecordStream.take` if the block cannot be decompressed, or a record is too large.
    """
    codec, times = attributes & CODEC_MASK, (base_timestamp_ms, max_timestamp_ms)
    try:
        opened = decompress(codec, data, limit_bytes=WHOLE_BLOCK_BYTES)
    except TooLarge:
        return _check_pieces(codec, data, base, last, count, times, attributes, state)
    block = np.frombuffer(opened, dtype=np.uint8) if len(opened) else np.zeros(0, dtype=np.uint8)
    block.flags.writeable = False
    return int(kernels.check_block(block, base, last, count, *times, attributes, state))


def _check_pieces(
    codec: int, data: Buffer, base: int, last: int, count: int, times: tuple[int, int], attributes: int,
    state: np.ndarray,
) -> int:  # fmt: skip
    sums = np.array([base - 1, -1, 0], np.int64)
    for piece in pieces(codec, data, count, [np.empty(0, np.uint8), np.empty(0, np.uint8)]):
        block = piece.block[: piece.n_bytes]
        block.flags.writeable = False
        code = kernels.check_piece(block, base, last, piece.count, times[0], sums, state)
        if code:
            return int(code)
    return int(kernels.check_sums(count, times[1], attributes, sums, state))
