"""Decisions about whole batches, compared with the same rules written row by row (CLEANING.md)."""

from __future__ import annotations

import numpy as np

from keytail.format.batch import BATCH_TABLE, CONTROL, DELETE_HORIZON, TRANSACTIONAL
from keytail.kernels.rewriting import rows as kernels
from keytail.kernels.rewriting.records import BEYOND, BY_BITS, BY_MAP, COPY, DROP, EMPTY, OPEN
from tests.chance import chance


def _decided(row, facts, survives, has_null, ends, unneeded, aborted):
    """Return (rule, whether it is BY_BITS, decision, whether an empty batch is retained, whether tombstones expire)."""
    by_file, control = bool(facts[kernels.BY_FILE_TIME]), bool(row["attributes"] & CONTROL)
    horizon = bool(row["attributes"] & DELETE_HORIZON) and not by_file
    mapped = facts[kernels.FIRST_DIRTY] <= row["base_offset"] and row["last_offset"] <= facts[kernels.LATEST_OFFSET]
    if facts[kernels.ASK_MAP] and row["attributes"] & TRANSACTIONAL:
        mapped = False
    held = row["last_offset"] >= facts[kernels.REMOVAL_LIMIT]
    over = horizon and row["base_timestamp_ms"] <= facts[kernels.NOW_MS]
    if by_file or row["magic"] < 2:
        over = bool(facts[kernels.FILE_IS_OLD])
    over = over and not held
    stays_empty = ends or (not by_file and row["last_offset"] + 1 == facts[kernels.FIRST_UNCLEANABLE])
    needs_none = by_file or horizon
    if control:
        rule, what = BEYOND, COPY if needs_none else OPEN
    elif mapped:
        untouched = all(survives) and row["magic"] == 2 and (not has_null or (needs_none and not over))
        rule, what = BY_BITS, COPY if untouched else OPEN
    elif row["base_offset"] > facts[kernels.LATEST_OFFSET]:
        rule, what = BEYOND, COPY if needs_none and row["magic"] == 2 else OPEN
    else:
        rule, what = BY_MAP, OPEN
    nothing_left = rule == BY_BITS and not any(survives)
    if not row["record_count"] or nothing_left or (unneeded and over) or aborted:
        what = EMPTY if stays_empty else DROP
    return rule, rule == BY_BITS, what, stays_empty, over


def test_decisions_about_batches_follow_the_rules():
    rng = chance()
    seen = set()
    for _ in range(60):
        n = rng.randrange(1, 25)
        table = np.zeros(n, BATCH_TABLE)
        offset = 0
        for row in table:
            row["base_offset"], row["last_offset"] = offset, offset + rng.randrange(4)
            offset = row["last_offset"] + rng.randrange(1, 3)
            row["record_count"] = rng.choice([0, 1, 1, 2, 9, 30])
            row["attributes"] = rng.choice([0, 0, 0, TRANSACTIONAL, TRANSACTIONAL | CONTROL])
            row["base_timestamp_ms"], row["magic"] = rng.randrange(97, 104), rng.choice([2, 2, 2, 1])
            if row["magic"] == 2:
                row["attributes"] |= rng.choice([0, 0, DELETE_HORIZON])
        facts = np.zeros(kernels.FACTS, np.int64)
        facts[kernels.FIRST_DIRTY], facts[kernels.LATEST_OFFSET] = rng.randrange(offset), rng.randrange(-1, offset)
        facts[kernels.FIRST_UNCLEANABLE] = rng.choice(table["last_offset"]) + 1
        facts[kernels.NOW_MS], facts[kernels.ASK_MAP] = 100, rng.random() < 0.3
        facts[kernels.FILE_IS_OLD] = rng.random() < 0.5
        facts[kernels.BY_FILE_TIME] = rng.random() < 0.4
        facts[kernels.REMOVAL_LIMIT] = rng.choice([2**63 - 1, 0, rng.randrange(offset)])
        facts[kernels.SEGMENT], facts[kernels.RECORDS] = 3, 7
        facts[kernels.RECORD_BIT], facts[kernels.BATCH_BIT] = rng.randrange(20), rng.randrange(20)
        total = 7 + int(table["record_count"].sum())
        all_or_none = rng.choice([0.0, 0.5, 0.97, 1.0])
        survives = np.array([rng.random() < all_or_none for _ in range(facts[kernels.RECORD_BIT] + total)], bool)
        nulls = np.array([rng.random() < 0.4 for _ in range(facts[kernels.BATCH_BIT] + n)], bool)
        flags = [np.array([rng.random() < 0.2 for _ in range(n)], bool) for _ in range(3)]
        out = [np.zeros(n, kind) for kind in (np.int8, np.int64, np.int64, bool, bool, np.int8)]
        bits = [np.packbits(x, bitorder="little") for x in (survives, nulls)]
        markers = kernels.decide_rows(table, facts, *bits, *flags, *out)

        before, removed = 7, 0
        for i, row in enumerate(table):
            bit = int(facts[kernels.RECORD_BIT]) + before
            own = survives[bit : bit + row["record_count"]].tolist()
            rule, by_bits, what, stays_empty, go = _decided(
                row, facts, own, nulls[facts[kernels.BATCH_BIT] + i], *(flag[i] for flag in flags)
            )
            found = tuple(int(column[i]) for column in out)
            assert found == (rule, bit if by_bits else -1, (3 << 32) + before, stays_empty, go, what), (i, row)
            removed += bool(row["attributes"] & CONTROL) and row["record_count"] > 0 and what in (EMPTY, DROP)
            before += int(row["record_count"])
            seen.add((rule, what))
        assert markers == removed
    assert seen >= {(BY_BITS, OPEN), (BY_BITS, DROP), (BY_MAP, OPEN), (BEYOND, COPY), (BEYOND, EMPTY)}
