"""Errors of the operating system are reported as a sentence with the file and a remedy."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from keytail.errors import CorruptLog, in_words, of_system


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ENOSPC", "--max-scratch-bytes"),
        ("EDQUOT", "--max-scratch-bytes"),
        ("EIO", "kernel's log"),
        ("EROFS", "mounted read-only"),
        ("EACCES", "user that the files belong to"),
        ("EPERM", "user that the files belong to"),
        ("EMFILE", "ulimit -n"),
        ("ENFILE", "too many files open"),
        ("EXDEV", "Check the file system"),
    ],
)
def test_an_error_of_the_system_says_file_and_remedy(name: str, remedy: str) -> None:
    number = getattr(errno, name)
    problem = of_system(OSError(number, f"{os.strerror(number)} while writing to it", "/logs/t-0/x.log"), " on host h")
    assert str(problem).startswith(f"{os.strerror(number)} while writing to it on host h (/logs/t-0/x.log). ")
    assert remedy in str(problem)
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem)


def test_without_a_path_or_words_there_is_still_a_sentence() -> None:
    assert in_words(OSError("odd")) == "odd. Check the file system and its permissions; then run again"
    assert in_words(CorruptLog("cut", path="/f")) == "cut (/f)"
