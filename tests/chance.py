"""Random draws of the tests: all from one seed, so that a failure can be repeated.

KEYTAIL_SEED sets it. Without it each run draws a seed, which is printed at its start and with each failure. What a test
draws depends only on the seed: not on the tests that ran before, nor on the process that runs it.
"""

from __future__ import annotations

import os
import random

SEED = int(os.environ.setdefault("KEYTAIL_SEED", str(random.SystemRandom().randrange(1, 2**32))))


def chance() -> random.Random:
    return random.Random(SEED)


def draws(number: int) -> int:
    """How many random cases a test takes: a quarter of `number`, or a dozen, as each run has another seed.

    KEYTAIL_DRAWS gives another share; `make soak` takes all of them many times over.
    """
    return max(min(number, 12), round(number * float(os.environ.get("KEYTAIL_DRAWS", "0.25"))))
