"""The command lines that are recorded, by command. In addition, each command is recorded with wrong flags."""

from __future__ import annotations

from keytail.main.main import COMMANDS
from tests.log_dirs import BASE_MS
from tests.main.places import NOW_MS, SEGMENT
from tests.main.recording import NARROW, Case

LOGS = "--log-dirs /HOST/logs"
NO_OVERRIDES = f"{LOGS} --topics-have-no-overrides"
POLICIES = "--topic-config orders:cleanup.policy=compact --topic-config users:cleanup.policy=delete"
KNOWN = f"{NO_OVERRIDES} {POLICIES}"
COMPACT = f"compact {KNOWN} --execute --map-memory 1m"
EXPIRING = (
    f"{NO_OVERRIDES} --topic-config orders:cleanup.policy=delete --topic-config users:cleanup.policy=compact "
    "--topic-config retention.bytes=-1"
)
IMPORT = (
    f"import /HOST/orders.parquet {KNOWN} --topic orders --append --single-replica --topic-id AAAAAAAAAAAAAAAAAAAAAQ"
)
ERASE = f"erase {NO_OVERRIDES} --topic orders --keys-file /HOST/keys"
PARTLY = NOW_MS - BASE_MS - 60  # the first segment of each partition is older than this
BROKER = "--config /HOST/server.properties"
ORDERS = "/HOST/logs/orders-0"
AT_60 = f"--timestamp {BASE_MS + 60}"  # the time of offset 60 of each partition

CASES: dict[str, tuple[Case, ...]] = {
    "plan": (
        Case("something to do", "due", (f"plan {KNOWN}", f"plan {KNOWN} --topic orders --force --quiet")),
        Case(
            "what would be left", "due", (
                f"plan {KNOWN} --measure",
                f"plan {KNOWN} --measure --output json --log-format json",
                f"plan {KNOWN} --estimate --partitions orders-0",
                f"plan {KNOWN} --measure --map-memory 300 --partitions orders-0",
                f"plan {KNOWN} --measure --estimate",
            ),
        ),
        Case("nothing to do", "clean", (f"plan {KNOWN}", f"plan {KNOWN} --from-log-start")),
        Case("a refused partition", "refused", (f"plan {KNOWN}",)),
        Case("settings are not known", "due", (f"plan {LOGS}", f"plan {NO_OVERRIDES}")),
        Case("some of each", "mixed", (f"plan {KNOWN}", f"plan {KNOWN} --partitions users-0,orders-2")),
        Case("two log dirs", "two log dirs", (f"plan --log-dirs /HOST/logs,/HOST/more {KNOWN.removeprefix(LOGS)}",)),
        Case("an empty directory", "nothing", (f"plan {KNOWN}",)),
        Case("no partitions", "no partitions", (f"plan {KNOWN}",)),
        Case(
            "a real broker, with its metadata log", "broker", (
                f"plan {BROKER}",
                f"plan {BROKER} --partitions nosuch-0",
                f"plan {BROKER} --topic-list gzip,none,events --report /HOST/plan.html",
            ),
        ),
        Case(
            "flags that conflict, and missing files", "due", (
                f"plan {KNOWN} --quiet --verbose",
                f"plan {KNOWN} --now yesterday",
                f"plan {KNOWN} --message-format v3",
                "plan --log-dirs /HOST/nowhere",
                "plan --log-dirs /HOST/logs/orders-0",
                "plan --config /HOST/nowhere.properties",
                f"plan {LOGS} --topic-configs /HOST/nowhere.txt",
                f"plan {LOGS} --topic-config orders:cleanup.policy",
                f"plan {KNOWN} --topic-list order",
                f"plan {KNOWN} --topic '['",
                f"plan {KNOWN} --report /HOST/logs/plan.html",
                f"plan {KNOWN} --replica /HOST/logs",
            ), columns=NARROW,
        ),
    ),
    "compact": (
        Case(
            "a dry run, the run, and the same again", "due", (
                f"compact {KNOWN}",
                f"{COMPACT} --rows-file /HOST/rows.json --quarantine-report /HOST/q.json",
                COMPACT,
            ),
        ),
        Case(
            "an object", "mixed", (
                f"compact {KNOWN} --output json-v1",
                f"{COMPACT} --output json-v1 --partitions orders-0,orders-1",
                f"{COMPACT} --output json-v1 --now 1",
                f"{COMPACT} --output json-v1 --topic-list nosuch",
                f"{COMPACT} --output json-v1 --nosuch",
            ), both=False, columns=NARROW,
        ),
        Case("an object without rows", "no partitions", (f"compact {KNOWN} --output json-v1",), both=False),
        Case("lines of JSON", "due", (f"{COMPACT} --partitions orders-0 --log-format json",)),
        Case("only warnings", "due", (f"{COMPACT} --partitions orders-0 --quiet",)),
        Case("with a page", "due", (f"{COMPACT} --report /HOST/run.html",)),
        Case("nothing to do", "clean", (f"compact {KNOWN}", COMPACT)),
        Case("a refused partition", "refused", (COMPACT,)),
        Case("a damaged partition", "damaged", (COMPACT,)),
        Case(
            "some of each", "mixed", (
                f"compact {KNOWN}", f"{COMPACT} --quarantine-report /HOST/q.json",
            ),
        ),
        Case("an empty directory", "nothing", (f"compact {KNOWN} --execute",)),
        Case(
            "into another tree", "due", (
                f"compact {KNOWN} --output-dir /HOST/out",
                f"compact {KNOWN} --output-dir /HOST/out --execute --map-memory 1m",
                f"compact {KNOWN} --output-dir /HOST/out --execute --map-memory 1m",
            ),
        ),
        Case(
            "flags that conflict, and missing files", "due", (
                f"compact {KNOWN} --show-keys",
                f"compact {KNOWN} --copy-originals",
                f"compact {KNOWN} --execute --now 1",
                f"compact {KNOWN} --execute --grouping wide",
                f"compact {KNOWN} --execute --fan-out maybe",
                f"compact {KNOWN} --execute --map-memory much",
                f"compact {KNOWN} --execute --deadline soon",
                f"compact {KNOWN} --execute --keep-originals /HOST/logs/kept",
                f"compact {KNOWN} --execute --ledger /HOST/logs/ledger",
                f"compact {KNOWN} --execute --output-dir /HOST/logs",
                f"compact {KNOWN} --execute --output-dir /HOST/out --keep-originals /HOST/kept",
                f"compact {KNOWN} --execute --report /HOST/x --rows-file /HOST/x",
                f"compact {KNOWN} --execute --scratch-dir /HOST/scratch",
                "compact --log-dirs /HOST/nowhere --execute",
            ), columns=NARROW,
        ),
    ),
    "prepared": (
        Case(
            "prepared, listed, committed in part, and discarded", "due", (
                f"compact {KNOWN} --prepare",
                f"prepared {KNOWN}",
                f"{COMPACT} --prepared-only --partitions orders-0",
                f"compact {KNOWN} --prepare",
                f"prepared {KNOWN} --discard",
                f"prepared {KNOWN} --discard --execute",
                f"prepared {KNOWN}",
            ),
        ),
        Case(
            "flags that conflict", "due", (
                f"compact {KNOWN} --prepare --execute",
                f"compact {KNOWN} --prepared-only",
                "prepared",
            ), columns=NARROW,
        ),
    ),
    "verify": (
        Case("no problems", "due", (f"verify {LOGS}", f"verify {LOGS} --topic users --quiet")),
        Case("only the ends", "mixed", (f"verify {LOGS} --only-ends",)),
        Case("some of each", "mixed", (f"verify {LOGS} --rows-file /HOST/r.json", f"verify {LOGS} --topic us.*")),
        Case("after a crash", "crashed", (f"verify {LOGS}",)),
        Case("an empty directory", "nothing", (f"verify {LOGS}",)),
        Case("no partitions", "no partitions", (f"verify {LOGS}",)),
        Case("a real broker", "broker", (f"verify {BROKER} --topic-list transactional,zstd,empty",)),
        Case(
            "flags that conflict, and missing files", "due", (
                f"verify {LOGS} --quiet --verbose",
                "verify --log-dirs /HOST/nowhere",
                f"verify {LOGS} --rows-file /HOST/logs/rows.json",
                f"verify {LOGS} --rows-file /HOST/nowhere/rows.json",
                f"verify {LOGS} --partitions orders",
                f"verify {LOGS} --partitions orders-7",
            ), columns=NARROW,
        ),
    ),
    "describe": (
        Case("partitions", "due", (f"describe {KNOWN}", f"describe {KNOWN} --records --partitions orders-0")),
        Case("every setting", "due", (f"describe {KNOWN} --all --partitions orders-0",)),
        Case("nothing is due", "clean", (f"describe {KNOWN}",)),
        Case("some of each", "mixed", (f"describe {KNOWN} --records",)),
        Case("settings are not known", "due", (f"describe {LOGS} --partitions users-0",)),
        Case("an empty directory", "nothing", (f"describe {LOGS}",)),
        Case("a real broker", "broker", (f"describe {BROKER} --topic-list transactional,compact-and-delete --all",)),
        Case(
            "flags that conflict, and missing files", "due", (
                f"describe {KNOWN} --high-watermark none",
                "describe --log-dirs /HOST/nowhere",
                f"describe {KNOWN} --topic-list user",
            ), columns=NARROW,
        ),
    ),
    "rebuild-index": (
        Case(
            "a dry run, the run, and the same again", "crashed", (
                f"rebuild-index {LOGS}",
                f"rebuild-index {LOGS} --truncate",
                f"rebuild-index {LOGS} --truncate --execute",
                f"rebuild-index {LOGS} --truncate --execute",
            ),
        ),
        Case("without --truncate", "crashed", (f"rebuild-index {LOGS} --execute --report /HOST/run.html",)),
        Case("files that a broker writes", "due", (f"rebuild-index {LOGS} --execute", f"rebuild-index {LOGS} --all")),
        Case("some of each", "mixed", (f"rebuild-index {LOGS}", f"rebuild-index {LOGS} --execute")),
        Case("an empty directory", "nothing", (f"rebuild-index {LOGS} --execute",)),
        Case(
            "flags that conflict, and missing files", "crashed", (
                f"rebuild-index {LOGS} --execute --ledger /HOST/logs/ledger",
                f"rebuild-index {LOGS} --execute --rows-file /HOST/x --quarantine-report /HOST/x",
                "rebuild-index --log-dirs /HOST/nowhere",
                f"rebuild-index {LOGS} --partitions orders-7",
            ), columns=NARROW,
        ),
    ),
    "expire": (
        Case(
            "a dry run, the run, and the same again", "due", (
                f"expire {EXPIRING} --topic-config retention.ms={PARTLY}",
                f"expire {EXPIRING} --topic-config retention.ms={PARTLY} --execute",
                f"expire {EXPIRING} --topic-config retention.ms={PARTLY} --execute",
            ),
        ),
        Case("no segment remains", "due", (f"expire {EXPIRING} --topic-config retention.ms=1000 --execute",) * 2),
        Case("nothing is old", "due", (f"expire {EXPIRING} --topic-config retention.ms=-1",)),
        Case("settings are not known", "due", (f"expire {LOGS}", f"expire {NO_OVERRIDES} --execute")),
        Case("some of each", "mixed", (f"expire {EXPIRING} --topic-config retention.ms=1000 --execute",)),
        Case("an empty directory", "nothing", (f"expire {EXPIRING}",)),
        Case("a real broker", "broker", (f"expire {BROKER} --topic-list events,compact-and-delete,none",)),
        Case(
            "flags that conflict, and missing files", "due", (
                f"expire {EXPIRING} --execute --now 1",
                f"expire {EXPIRING} --topic-config retention.ms=long",
                f"expire {EXPIRING} --execute --ledger /HOST/logs/ledger",
                "expire --log-dirs /HOST/nowhere",
            ), columns=NARROW,
        ),
    ),
    "erase": (
        Case(
            "a dry run, the run, and the same again", "erasable", (
                f"{ERASE} --partitions orders-0", f"{ERASE} --execute", f"{ERASE} --execute",
            ),
        ),
        Case(
            "no record has any of the keys", "erasable", (
                f"erase {NO_OVERRIDES} --topic users --keys-file /HOST/absent --key-format hex",
            ),
        ),
        Case("settings are not known", "erasable", (f"erase {LOGS} --topic orders --keys-file /HOST/keys",)),
        Case(
            "flags that conflict, and missing files", "erasable", (
                f"erase {NO_OVERRIDES} --keys-file /HOST/keys",
                f"erase {NO_OVERRIDES} --topic orders --keys-file /HOST/nowhere",
                f"erase {NO_OVERRIDES} --topic orders --keys-file /HOST/twice",
                f"erase {NO_OVERRIDES} --topic orders --keys-file /HOST/keys --key-format hex",
                f"erase {NO_OVERRIDES} --topic orders --keys-file /HOST/keys --key-format avro",
                f"{ERASE} --execute --ledger /HOST/logs/ledger",
            ), columns=NARROW,
        ),
    ),
    "lookup": (
        Case(
            "by offset and by time", "due", (
                f"lookup {LOGS} --partitions orders-0 --offset 57",
                f"lookup {LOGS} --partitions orders-0 --offset 57 --explain",
                f"lookup {LOGS} --partitions orders-0 {AT_60} --explain",
                f"lookup {LOGS} --partitions orders-0 --timestamp 2023-11-14T22:13:20Z",
                f"lookup {LOGS} --topic orders --offset 119",
                f"lookup {LOGS} --partitions orders-0 --offset 120",
                f"lookup {LOGS} --partitions orders-0 --timestamp 1800000000000",
            ),
        ),
        Case("some of each", "mixed", (f"lookup {LOGS} --offset 55",)),
        Case("an empty directory", "nothing", (f"lookup {LOGS} --offset 1",)),
        Case("a real broker", "broker", (f"lookup {BROKER} --partitions transactional-0 --offset 700 --explain",)),
        Case(
            "flags that conflict, and missing files", "due", (
                f"lookup {LOGS} --partitions orders-0",
                f"lookup {LOGS} --partitions orders-0 --offset 1 --timestamp 2",
                f"lookup {LOGS} --partitions orders-0 --offset -1",
                f"lookup {LOGS} --partitions orders-0 --timestamp noon",
                "lookup --log-dirs /HOST/nowhere --offset 1",
            ), columns=NARROW,
        ),
    ),
    "dump": (
        Case(
            "a segment and its indexes", "due", (
                f"dump {ORDERS}/{SEGMENT}.log",
                f"dump {ORDERS}/{SEGMENT}.log --print-data-log --from-offset 8 --to-offset 12",
                f"dump {ORDERS}/{SEGMENT}.log --deep-iteration --max-bytes 600",
                f"dump {ORDERS}/{SEGMENT}.log --print-data-log --skip-record-metadata --to-offset 2 --no-escape",
                f"dump {ORDERS}/{SEGMENT}.index",
                f"dump {ORDERS}/{SEGMENT}.timeindex --verify-index-only",
                f"dump {ORDERS}/{SEGMENT}.index --index-sanity-check",
                f"dump {ORDERS}/leader-epoch-checkpoint",
                "dump --files /HOST/logs/replication-offset-checkpoint,/HOST/logs/meta.properties",
            ),
        ),
        Case("a directory", "clean", (f"dump {ORDERS}", "dump /HOST/logs/cleaner-offset-checkpoint")),
        Case("a damaged file", "damaged", (f"dump {ORDERS}/{40:020d}.log",)),
        Case("a wrong index", "crashed", (f"dump /HOST/logs/orders-1/{SEGMENT}.timeindex",)),
        Case("an empty directory", "nothing", ("dump /HOST/logs",)),
        Case(
            "files of a real broker", "broker", (
                f"dump /HOST/logs/__consumer_offsets-0/{57:020d}.log --offsets-decoder --from-offset 57 --to-offset 62",
                f"dump /HOST/logs/__transaction_state-0/{SEGMENT}.log --transaction-log-decoder --to-offset 6",
                f"dump /HOST/logs/transactional-0/{13:020d}.snapshot",
                f"dump /HOST/logs/transactional-0/{13:020d}.txnindex",
                f"dump /HOST/logs/transactional-0/{554:020d}.log --deep-iteration --to-offset 558",
                "dump /HOST/logs/transactional-0/partition.metadata",
                "dump /HOST/logs/empty-0",
                "dump /HOST/logs/meta.properties",
            ),
        ),
        Case(
            "flags that conflict, and missing files", "due", (
                "dump /HOST/nowhere.log",
                f"dump {ORDERS}/{SEGMENT}.log --offsets-decoder --transaction-log-decoder",
                f"dump {ORDERS}/{SEGMENT}.log --print-data-log --deep-iteration --from-offset 9 --to-offset 3",
                f"dump {ORDERS}/{SEGMENT}.log --from-offset 1 --from-position 1",
                f"dump {ORDERS}/{SEGMENT}.index --verify-index-only --index-sanity-check",
                f"dump {ORDERS}/{SEGMENT}.log --max-bytes x",
                "dump /HOST/logs/.kafka_cleanshutdown",
            ), columns=NARROW,
        ),
    ),
    "audit": (
        Case(
            "two replicas", "replicas", (
                "audit --replica a=/HOST/a --replica b=/HOST/b",
                "audit --replica a=/HOST/a --replica b=/HOST/b --topic users",
                "audit --replica a=/HOST/a --replica b=/HOST/b --topic orders --examples 1 --report /HOST/audit.html",
            ),
        ),
        Case("three replicas", "replicas", ("audit --replica /HOST/a --replica /HOST/b --replica /HOST/c",)),
        Case(
            "flags that conflict, and missing files", "replicas", (
                "audit --replica a=/HOST/a",
                "audit --replica a=/HOST/a --replica a=/HOST/b",
                "audit --replica a=/HOST/a --replica b=/HOST/a",
                "audit --replica a=/HOST/a --replica b=/HOST/nowhere",
                "audit --replica a=/HOST/a --replica b=/HOST/b --topic-list nosuch",
                "audit --replica a=/HOST/a --replica b=/HOST/b --examples -1",
            ), columns=NARROW,
        ),
    ),
    "import": (
        Case(
            "what ends before Spark starts", "table", (
                f"import /HOST/orders.parquet {LOGS} --topic orders",
                f"import /HOST/orders.parquet {KNOWN} --topic order",
                f"import /HOST/orders.parquet {KNOWN} --topic or/ders",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --single-replica --replica-log-dirs /HOST/x",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --partition-count 1",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --replica-log-dirs /HOST/nowhere",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --format avro",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --segment-bytes many",
                f"import /HOST/orders.parquet {KNOWN} --topic orders --codec rar",
                "import /HOST/orders.parquet --log-dirs /HOST/nowhere --topic orders",
                f"import {KNOWN} --topic orders",
                f"import /HOST/orders.parquet {KNOWN}",
            ), columns=NARROW,
        ),
    ),
    "export": (
        Case("a dry run", "due", (f"export {LOGS} --to /HOST/lake", f"export {LOGS} --to /HOST/lake --topic or.*")),
        Case("some of each", "mixed", (f"export {LOGS} --to /HOST/lake",)),
        Case("an empty directory", "nothing", (f"export {LOGS} --to /HOST/lake",)),
        Case("a real broker", "broker", (f"export {BROKER} --to /HOST/lake --topic-list transactional,empty,events",)),
        Case(
            "flags that conflict, and missing files", "due", (
                f"export {LOGS}",
                f"export {LOGS} --to /HOST/logs/lake",
                f"export {LOGS} --to s3://bucket/lake",
                f"export {LOGS} --to /HOST/no/such/place",
                f"export {LOGS} --to /HOST/lake --as-of-offset 1 --as-of-timestamp 5",
                f"export {LOGS} --to /HOST/lake --as-of-timestamp noon",
                f"export {LOGS} --to /HOST/lake --value-format protobuf",
                f"export {LOGS} --to /HOST/lake --value-format avro --value-schema 1=/HOST/nowhere.avsc",
                f"export {LOGS} --to /HOST/lake --key-schema 1=/HOST/nowhere.avsc",
                f"export {LOGS} --to /HOST/lake --topic-list order",
            ), columns=NARROW,
        ),
    ),
    "cut": (
        Case(
            "a real broker, which is a cluster of one", "broker", (
                "cut --replica 1=/HOST/logs --output-dir /HOST/out",
                "cut --replica 1=/HOST/logs --output-dir /HOST/out --execute",
                "cut --replica 1=/HOST/logs --output-dir /HOST/out --execute",
            ),
        ),
        Case(
            "flags that conflict, and missing files", "replicas", (
                "cut --replica a=/HOST/a",
                "cut --output-dir /HOST/out",
                "cut --replica a=/HOST/a --output-dir /HOST/out",
                "cut --replica a=/HOST/a --replica b=/HOST/b --output-dir /HOST/out",
                "cut --replica a=/HOST/nowhere --output-dir /HOST/out",
                "cut --replica a=/HOST/a --output-dir /HOST/a/out",
                "cut --replica a=/HOST/a --output-dir /HOST/out --complete-before yesterday",
            ), columns=NARROW,
        ),
    ),
    "salvage": (
        Case(
            "a dry run, the run, and the same again", "damaged", (
                f"salvage {LOGS} --to /HOST/saved",
                f"salvage {LOGS} --to /HOST/saved --execute",
                f"salvage {LOGS} --to /HOST/saved --execute",
            ),
        ),
        Case("nothing is lost", "due", (f"salvage {LOGS} --to /HOST/saved --topic users",)),
        Case("some of each", "mixed", (f"salvage {LOGS} --to /HOST/saved --execute",)),
        Case("an empty directory", "nothing", (f"salvage {LOGS} --to /HOST/saved",)),
        Case(
            "flags that conflict, and missing files", "damaged", (
                f"salvage {LOGS}",
                f"salvage {LOGS} --to /HOST/logs/saved",
                f"salvage {LOGS} --to /HOST/logs --execute",
                "salvage --log-dirs /HOST/nowhere --to /HOST/saved",
                f"salvage {LOGS} --to /HOST/saved --partitions orders-7",
            ), columns=NARROW,
        ),
    ),
    "undo": (
        Case(
            "a compaction, its undo, and the same again", "due", (
                f"{COMPACT} --keep-originals /HOST/kept",
                "undo --originals /HOST/kept",
                "undo --originals /HOST/kept --run c0de0001",
                "undo --originals /HOST/kept --run c0de0001 --execute",
                "undo --originals /HOST/kept --run c0de0001 --execute",
                "undo --originals /HOST/kept --run c0de0001 --forget",
                "undo --originals /HOST/kept --run c0de0001 --forget --execute",
                "undo --originals /HOST/kept --list",
            ),
        ),
        Case(
            "a refused partition", "due", (
                f"{COMPACT} --keep-originals /HOST/kept --quiet",
                f"{COMPACT} --force --from-log-start --quiet",
                f"expire {EXPIRING} --topic-config retention.ms=1000 --execute --quiet",
                "undo --originals /HOST/kept --run c0de0001 --execute",
            ),
        ),
        Case(
            "flags that conflict, and missing files", "due", (
                "undo",
                "undo --originals /HOST/nowhere",
                "undo --originals /HOST/logs",
                "undo --originals /HOST/logs --execute",
                "undo --originals /HOST/logs --forget",
                "undo --originals /HOST/logs --run c0de0001",
            ), columns=NARROW,
        ),
    ),
    "history": (
        Case(
            "flags that conflict, and missing files", "due", (
                "history",
                "history --ledger /HOST/nowhere",
                "history --ledger /HOST/logs",
                "history --ledger /HOST/logs --run x --maintain",
                "history --ledger /HOST/logs --execute",
                "history --ledger /HOST/logs --retain-days 7",
                "history --ledger /HOST/logs --partitions orders",
                "history --ledger /HOST/logs --limit 0",
            ), columns=NARROW,
        ),
    ),
    "downtime": (
        Case(
            "times that are impossible, and a ledger that does not exist", "due", (
                "downtime",
                "downtime --ledger /HOST/nowhere --broker b1",
                "downtime --ledger /HOST/nowhere --broker b1 --down-at soon",
                "downtime --ledger /HOST/nowhere --broker b1 --down-at 2026-01-02T00:00:00Z --reachable-at 2026-01-01",
                "downtime --ledger /HOST/nowhere --broker b1 --down-at 2026-01-02 --in-sync-at 2026-01-03",
                "downtime --ledger /HOST/nowhere --broker b1 --down-at 2026-01-02 --run 3f2a91c0",
            ), columns=NARROW,
        ),
    ),
    "report": (
        Case(
            "flags that conflict, and missing files", "due", (
                "report --ledger /HOST/nowhere /HOST/page.html",
                "report --ledger /HOST/logs /HOST/page.html --run x --since 1",
                "report --ledger /HOST/logs /HOST/page.html --since yesterday",
                "report --ledger /HOST/logs /HOST/nowhere/page.html",
                "report --ledger /HOST/logs",
                "report /HOST/page.html",
            ), both=False, columns=NARROW,
        ),
    ),
    "doctor": (
        Case("the machine", "due", ("doctor",)),
        Case("log dirs", "due", (f"doctor {LOGS}",)),
        Case("after a crash", "crashed", (f"doctor {LOGS}",)),
        Case("some of each", "mixed", (f"doctor {LOGS}",)),
        Case("two log dirs", "two log dirs", ("doctor --log-dirs /HOST/logs,/HOST/more",)),
        Case("an empty directory", "nothing", (f"doctor {LOGS}",)),
        Case("a real broker", "broker", (f"doctor {BROKER}",)),
        Case(
            "missing files", "due", (
                "doctor --log-dirs /HOST/nowhere", "doctor --config /HOST/nowhere.properties",
            ),
        ),
    ),
    "jobs-dir": (Case("installed without jobs", "nothing", ("jobs-dir",), both=False),),
}  # fmt: skip

# Recordings by command, or by the part that several commands share.
ON_SPARK: dict[str, tuple[Case, ...]] = {
    "import": (
        Case(
            "a dry run, the run, and the same again", "table", (
                f"import /HOST/orders.parquet {KNOWN} --topic orders --import-id i1",
                f"{IMPORT} --import-id i1",
                f"{IMPORT} --import-id i1 --execute",
                f"{IMPORT} --import-id i1 --execute",
            ),
        ),
    ),
    "export": (
        Case(
            "the run, and the same again", "due", (
                f"export {LOGS} --topic-list users --to /HOST/lake --key-format utf8 --execute",
                f"export {LOGS} --topic-list users --to /HOST/lake --key-format utf8 --execute",
            ),
        ),
    ),
    "ledger": (
        Case(
            "a run with a ledger, and what `history` and `report` make of it", "due", (
                f"expire {EXPIRING} --topic-config retention.ms=1000 --execute --ledger /HOST/ledger",
                *(
                    f"history --ledger /HOST/ledger {flags} --output {output}"
                    for flags in ("--limit 9", "--run c0de0001", "--partitions orders-0", "--maintain --retain-days 7")
                    for output in ("table", "json")
                ),
                "report --ledger /HOST/ledger /HOST/page.html",
                "report --ledger /HOST/ledger --run nosuch /HOST/page.html",
            ), both=False,
        ),
    ),
}  # fmt: skip


def wrong_flags(command: str) -> Case:
    """Return wrong command lines for any command: without flags, with an unknown flag, near misses, and a missing
    value.
    """
    lines = (
        command,
        f"{command} --nosuch",
        f"{command} --outputt json",
        f"{command} --output xml",
        f"{command} --log-format xml",
    )
    return Case("wrong flags", "nothing", (*lines, f"{command} --log-dirs", f"{command} --quiet=1"), False, NARROW)


def cases_of(command: str) -> tuple[Case, ...]:
    return (*CASES[command], wrong_flags(command))


assert list(CASES) == sorted(CASES, key=list(COMMANDS).index)
assert set(CASES) == set(COMMANDS)
