"""A window over a file contains the file's bytes at its position, after any sequence of requests and releases."""

import random

import pytest

from keytail.errors import KeytailError
from keytail.log import window
from keytail.log.fs import LOCAL
from keytail.log.window import Window
from tests.chance import SEED, draws


@pytest.mark.parametrize("case", range(draws(60)))
def test_a_window_contains_the_bytes_of_the_file(tmp_path, monkeypatch, case):
    rng = random.Random(f"{SEED} {case}")
    monkeypatch.setattr(window, "_HEADROOM_BYTES", rng.choice([1, 7, 64]))
    data = rng.randbytes(rng.choice([0, 1, 63, 64, 65, 1000, 5000]))
    path = str(tmp_path / "file")
    with open(path, "wb") as file:
        file.write(data)
    view = Window(LOCAL, window_bytes=rng.choice([1, 8, 64, 300]))
    for _ in range(2):
        size = rng.randint(0, len(data))
        view.open(path, size)
        while not view.is_all:
            used = rng.choice([0, view.filled, rng.randint(0, view.filled)])
            wanted = rng.choice([1, 61, rng.randint(0, 2000)]) + view.filled - used
            at = view.position + used
            view.advance(used, wanted)
            assert view.position == at
            assert view.filled >= min(wanted, size - at)
            assert view.bytes[: view.filled].tobytes() == data[at : at + view.filled]
    view.close()


@pytest.mark.parametrize("window_bytes", [60, 150], ids=["while prefetching", "while filling"])
def test_a_file_that_shrinks_is_an_error_with_its_new_end(tmp_path, window_bytes):
    path = str(tmp_path / "file")
    with open(path, "wb") as file:
        file.write(bytes(100))
    view = Window(LOCAL, window_bytes=window_bytes)
    view.open(path, 200)
    with pytest.raises(KeytailError, match="became shorter") as caught:
        while not view.is_all:
            view.advance(view.filled, 10)
    assert (caught.value.path, caught.value.byte_position) == (path, 100)
    view.close()
