"""A proxy between a client and an HTTP server on 127.0.0.1, with which tests break the network at chosen requests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Literal

# `break`: the request is not forwarded, and the network is down from then on. `lose`: the request is forwarded, but its
# response is not, and the network is down from then on. `drop`: like `lose`, but only this connection breaks.
Action = Literal["pass", "break", "lose", "drop"]


class Proxy:
    """Forwards what a client sends, after a call of `on_request`, which decides what is done with these bytes."""

    def __init__(self, server_port: int) -> None:
        self.on_request: Callable[[bytes], Action] = lambda sent: "pass"
        self.is_down = False
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def restore(self) -> None:
        """Forward all requests and responses again."""
        self.on_request, self.is_down = lambda sent: "pass", False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                if self.is_down:
                    client.close()
                else:
                    self._start(_Connection(self, client, socket.create_connection(("127.0.0.1", self._server_port))))

    @staticmethod
    def _start(run: Callable[[], None]) -> None:
        threading.Thread(target=run, daemon=True).start()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._loses = False

    def __call__(self) -> None:
        Proxy._start(self._responses)
        with contextlib.suppress(OSError):
            while sent := self._client.recv(1 << 16):
                if not self._loses:
                    action: Action = "break" if self._proxy.is_down else self._proxy.on_request(sent)
                    if action == "break":
                        self._proxy.is_down = True
                        break
                    if action in ("lose", "drop"):
                        self._proxy.is_down, self._loses = action == "lose", True
                self._server.sendall(sent)
        self._close()

    def _responses(self) -> None:
        with contextlib.suppress(OSError):
            while received := self._server.recv(1 << 16):
                if self._loses and not received.startswith(b"HTTP/1.1 100"):
                    break
                self._client.sendall(received)
        self._close()

    def _close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
