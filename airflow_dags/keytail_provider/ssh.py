"""The process of a command on another host, over a Connection of type `ssh` (Airflow's SSHHook)."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from typing import IO, Any

import paramiko
from airflow.providers.ssh.hooks.ssh import SSHHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from keytail_provider.brokers import InventoryError
from keytail_provider.processes import NotStarted

NOT_REACHED = 255  # the status of ssh(1) for a host that it did not reach
KEEPALIVE_S = 15
LOST_AFTER_MS = 60_000  # time after which a connection without answers is closed


class OverSsh:
    """A line for the shell of another host, over a Connection of type `ssh`."""

    def __init__(self, ssh_conn_id: str, line: str, output: IO[bytes] | None) -> None:
        hook = _hook(ssh_conn_id)
        self._output = output
        self._killed = False
        try:
            with contextlib.ExitStack() as until_started:
                self._client: Any = until_started.enter_context(hook.get_conn())
                transport = self._client.get_transport()
                if isinstance(transport.sock, socket.socket):
                    transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_MS)
                self._channel: Any = transport.open_session()
                self._channel.set_combine_stderr(output is None)
                self._channel.exec_command(line)
                until_started.pop_all()
        except (paramiko.SSHException, OSError, EOFError) as problem:
            text = f"the Connection {ssh_conn_id}: {problem or type(problem).__name__}"
            raise NotStarted(NOT_REACHED, text) from None

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.sendall(data)

    def close_input(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout_s: float) -> bytes | None:
        until_s = time.monotonic() + timeout_s
        while True:
            if self._channel.recv_stderr_ready():
                return self._channel.recv_stderr(1 << 16)
            if self._channel.recv_ready():
                data: bytes = self._channel.recv(1 << 16)
                if self._output is None:
                    return data
                self._output.write(data)
                if time.monotonic() > until_s:
                    return None
            elif self._channel.eof_received or self._channel.closed:
                return b""
            elif not select.select([self._channel], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return None

    def poll(self) -> int | None:
        if self._killed:
            return -signal.SIGKILL
        if not self._channel.exit_status_ready():
            return None
        status: int = self._channel.recv_exit_status()
        return NOT_REACHED if status < 0 else status  # the connection was lost

    def kill(self) -> None:
        """Close the connection. The end of the input was the signal to stop; no other signal can be sent."""
        self._killed = True
        self._client.close()

    def close(self) -> None:
        self._client.close()


def _hook(ssh_conn_id: str) -> SSHHook:
    """Return the SSHHook of a Connection. Raises InventoryError if the Connection has a mistake, and
    AirflowNotFoundException if it is missing.
    """
    try:
        return SSHHook(ssh_conn_id, keepalive_interval=KEEPALIVE_S, conn_retry_attempts=1)  # the task is retried
    except AirflowNotFoundException:
        raise AirflowNotFoundException(
            f"there is no Connection {ssh_conn_id}, or it cannot be read now: add one of type ssh"
        ) from None
    except (AirflowException, ValueError) as problem:
        raise InventoryError(f"the Connection {ssh_conn_id}, of type ssh, cannot be used: {problem}") from None
