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
        ("EIO", "see the kernel log"),
        ("EROFS", "mounted read-only"),
        ("EACCES", "user that owns the files"),
        ("EPERM", "user that owns the files"),
        ("EMFILE", "ulimit -n"),
        ("ENFILE", "too many open files"),
        ("EXDEV", "Check the file system"),
    ],
)
def test_an_error_of_the_system_has_the_file_and_a_remedy(name: str, remedy: str) -> None:
    number = getattr(errno, name)
    problem = of_system(OSError(number, f"{os.strerror(number)} while writing it", "/logs/t-0/x.log"), " on host h")
    assert str(problem).startswith(f"{os.strerror(number)} while writing it on host h (/logs/t-0/x.log). ")
    assert remedy in str(problem)
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem)


def test_an_error_without_a_path_or_text_is_a_sentence() -> None:
    remedy = "Check the file system and its permissions, then run again"
    assert in_words(OSError("odd")) == f"odd. {remedy} [file-system-error]"
    assert in_words(CorruptLog("cut", path="/f")) == "cut (/f)"
