"""The fields of Kafka 4.3.1's own records, in the notation of `format/messages.py`.

`kafka_messages.json` is generated from Kafka's message definitions: `python -m tests.golden.kafka_messages` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources

from keytail.format.messages import Definition

_TABLES = {
    table: {key: Definition(*facts) for key, facts in rows.items()}
    for table, rows in json.loads(resources.files("keytail.format").joinpath("kafka_messages.json").read_text()).items()
}


def _by_number(table: str) -> Mapping[int, Definition]:
    return {int(key): definition for key, definition in _TABLES[table].items()}


METADATA = _by_number("METADATA")  # records of the cluster metadata log, by type
GROUP_KEYS, GROUP_VALUES = map(_by_number, ("GROUP_KEYS", "GROUP_VALUES"))  # for `__consumer_offsets`
TRANSACTION_KEYS, TRANSACTION_VALUES = map(_by_number, ("TRANSACTION_KEYS", "TRANSACTION_VALUES"))
SHARE_KEYS, SHARE_VALUES = map(_by_number, ("SHARE_KEYS", "SHARE_VALUES"))  # for `__share_group_state`
REMOTE_LOG = _by_number("REMOTE_LOG")  # records of `__remote_log_metadata`, by type
# By name: what members of a classic consumer group send, and control records of the cluster metadata log.
CONSUMER_PROTOCOL, CONTROL = _TABLES["CONSUMER_PROTOCOL"], _TABLES["CONTROL"]
