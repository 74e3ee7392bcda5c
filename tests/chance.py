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
