"""Reads a file with one key on each line, and holds the keys as hashes, in 40 to 48 bytes each.

There are two independent sets of hashes: XXH3-128 with a random seed selects the records to be erased, and the hash of
the proof, with its own secret, checks them. Key bytes are not retained, and no message contains them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from keytail.acting_user import as_caller
from keytail.erase import avro
from keytail.erase.command import KeyFormat
from keytail.errors import UsageProblem, is_denied
from keytail.kernels.erase import KeyTable, hash_keys
from keytail.kernels.proof.key_hash import SECRET_BYTES, coefficients_of, hash_all
from keytail.limits import max_record_bytes

# The name of a format for messages, and the function that returns the key of a line in this format.
Decoder = tuple[str, Callable[[bytes], bytes]]
_BLOCK_BYTES = 4 << 20


class Reads(Protocol):
    """A file opened for reading bytes."""

    def read(self, n: int, /) -> bytes: ...


@dataclass(frozen=True)
class ErasedKeys:
    """The keys of a file: their number, the SHA-256 of the file, and two sets of hashes.

    `table` has the hashes that select records, computed with `seed`. `hashes` (uint64[2, n], sorted by the low word, as
    in kernels/proof/state.py) has the hashes for the proof, computed with `secret`.
    """

    count: int
    file_digest: str
    seed: int
    table: KeyTable
    secret: bytes
    hashes: np.ndarray


@as_caller()
def read_keys_file(flag: str, path: str, key_format: KeyFormat, key_schema: Sequence[str] | None) -> ErasedKeys:
    """Return the keys of the file that the flag names. Raises UsageProblem if the file cannot be read or is invalid
    (see `read_keys`)."""
    try:
        with open(path, "rb") as file:
            return read_keys(file, path, key_format, key_schema)
    except OSError as error:
        remedy = "Give the path of a file with one key on each line"
        if is_denied(error):
            remedy = "Run as a user that may read the file, or change its owner or mode (chown, chmod)"
        raise UsageProblem(
            f"{flag} cannot be read: {error.strerror}", path=path, remedy=remedy, slug="unreadable-keys-file"
        ) from error


def read_keys(
    file: Reads, name: str, key_format: KeyFormat, key_schema: Sequence[str] | None = None
) -> ErasedKeys:
    """Return the keys of the file: one for each line or, with `key_schema` (the arguments of --key-schema), one for
    each line and schema. `name` is the file's name in errors.

    Raises UsageProblem, with the number of the line, for a line that is empty, too long or not in the format, a byte
    order mark, a carriage return, the empty key, and a key that occurs twice; also for an empty file, and a schema that
    is missing, invalid or not accepted.
    """
    decoders = _decoders(key_format, key_schema)
    digest = hashlib.sha256()
    seed, secret = secrets.randbits(63), os.urandom(SECRET_BYTES)
    coefficients = coefficients_of(secret)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for lines in _lines(file, name, digest.update):
        keys = []
        for number, line in enumerate(lines, count + 1):
            if not line:
                _refuse(name, number, "is empty", "Remove the line: the empty key cannot be erased")
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                _refuse(name, number, "begins with a byte order mark", "Remove the mark: it would be part of the key")
            if line[-1] == 13:
                _refuse(name, number, "ends with a carriage return", "Use lines that end with a line feed only")
            for format_name, decode in decoders:
                key = _decoded(decode, line)
                if key is None:
                    _refuse(name, number, f"is not {format_name}", "Correct the line, or give another --key-format")
                if not key:
                    _refuse(name, number, "is the empty key", "Remove the line: the empty key cannot be erased")
                keys.append(key)
        count += len(lines)
        parts.append(_hashes(keys, seed, coefficients))
    if not count:
        raise UsageProblem(
            f"{name} has no keys", remedy="Give a file with one key on each line", slug="invalid-keys-file"
        )
    selecting, proving = (np.concatenate(hashes, axis=1) for hashes in zip(*parts, strict=True))
    order = np.lexsort((selecting[1], selecting[0]))
    low, high = (np.ascontiguousarray(words[order]) for words in selecting)
    same = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1]))
    if len(same):
        first, again = sorted(int(at) // len(decoders) + 1 for at in order[same[0] : same[0] + 2])
        _refuse(name, again, f"has the same key as line {first}", "Remove one of the two lines")
    by_low = np.lexsort((proving[1], proving[0]))
    hashes = np.ascontiguousarray(proving[:, by_low])
    return ErasedKeys(len(low), digest.hexdigest(), seed, table_of(low, high), secret, hashes)


def table_of(low: np.ndarray, high: np.ndarray) -> KeyTable:
    """Return the look-up table of hashes, given as low and high words (uint64[n] each) sorted by the low words."""
    bits = max(1, len(low).bit_length())
    bounds = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    starts = np.append(np.searchsorted(low, bounds), len(low)).astype(np.int64)
    return KeyTable(low, high, starts, np.uint64(64 - bits))


def _hashes(keys: list[bytes], seed: int, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes that select records and those for the proof, each as uint64[2, n]: low and high words."""
    data = np.frombuffer(bytearray(b"".join(keys)), np.uint8)
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    selecting, proving = np.empty((2, len(keys)), np.uint64), np.empty((2, len(keys)), np.uint64)
    hash_keys(data, ends, np.uint64(seed), selecting[0], selecting[1])
    hash_all(data, ends, coefficients, proving)
    return selecting, proving


def _lines(file: Reads, name: str, on_bytes: Callable[[bytes], object]) -> Iterator[list[bytes]]:
    """Yield lists of successive lines of a file, without line feeds; call `on_bytes` with each block of bytes read."""
    rest, done = b"", 0
    while block := file.read(_BLOCK_BYTES):
        on_bytes(block)
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            done += len(lines)
            yield lines
        if len(rest) > 2 * max_record_bytes():  # two hexadecimal digits per byte
            _refuse(name, done + 1, "is longer than the largest possible record", "Give one key on each line")
    if rest:
        yield [rest]


def _decoders(key_format: KeyFormat, key_schema: Sequence[str] | None) -> Sequence[Decoder]:
    if (key_format == "avro") != bool(key_schema):
        raise UsageProblem(
            "--key-format avro and --key-schema must be given together",
            remedy="Give both flags (for example --key-schema 17=FILE), or neither",
            slug="missing-flag",
        )
    return avro.read_encoders(key_schema) if key_schema else [_DECODERS[key_format]]


def _refuse(name: str, line: int, what: str, remedy: str) -> NoReturn:
    raise UsageProblem(f"line {line} of {name} {what}", remedy=remedy, slug="invalid-keys-file")


def _decoded(decode: Callable[[bytes], bytes], line: bytes) -> bytes | None:
    """Return the key, or None if the line is not in the format. The error of `decode` is dropped: its message may
    contain the line."""
    try:
        return decode(line)
    except (ValueError, OverflowError, RecursionError):
        return None


def _utf8(line: bytes) -> bytes:
    line.decode()
    return line


def _base64(line: bytes) -> bytes:
    return base64.b64decode(line, validate=True)


_DECODERS: Mapping[str, Decoder] = {
    "utf8": ("valid UTF-8", _utf8),
    "hex": ("hexadecimal", binascii.unhexlify),
    "base64": ("base64", _base64),
}
