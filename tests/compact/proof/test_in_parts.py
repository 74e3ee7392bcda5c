"""A proof in parts finds whatever a proof in one walk finds, wherever the parts begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from keytail.errors import KeytailError
from tests.chance import chance
from tests.compact.proof import case as rounds
from tests.compact.proof import test_legacy, test_prove, test_transactions
from tests.compact.proof.parts import Parts
from tests.in_pieces import take_in_pieces


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Prove every case of these tests in one walk and in parts."""
    made = Parts(chance())
    monkeypatch.setattr(test_prove, "prove", made.prove)
    monkeypatch.setattr(rounds, "prove", made.prove)
    return made


@pytest.mark.parametrize("name", test_prove.MUTATIONS)
def test_every_mutation_is_found(name: str, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = parts.rng
    if rng.random() < 0.2:
        take_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
    for timestamp_type in (0, 1):
        case = test_prove._example(rng.choice([0, 0, 1, 2, 3, 4]), timestamp_type)
        case.interval = rng.choice([60, 200])
        case.prove(tmp_path)
        assert parts.agreed, "no proof in parts passes"
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
