"""The map phase sets one bit per mapped key, and maps the same range as the reference model (CONFORMANCE.md 7 to 11).
"""

import random

import numpy as np
import pytest

from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.survivors import SurvivorBuilder, TransactionTrackers
from keytail.compact.plan import segments_between
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.key_scan import KeyScanner
from keytail.log.transactions import NATIVE_ENTRY, TransactionTracker
from tests.chance import SEED, draws
from tests.compact.logs import random_log, write_log
from tests.reference.batches import decode_log
from tests.reference.cleaner import build_map

NOW = 1_750_000_000_000


@pytest.mark.parametrize("case", range(draws(60)))
def test_bits_and_range_equal_those_of_the_model(case, tmp_path):
    rng = random.Random(f"{SEED} {case}")
    log = random_log(rng, NOW, codecs=rng.choice([(0,), (0, 1, 2, 3, 4)]), keyless=rng.choice([0, 0.1]))
    path = str(tmp_path / "t-0")
    facts = write_log(path, log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    start = min(rng.choice([base, *log.batch_ends, rng.randint(base, end)]), end - 1)
    max_entries = rng.choice([1, 3, 10**6])
    numbers = segments_between(facts, start, end)
    builder = SurvivorBuilder(
        SegmentReader(LOCAL, 400, 300), KeyScanner(rng.randrange(2**64), 4), OffsetMap(1 << 20, max_entries)
    )
    nothing = np.empty(0, NATIVE_ENTRY)
    trackers = TransactionTrackers(TransactionTracker(nothing, base), TransactionTracker(nothing, base), 0)
    survivors = builder.build(path, facts, numbers, start, end, trackers)
    survivors.check()

    offsets, latest = build_map(log.segments, start, end, max_entries)
    assert survivors.latest_offset == latest
    assert survivors.offset_map.used == len(offsets)
    expected = set(offsets.values())
    found = set()
    bits = np.unpackbits(survivors.bits, bitorder="little")
    for k, number in enumerate(range(*numbers)):
        if k < len(survivors.record_start):
            records = [r for b in decode_log(log.segments[number].log) for r in b.records]
            stop = survivors.record_start[k + 1] if k + 1 < len(survivors.record_start) else len(bits)
            for record, bit in zip(records, bits[survivors.record_start[k] : stop], strict=False):
                if bit:
                    found.add(record.offset)
    assert found == expected
