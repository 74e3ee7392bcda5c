"""Random draws of the tests, all from one seed, so that a failure can be repeated.

KEYTAIL_SEED sets the seed. Without it each run draws one, which is printed at its start and with each failure. The
draws of a test depend only on the seed, not on the tests that ran before, nor on the process that runs it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

SEED = int(os.environ.setdefault("KEYTAIL_SEED", str(random.SystemRandom().randrange(1, 2**32))))


def chance() -> random.Random:
    """Return a new generator, which begins with the same draws as all others: a test calls this only once."""
    return random.Random(SEED)


def draws(number: int) -> int:
    """Return the number of random cases that a test runs: a quarter of `number`, but at least a dozen if `number` is
    not smaller.

    A quarter is enough, because each run has another seed. KEYTAIL_DRAWS sets another share; `make soak` runs a
    multiple of `number`.
    """
    return max(min(number, 12), round(number * float(os.environ.get("KEYTAIL_DRAWS", "0.25"))))


def cases(number: int, enough: Callable[[], object]) -> Iterator[int]:
    """Yield the numbers of `number` random cases, and of more cases until `enough()`, which raises an AssertionError
    after twenty times as many.

    A test that requires that its cases contain certain things would otherwise fail sometimes.
    """
    for case in range(20 * number):
        if case >= number and enough():
            return
        yield case
    assert enough(), f"{20 * number} random cases never had all that the test requires"
