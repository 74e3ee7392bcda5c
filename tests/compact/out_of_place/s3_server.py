"""An S3 server (moto) in a separate process, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

ACCESS_KEY, SECRET_KEY = "AKTESTACCESS", "testsecretthatnobodymaysee"
_START_LIMIT_S = 300


@dataclass(frozen=True)
class S3Server:
    port: int

    def uri(self, path: str) -> str:
        """Return the URI of a folder, without credentials, which are in the environment."""
        return f"s3://{path}?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{self.port}"

    def uri_with_keys(self, path: str) -> str:
        return self.uri(path).replace("s3://", f"s3://{ACCESS_KEY}:{SECRET_KEY}@")

    @property
    def environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return keys | {"AWS_EC2_METADATA_DISABLED": "true"}

    def objects(self, path: str) -> dict[str, bytes]:
        """Return the names and contents of the objects in a folder, read with a client other than pyarrow."""
        client = self.client()
        bucket, _, prefix = path.partition("/")
        found: dict[str, bytes] = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(f"{prefix}/")
                if not name.endswith("/") and name:  # pyarrow creates "folder/" if the folder becomes empty
                    found[name] = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        return found

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    # the server chooses a port, and prints it
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            give_up = time.monotonic() + _START_LIMIT_S
            while (found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", _text_of(output))) is None:
                assert process.poll() is None, f"the S3 server has ended: {_text_of(output)}"
                assert time.monotonic() < give_up, "the S3 server does not answer"
                time.sleep(0.05)
            yield S3Server(int(found[1]))
        finally:
            process.kill()
            process.wait()


def _text_of(file: IO[str]) -> str:
    """Return the contents of a file without moving its position, which the server shares."""
    return os.pread(file.fileno(), 1 << 16, 0).decode()
