"""HAProxy with the configuration that is shipped for containers, before gateways on this machine."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.serving import free_port

FILE = Path(__file__).parents[2] / "deploy" / "docker" / "haproxy.cfg"
needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="no haproxy on the PATH (Debian: apt-get install haproxy)"
)


def local(listen: int, admin: int, health: int, orders: int, gateways: Sequence[tuple[int, int]]) -> str:
    """The shipped file on these ports, with servers instead of names in Docker's DNS; `gateways` are public
    and admin ports."""
    text = FILE.read_text()
    for port, own in ((":8080", listen), (":8081", admin)):
        text = text.replace(f"bind {port}", f"bind 127.0.0.1:{own}")
    text = text.replace("bind 127.0.0.1:8082", f"bind 127.0.0.1:{health}")
    text = text.replace("127.0.0.1:8083", f"127.0.0.1:{orders}")
    text = re.sub(r"(?ms)^resolvers .*?^$", "", text)
    text = text.replace(" resolvers docker init-addr none resolve-prefer ipv4", "")
    for which, kind in enumerate(("gateway", "admin")):
        servers = "\n".join(f"  server {kind}-{i} 127.0.0.1:{one[which]}" for i, one in enumerate(gateways))
        text = re.sub(rf"(?m)^  server-template {kind}- .*$", servers, text)
    return text


@dataclass(frozen=True)
class Ports:
    """Before the gateways, of its own health, and for orders."""

    listen: int
    health: int
    orders: int

    def order(self, text: str) -> str:
        with socket.create_connection(("127.0.0.1", self.orders), 5) as sock:
            sock.sendall(f"{text}\n".encode())
            return sock.makefile().read()

    def info(self, name: str) -> int:
        """A number of `show info`."""
        rows = (line.partition(": ") for line in self.order("show info").splitlines())
        return next(int(value) for found, _, value in rows if found == name)

    def up(self) -> list[str]:
        """The gateways that its checks found."""
        rows = (line.split() for line in self.order("show servers state gateways").splitlines())
        return [row[3] for row in rows if len(row) > 5 and row[5] == "2"]


@contextlib.contextmanager
def haproxy(
    folder: Path, gateways: Sequence[tuple[int, int]], open_files: str | None = None
) -> Iterator[Ports]:
    """Killed at the end; `open_files` are its limits, `soft:hard`."""
    ports = Ports(free_port(), free_port(), free_port())
    file = folder / "haproxy.cfg"
    file.write_text(local(ports.listen, free_port(), ports.health, ports.orders, gateways))
    with (folder / "haproxy.log").open("w") as log:
        limited = ["prlimit", f"--nofile={open_files}"] if open_files else []
        process = subprocess.Popen([*limited, "haproxy", "-db", "-f", str(file)], stdout=log, stderr=log)
    try:
        yield ports
    finally:
        process.kill()
        process.wait()
