"""A proof in parts finds whatever a proof in one walk finds, wherever the parts begin."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from keytail.compact.proof import boundaries, in_parts
from keytail.compact.proof.boundaries import Boundary, Group
from keytail.compact.proof.keys import Keys
from keytail.compact.proof.prove import prove
from keytail.compact.proof.state import ProofSpec
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from tests.chance import chance, draws
from tests.compact.logs import random_log
from tests.compact.proof import case as rounds
from tests.compact.proof import test_legacy, test_prove, test_transactions
from tests.compact.proof.parts import Parts, batches_of, walked
from tests.crash.driver import open_files
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec, decode_log, encode_batch

NOW = rounds.NOW


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Prove every case of these tests in one walk and in parts."""
    made = Parts(chance())
    monkeypatch.setattr(test_prove, "prove", made.prove)
    monkeypatch.setattr(rounds, "prove", made.prove)
    return made


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("timestamp_type", [0, 1])
def test_the_proof_passes_without_a_mutation(codec: int, timestamp_type: int, parts: Parts, tmp_path: Path) -> None:
    case = test_prove._example(codec, timestamp_type)
    case.interval = parts.rng.choice([60, 200])
    case.prove(tmp_path)
    assert parts.agreed, "no proof in parts passes"


@pytest.mark.parametrize("name", test_prove.MUTATIONS)
def test_every_mutation_is_found(name: str, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = parts.rng
    if rng.random() < 0.2:
        read_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
    for timestamp_type in (0, 1):
        case = test_prove._example(rng.choice([0, 0, 1, 2, 3, 4]), timestamp_type)
        case.interval = rng.choice([60, 200])
        test_prove.MUTATIONS[name](case)
        with pytest.raises(KeytailError):
            case.prove(tmp_path)
    assert parts.begun and parts.refused


@pytest.mark.parametrize("name", test_legacy.MUTATIONS)
def test_every_mutation_of_messages_is_found(name: str, parts: Parts, tmp_path: Path) -> None:
    case = test_legacy._example(parts.rng.choice([1, 2]))
    test_legacy.MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)
    assert parts.refused


@pytest.mark.parametrize("name", test_transactions.MUTATIONS)
def test_every_mutation_of_transactions_is_found(name: str, parts: Parts, tmp_path: Path) -> None:
    case = test_transactions._example(parts.rng.choice([0, 4]))
    test_transactions.MUTATIONS[name](case)
    with pytest.raises(KeytailError):
        case.prove(tmp_path)
    assert parts.refused


def test_a_proof_of_no_groups_passes(parts: Parts, tmp_path: Path) -> None:
    data = encode_batch([Rec(0, NOW, b"a", b"x")])
    case = test_prove.Case({0: data, 1: b""}, [], test_prove.Round(0, 0, 1, NOW))
    case.prove(tmp_path)


def random_case(rng: random.Random) -> rounds.Case:
    """Return a round of a random log without transactions, with several outputs in some groups."""
    log = random_log(rng, NOW, codecs=rng.choice([(0,), (0, 1, 2, 3, 4)]))
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    case = rounds.Case(
        log.segments,
        first_dirty=min(rng.choice([base, *log.batch_ends]), end - 1),
        producers=log.producers if rng.random() < 0.5 else {},
        segment_bytes=rng.choice([1, 600, 10**6]),
    )
    logs = {segment.base_offset: segment.log for segment in case.segments}
    behind = list(logs)
    for number, (sources, outputs) in enumerate(list(case.groups)):
        bases = [struct.unpack_from(">q", data)[0] for data in outputs[0].batches[1:]]
        end = max((batch.last_offset + 1 for batch in decode_log(logs[sources[-1]])), default=sources[-1] + 1)
        if end < behind[behind.index(sources[-1]) + 1]:
            bases.append(end)  # the output has no batches
        if bases and rng.random() < 0.4:
            case.split(number, sorted(rng.sample(bases, rng.randint(1, min(3, len(bases))))))
    return case


def change_batches(rng: random.Random, case: rounds.Case) -> None:
    """Change batches of the outputs: lose, repeat, exchange, move, spoil or restore one."""
    filled = [k for k, output in enumerate(case.outputs) if output.batches]
    if not filled:
        return
    number = rng.choice(filled)
    batches = case.outputs[number].batches
    i = rng.randrange(len(batches))
    kinds = ("lose", "repeat", "exchange", "move", "spoil", "restore", "restore", "invent", "end", "lose two")
    kind = rng.choice(kinds)
    if kind in ("lose", "lose two"):
        del batches[i : i + 1 + (kind == "lose two")]
    elif kind == "repeat":
        batches.insert(i + rng.choice([0, 1]), batches[i])
    elif kind == "exchange" and i:
        batches[i - 1 : i + 1] = [batches[i], batches[i - 1]]
    elif kind == "move":
        to = case.outputs[(number + rng.choice([-1, 1])) % len(case.outputs)].batches
        batch = batches.pop(rng.choice([0, -1]))
        to.insert(rng.choice([0, len(to)]), batch)
    elif kind == "spoil":
        batch = bytearray(batches[i])
        batch[rng.randrange(len(batch))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.7:
            batch[17:21] = struct.pack(">I", crc32c(bytes(batch[21:])))
        batches[i] = bytes(batch)
    elif kind == "restore":
        sources = [batch.base_offset for segment in case.segments for batch in decode_log(segment.log)]
        case.put(case.source(rng.choice(sources))[1])
    elif kind == "invent":
        output = rng.choice([output for output in case.outputs if not output.batches] or case.outputs)
        at = output.base + rng.choice([0, 0, 1, rng.randrange(60)])
        output.batches.append(encode_batch([Rec(at, NOW, b"new", b"x")]))
    elif kind == "end":
        del batches[i:]


def changed_files(case: rounds.Case, original: dict[tuple[int, str], bytes]) -> dict[tuple[int, str], bytes]:
    """Return the files of changed outputs, with the original indexes if an impossible batch prevents new ones."""
    try:
        return case.files()
    except (struct.error, IndexError, ValueError, OverflowError, MemoryError):
        return {**original, **{(output.base, ".log"): b"".join(output.batches) for output in case.outputs}}


def change_files(rng: random.Random, files: dict[tuple[int, str], bytes]) -> None:
    """Change bytes of an output file: flip a bit, lose or repeat the end or a part, or add zeros."""
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    size = {".index": 8, ".timeindex": 12}.get(name[1], rng.choice([1, 12, 61]))
    at = rng.randrange(0, len(data) + 1, size)
    kind = rng.choice(["flip", "flip", "lose", "repeat", "zeros"])
    if kind == "flip" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "lose":
        del data[at : at + size]
    elif kind == "repeat":
        data[at:at] = data[at : at + size]
    elif kind == "zeros":
        data += bytes(size)
    files[name] = bytes(data)


def prove_random_changes(
    rng: random.Random, case: rounds.Case, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove a case four times, each time with other random changes of its outputs."""
    saved, original = [list(output.batches) for output in case.outputs], case.files()
    for _ in range(4):
        for _ in range(rng.choice([0, 1, 1, 2])):
            change_batches(rng, case)
        files = changed_files(case, original)
        if rng.random() < 0.3 and files:
            change_files(rng, files)
        with monkeypatch.context() as patch, contextlib.suppress(KeytailError):
            patch.setattr(case, "files", lambda files=files: files)
            case.prove(directory)
        for output, batches in zip(case.outputs, saved, strict=True):
            output.batches = list(batches)


@pytest.mark.parametrize("interval, has_times", [(60, True), (10_000, True), (60, False)])
def test_the_states_at_boundaries_are_those_of_a_walk(
    interval: int, has_times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, all proofs in parts would be repeated in one walk. The output of the first segment has no batches."""
    found: list[Boundary] = []

    def boundaries_of(fs: FileSystem, spec: ProofSpec, group: Group, part_bytes: int) -> list[Boundary]:
        [segment] = group.sources
        cuts = [(0, position) for position in batches_of(spec, segment.base_offset, segment.log_bytes)[:-1]]
        guessed = [boundaries._boundary(fs, spec, group, *cut) for cut in cuts]
        assert guessed == walked(fs, spec, group, cuts)
        found.extend(guessed)
        return guessed

    def log(base: int, keys: bytes) -> bytes:
        records = [Rec(base + i, NOW - i if has_times else -1, bytes([key]), b"v" * 20) for i, key in enumerate(keys)]
        return b"".join(encode_batch([record]) for record in records)

    segments = {10: log(10, b"aba"), 13: log(13, b"abacdbe"), 20: b""}
    case = test_prove.Case(segments, [[10], [13]], test_prove.Round(10, 20, 20, NOW))
    case.interval = interval
    monkeypatch.setattr(in_parts, "boundaries_of", boundaries_of)
    monkeypatch.setattr(test_prove, "prove", lambda fs, spec: prove(fs, replace(spec, threads=2)))
    case.prove(tmp_path)
    assert [boundary.output_last_offset for boundary in found] == [9, 9, 15, 15, 15, 16, 17, 18]


def test_a_thread_opens_the_files_of_one_part_at_a_time(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[in_parts._PartProof] = []

    class Counted(in_parts._PartProof):
        def __init__(self, fs: FileSystem, spec: ProofSpec, keys: Keys) -> None:
            super().__init__(fs, spec, keys)
            made.append(self)

    parts.share = 1.0
    monkeypatch.setattr(in_parts, "boundaries_of", parts.cuts("guessed"))
    monkeypatch.setattr(in_parts, "_PartProof", Counted)
    spec = replace(test_prove._example().spec(tmp_path), threads=2)
    assert parts.prove_in_parts(LOCAL, spec) is not None
    assert parts.begun > 4
    assert 0 < len(made) <= 2
    assert not [file for file in open_files() if file.startswith(str(tmp_path))]


@pytest.mark.parametrize("number", range(draws(120)))
def test_parts_and_one_walk_have_the_same_verdict_on_random_changes(
    number: int, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Parts.prove` compares them. Without a change, parts pass."""
    parts.rng = rng = random.Random(chance().randrange(2**32) + number)
    if rng.random() < 0.2:
        read_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
    case = random_case(rng)
    case.prove(tmp_path)
    assert parts.agreed or not case.groups
    prove_random_changes(rng, case, tmp_path, monkeypatch)
