"""The public Python interface of keytail: what a notebook needs to look into the logs of one broker.

Open the log dirs of a broker, list and describe partitions, look up offsets and times, read records as Arrow, and plan
a compaction. Nothing is changed or locked, so a broker may be running. Spark is not used. The public names are
those of this package without an underscore; all other modules of keytail are private (section Versions of the README).

    >>> from keytail import api
    >>> logs = api.open_log_dirs(log_dir)
    >>> [partition.name for partition in logs.partitions()]
    ['orders-0', 'orders-1', 'users-0']

`describe`, `lookup` and `plan` return the rows of the command of the same name (cli/ROWS.md): a problem of one
partition is in `error` of its row, and the other partitions have their results. Only `read` and `read_batches` end with
the first problem.

A process that was started as root works as the owner of the log dirs during each call. Warnings are printed on standard
error.
"""

from keytail.api._arguments import Position, Positions
from keytail.api._log_dirs import IsolationLevel, LogDirs, Partition, open_log_dirs
from keytail.cli.options import HighWatermark
from keytail.cli.rows import fields_of
from keytail.describe.command import DescribeRow
from keytail.errors import CorruptLog, KeytailError, Refused, UsageProblem
from keytail.extras import MissingExtra
from keytail.lookup.command import LookupRow
from keytail.run.rows import ResultRow

__all__ = [
    "CorruptLog",
    "DescribeRow",
    "HighWatermark",
    "IsolationLevel",
    "KeytailError",
    "LogDirs",
    "LookupRow",
    "MissingExtra",
    "Partition",
    "Position",
    "Positions",
    "Refused",
    "ResultRow",
    "UsageProblem",
    "fields_of",
    "open_log_dirs",
]
