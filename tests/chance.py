"""Draws of a test: by KEYTAIL_SEED, else by a seed that is printed, so that what failed can be had again."""

from __future__ import annotations

import os
import random


def chance() -> random.Random:
    seed = os.environ.get("KEYTAIL_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"KEYTAIL_SEED={seed}")
    return random.Random(seed)
