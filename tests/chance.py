"""The draws of the tests: all of them from one seed, so that what failed can be had again.

KEYTAIL_SEED gives it. Without one a run draws its own, which its first line tells, and the line of each failure. What a
test draws depends on the seed and on nothing else: not on the tests before it, nor on the process it runs in.
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
