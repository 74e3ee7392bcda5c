"""`keytail audit --erased`: where records with given keys are left, and what was not read."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from keytail.erase.finding import find_remaining
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from tests.chance import chance, draws
from tests.command_line import Run, rows_of
from tests.erase.logs import keys_of, task_of
from tests.erase.test_rewriting import KINDS, some_keys
from tests.in_pieces import read_in_pieces
from tests.log_dirs import random_records, records_of, snapshot, write_log_dir
from tests.reference.batches import Rec, decode_log
from tests.reference.erasure import is_erased
from tests.reference.legacy import decode_any_log

KEYS = [b"key-3", b"key-17"]


@pytest.fixture
def brokers(tmp_path: Path) -> list[Path]:
    """Write log dirs of two brokers that have the same records, of which none has a key of KEYS in users-0."""
    orders = random_records(1, 400)
    users = [record for record in random_records(2, 200) if record.key not in KEYS]
    return [write_log_dir(tmp_path / name, {"orders-0": orders, "users-0": users}) for name in "ab"]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(b"\n".join([*KEYS, b"in no record"]))
    return path


def flags(brokers: list[Path]) -> list[str | Path]:
    return [part for name, path in zip("ab", brokers, strict=False) for part in ("--replica", f"{name}={path}")]


def audit(run: Run, brokers: list[Path], keys_file: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run("audit", *flags(brokers), "--erased", keys_file, "--output", "json", *more)
    assert result.stdout, result.output
    return result.exit_code, rows_of(result)


def erased(records: list[Rec]) -> list[int]:
    return [record.offset for record in records if record.key in KEYS]


@pytest.mark.long
def test_records_are_counted_in_each_replica_until_all_are_treated(
    run: Run, brokers: list[Path], keys_file: Path
) -> None:
    expected = erased(records_of(brokers[0] / "orders-0"))
    for done in range(3):
        before = [snapshot(path) for path in brokers]
        status, rows = audit(run, brokers, keys_file)
        assert [snapshot(path) for path in brokers] == before
        found = [(item["records_left"], item["first_left"]) for item in rows["orders-0"]["replicas"]]
        assert found == [(0, None)] * done + [(len(expected), expected[0])] * (2 - done)
        assert (status, rows["orders-0"]["status"]) == ((0, "absent") if done == 2 else (3, "left"))
        assert rows["users-0"]["status"] == "absent"
        assert [item["not_read"] for row in rows.values() for item in row["replicas"]] == [[]] * 4
        table = run("audit", *flags(brokers), "--erased", keys_file, "--topic", "orders")
        assert table.exit_code == (0 if done == 2 else 1)
        assert "key-3" not in table.output and "key-17" not in table.output
        if done == 2:
            assert "No record with these keys is left." in table.stdout
            return
        text = f"b has {len(expected)} records with these keys, the first at offset {expected[0]}"
        assert text in table.stdout, table.stdout
        _erase(run, brokers[done], keys_file)


def _erase(run: Run, log_dir: Path, keys_file: Path) -> None:
    from keytail.format.producers import encode_snapshot
    from tests.erase.test_command import close_active

    (log_dir / "orders-0" / f"{400:020d}.snapshot").write_bytes(encode_snapshot([]))
    close_active(log_dir / "orders-0")
    where = ("--log-dirs", log_dir, "--topics-have-no-overrides", "--topic", "orders")
    done = run("erase", *where, "--keys-file", keys_file, "--execute")
    assert done.exit_code == 0, done.output


def test_one_replica_suffices_and_keys_may_be_encoded(run: Run, brokers: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "encoded"
    path.write_text("\n".join(key.hex() for key in KEYS))
    status, rows = audit(run, brokers[:1], path, "--key-format", "hex", "--topic", "orders")
    assert (status, rows["orders-0"]["status"]) == (1, "left")
    assert run("audit", *flags(brokers[:1])).exit_code == 2
    missing = run("audit", *flags(brokers), "--erased", tmp_path / "missing")
    assert missing.exit_code == 2 and "--erased cannot be read" in missing.output


NOT_READ = [
    f"{0:020d}.log.deleted",
    f"{0:020d}.log.cleaned",
    f"{0:020d}.log.rrun.aattempt.clean",
    f"{0:020d}.cells.rrun.aattempt.clean",
    f"{0:020d}.log.bak",
    "anything.deleted",
]
READ = [f"{0:020d}.index.deleted", f"{0:020d}.snapshot.deleted", "leader-epoch-checkpoint.tmp", "keytail-import"]


def test_files_and_directories_that_are_not_read_are_named(run: Run, brokers: list[Path], keys_file: Path) -> None:
    for name in READ:
        (brokers[1] / "users-0" / name).write_bytes(b"")
    assert audit(run, brokers, keys_file, "--topic", "users")[0] == 0
    for name in NOT_READ:
        (brokers[1] / "users-0" / name).write_bytes(b"")
    other = brokers[0] / f"users-0.{'0' * 32}-delete"
    shutil.copytree(brokers[0] / "users-0", other)
    status, rows = audit(run, brokers, keys_file, "--topic", "users")
    assert (status, rows["users-0"]["status"]) == (1, "unread")
    assert [item["not_read"] for item in rows["users-0"]["replicas"]] == [[str(other)], sorted(NOT_READ)]
    shutil.rmtree(brokers[0] / "users-0")  # the other broker has the partition
    _, rows = audit(run, brokers, keys_file, "--topic", "users")
    assert [item["not_read"] for item in rows["users-0"]["replicas"]] == [[str(other)], sorted(NOT_READ)]
    assert [item["records_left"] for item in rows["users-0"]["replicas"]] == [None, 0]
    shutil.rmtree(brokers[1] / "users-0")  # no broker has it
    result = run("audit", *flags(brokers), "--erased", keys_file)
    assert result.exit_code == 2 and "[other-directory-of-partition]" in result.output


def test_an_unfinished_replacement_and_damage_are_reported(run: Run, brokers: list[Path], keys_file: Path) -> None:
    swap = brokers[0] / "users-0" / f"{0:020d}.log.swap"
    swap.write_bytes(b"")
    _, rows = audit(run, brokers, keys_file)
    assert rows["users-0"]["status"] == "refused" and "users-0" in rows["users-0"]["error"]
    assert rows["users-0"]["replicas"][0]["records_left"] is None
    path = brokers[0] / "orders-0" / f"{100:020d}.log"
    data = bytearray(path.read_bytes())
    data[decode_log(bytes(data))[2].position + 70] ^= 1
    path.write_bytes(data)
    _, rows = audit(run, brokers, keys_file)
    assert rows["orders-0"]["status"] == "left", "the other replica has records"
    assert "invalid CRC" in rows["orders-0"]["error"]
    keys_file.write_bytes(b"in no record")
    _, rows = audit(run, brokers, keys_file)
    assert rows["orders-0"]["status"] == "corrupt"


def test_the_rest_of_a_damaged_active_segment_is_named(run: Run, brokers: list[Path], keys_file: Path) -> None:
    (brokers[0] / ".kafka_cleanshutdown").unlink()
    path = max((brokers[0] / "users-0").glob("*.log"))
    data = bytearray(path.read_bytes())
    at = decode_log(bytes(data))[-2].position
    data[at + 70] ^= 1
    path.write_bytes(data)
    _, rows = audit(run, brokers, keys_file, "--topic", "users")
    assert rows["users-0"]["status"] == "unread"
    assert rows["users-0"]["replicas"][0]["not_read"] == [f"{path.name} from byte {at} on"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_number_and_first_offset_are_exact(
    tmp_path: Path, kind: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pieces:
        read_in_pieces(monkeypatch)
    rng: random.Random = chance()
    for number in range(draws(12)):
        log = KINDS[kind](rng)
        keys = some_keys(log, rng)
        directory = tmp_path / str(number)
        task_of(directory / "t-0", log)
        [log_dir] = survey_log_dirs(LOCAL, [str(directory)])
        left = find_remaining(LOCAL, survey_partition(LOCAL, log_dir, log_dir.partitions[0]), keys_of(keys))
        batches = [batch for segment in log.segments for batch in decode_any_log(segment.log) if not batch.control]
        expected = [record.offset for batch in batches for record in batch.records if is_erased(record.key, keys)]
        assert (left.records, left.first_offset) == (len(expected), expected[0] if expected else -1)
