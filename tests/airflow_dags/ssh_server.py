"""An SSH server on the loopback address, for tests: it runs the commands of a user with the key of KEYS.

`python ssh_server.py KEYS` (of Airflow's environment, which has paramiko) writes the private key and the host key to
the file KEYS, prints its port, and runs until its standard input ends. A command gets what is sent to its input; when
the connection ends, so does that input. A command with the word `refused` is not started.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from typing import IO, Any

import paramiko

CLIENT, HOST = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()


class Server(paramiko.ServerInterface):
    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = username == "kafka" and key.asbytes() == CLIENT.asbytes()
        return paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if b"refused" in command:
            return False
        start(run, channel, command.decode())
        return True


def start(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def run(channel: paramiko.Channel, command: str) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    start(feed, channel, process.stdin)
    outputs = [start(send, process.stdout, channel.sendall), start(send, process.stderr, channel.sendall_stderr)]
    status = process.wait()
    for output in outputs:
        output.join()
    channel.send_exit_status(status)
    channel.close()


def feed(channel: paramiko.Channel, into: IO[bytes]) -> None:
    try:
        while data := channel.recv(1 << 16):
            into.write(data)
    except OSError:
        pass
    into.close()


def send(stream: IO[bytes], function: Any) -> None:
    try:
        while data := stream.read(1 << 16):
            function(data)
    except OSError:
        pass


def serve(connection: socket.socket) -> None:
    transport = paramiko.Transport(connection)
    transport.add_server_key(HOST)
    transport.start_server(server=Server())


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with open(sys.argv[1], "w") as file:
        key = {"host_key": f"{HOST.get_name()} {HOST.get_base64()}"}
        CLIENT.write_private_key_file(f"{sys.argv[1]}.key")
        with open(f"{sys.argv[1]}.key") as private:
            json.dump({**key, "private_key": private.read()}, file)
    print(listener.getsockname()[1], flush=True)
    start(lambda: [serve(listener.accept()[0]) for _ in iter(int, 1)])
    sys.stdin.read()


main()
