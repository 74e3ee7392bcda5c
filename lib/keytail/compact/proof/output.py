"""Opens the outputs that a proof reads, one after the other, and checks that outputs and indexes have no excess bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keytail.compact.proof.markers import check_txn_index
from keytail.compact.proof.state import REMEDY, Output, Proof
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.format.codecs.errors import TooLarge
from keytail.format.compression import decompress
from keytail.kernels import batch_header as v2
from keytail.kernels.proof import codes
from keytail.kernels.proof.checks import close_time_index
from keytail.kernels.proof.step import end_of_output
from keytail.log.records.pieces import WHOLE_BLOCK_BYTES
from keytail.log.replacement.replace import UnfinishedOutput
from keytail.log.window import Window

if TYPE_CHECKING:
    from keytail.log.replacement.replace import CleanFile, OutputSegment

NEVER_READ = np.frombuffer(b"\0", dtype=np.uint8)


def start_output(proof: Proof) -> None:
    """Open the next output."""
    segment, end_offset = proof.waiting.pop(0)
    proof.current = output = output_of(proof, segment, end_offset)
    open_checked(proof, proof.output, output.paths[names.LOG], output.log_bytes)
    state = proof.state.output
    state.number += 1
    state.at = state.is_checked = state.newest_ms = 0
    state.base_offset, state.next_base = segment.base_offset, end_offset
    due = proof.state.indexes
    due.index_at = due.time_at = due.since_last_entry = 0
    due.max_timestamp = due.last_time_entry = -1
    due.max_timestamp_offset = segment.base_offset


def output_of(proof: Proof, segment: OutputSegment | UnfinishedOutput, end_offset: int) -> Output:
    """Return the output that `segment` describes, with the contents of its indexes. Raises KeytailError if an index has
    another size than was written, or one that a broker does not read."""
    if isinstance(segment, UnfinishedOutput):
        index, time_index, txn_index = segment.index, segment.time_index, b""
        log_bytes, paths = segment.log_bytes, segment.paths
    else:
        files = {file.suffix: file for file in segment.files}
        index, time_index = _read_index(proof, files[names.INDEX]), _read_index(proof, files[names.TIME_INDEX])
        txn = files.get(names.TXN_INDEX)
        txn_index = _read_index(proof, txn) if txn is not None else b""
        log_bytes = files[names.LOG].size_bytes
        paths = {suffix: f"{proof.scratch_path}/{file.name}" for suffix, file in files.items()}
    output = Output(
        segment.base_offset,
        end_offset,
        log_bytes,
        np.frombuffer(index, dtype=np.uint8),
        np.frombuffer(time_index, dtype=np.uint8),
        txn_index,
        paths,
    )
    for suffix, data in ((names.INDEX, output.index), (names.TIME_INDEX, output.time_index)):
        if len(data) > proof.spec.segment_index_bytes:
            raise KeytailError(
                f"the index has {len(data)} bytes, more than the {proof.spec.segment_index_bytes} that a broker reads",
                path=output.paths[suffix],
                byte_position=proof.spec.segment_index_bytes,
                remedy=REMEDY,
                slug="invalid-output-index",
            )
    return output


def open_checked(proof: Proof, window: Window, path: str, size_bytes: int) -> None:
    """Open the file in `window`. Raises an error unless the file has the size in the plan or, for an output, the size
    that was written."""
    check_size(proof, path, size_bytes)
    window.open(path, size_bytes)


def check_size(proof: Proof, path: str, size_bytes: int) -> None:
    """Raise KeytailError unless the file has this size."""
    found = proof.fs.stat(path).size_bytes
    if found != size_bytes:
        what = f"the file has {found} bytes instead of {size_bytes}"
        raise KeytailError(what, path=path, remedy=REMEDY, slug="file-size-differs")


def _read_index(proof: Proof, file: CleanFile) -> bytes:
    path = f"{proof.scratch_path}/{file.name}"
    data = proof.fs.read_bytes(path)
    if len(data) != file.size_bytes:
        what = f"the file has {len(data)} bytes instead of {file.size_bytes}"
        raise KeytailError(what, path=path, remedy=REMEDY, slug="file-size-differs")
    return data


def finish_output(proof: Proof) -> None:
    """Check that the current output and its indexes have been read to the end; check its transaction index."""
    output = finish_log(proof)
    if output.txn_index:
        proof.ensure_markers()
    check_txn_index(
        output.txn_index,
        output.paths.get(names.TXN_INDEX, output.paths[names.LOG]),
        proof.markers,
        int(proof.state.output.number),
        proof.spec.log_start_offset,
        REMEDY,
    )


def finish_log(proof: Proof) -> Output:
    """Check that the current output and its indexes, except for the transaction index, have been read to the end."""
    state, window, output = proof.state, proof.output, proof.current
    assert output is not None
    while (code := end_of_output(proof.windows().output, state)) == codes.NEED_OUTPUT:
        window.advance(int(state.output.at), v2.HEADER_BYTES)
        state.output.at = 0
    if code == codes.PASSED:
        code = close_time_index(output.time_index, state)
    if code != codes.PASSED:
        proof.fail(code)
    ends = (
        (names.INDEX, output.index, int(state.indexes.index_at)),
        (names.TIME_INDEX, output.time_index, int(state.indexes.time_at)),
    )
    for suffix, data, at in ends:
        if at != len(data):
            raise KeytailError(
                "the index has more bytes than the entries of its segment need",
                path=output.paths[suffix],
                byte_position=at,
                remedy=REMEDY,
                slug="invalid-output-index",
            )
    proof.bytes_read += output.log_bytes + len(output.index) + len(output.time_index) + len(output.txn_index)
    return output


def open_block(window: Window, at: int, kind: type[KeytailError], remedy: str) -> np.ndarray | None:
    """Return the decompressed records of the batch at index `at`, read-only; None if they exceed WHOLE_BLOCK_BYTES."""
    codec, data = block_at(window, at)
    try:
        opened = decompress(codec, data, limit_bytes=WHOLE_BLOCK_BYTES)
    except TooLarge:
        return None
    except ValueError as problem:
        raise not_opened(window, at, kind, remedy, problem) from problem
    block = np.frombuffer(opened, dtype=np.uint8) if len(opened) else NEVER_READ[:0]
    block.flags.writeable = False
    return block


def block_at(window: Window, at: int) -> tuple[int, memoryview]:
    """Return the codec and the bytes of the record block of the batch at index `at` of the window."""
    header = window.bytes
    size_bytes = int.from_bytes(header[at + 8 : at + 12].tobytes(), "big") + 12
    return int(header[at + v2.ATTRIBUTES + 1]) & v2.CODEC_MASK, header[at + v2.HEADER_BYTES : at + size_bytes].data


def not_opened(
    window: Window, at: int, kind: type[KeytailError], remedy: str, problem: ValueError | KeytailError
) -> KeytailError:
    """Return the error for a batch whose block cannot be decompressed, or that has a record above the size limit."""
    where: dict[str, Any] = {
        "path": window.path,
        "byte_position": window.position + at,
        "offset": int.from_bytes(window.bytes[at : at + 8].tobytes(), "big", signed=True),
    }
    if isinstance(problem, KeytailError):
        what = f"a batch is not opened: {problem.what}"
        return Refused(what, **where, remedy=problem.remedy or remedy, slug=problem.slug or "invalid-output-batch")
    what = f"a batch cannot be decompressed: {problem}"
    if kind is CorruptLog:
        return CorruptLog(what, **where, remedy=remedy, slug="decompression-failed")
    return KeytailError(what, **where, remedy=remedy, slug="invalid-output-batch")
