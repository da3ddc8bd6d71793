"""What would make a start fail, found before anything is started: ports, disk, processor."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.hardware import GIB, Machine, disk_free, gib
from gateway.config import HostPort

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that something of ours will listen on; `setting` is where the operator changes it."""

    host: str
    port: int
    what: str
    setting: str


def port_problems(listeners: Iterable[Listener]) -> list[str]:
    """One message for each address that is taken or cannot be listened on."""
    return [problem for listener in listeners if (problem := _port_problem(listener)) is not None]


def _port_problem(listener: Listener) -> str | None:
    try:
        _bind(listener.host, listener.port)
    except OSError as error:
        where = HostPort(listener.host, listener.port)
        if error.errno == errno.EADDRINUSE:
            owner = port_owner(listener.port)
            by = f" by {owner}" if owner else ""
            return f"{where} ({listener.what}) is in use{by}. Stop that, or {listener.setting}."
        return f"{where} ({listener.what}) cannot be listened on: {error.strerror}. Or {listener.setting}."
    return None


def _bind(host: str, port: int) -> None:
    """Raises OSError where the address cannot be listened on; the flags are those that servers use."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def free_ports(first: int, count: int, taken: Iterable[int] = ()) -> list[int]:
    """So many free ports of 127.0.0.1, from `first` upwards."""
    avoid = set(taken)
    found: list[int] = []
    for port in range(first, 65536):
        if len(found) == count:
            break
        try:
            if port not in avoid:
                _bind("127.0.0.1", port)
                found.append(port)
        except OSError:
            continue
    return found


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """The process that listens on a port, as `name (pid N)`, where this user may see it."""
    inodes = {
        inode
        for table in ("net/tcp", "net/tcp6")
        for inode, listening in _sockets(proc / table)
        if listening == port
    }
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for entry in proc.iterdir():
        if entry.name.isdigit() and _holds(entry / "fd", targets):
            try:
                name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
            except OSError:
                continue
            return f"{name} (pid {entry.name})"
    return None


def _sockets(table: Path) -> list[tuple[str, int]]:
    """Inode and port of each listening socket in a table of /proc/net."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [(row[9], int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == _LISTENING]


def _holds(folder: Path, targets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in targets for link in folder.iterdir())
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that will be written below a folder, and for what."""

    folder: Path
    size: int
    what: str


def disk_problem(needs: Sequence[Need]) -> str | None:
    """What is short of space: needs on one file system are added up."""
    grouped: dict[int, list[Need]] = {}
    where: dict[int, tuple[int, Path]] = {}
    for need in needs:
        free, existing = disk_free(need.folder)
        device = existing.stat().st_dev
        grouped.setdefault(device, []).append(need)
        where.setdefault(device, (free, existing))
    for device, group in grouped.items():
        free, existing = where[device]
        needed = sum(need.size for need in group)
        if needed > free:
            listed = ", ".join(f"{need.what} {_amount(need.size)}" for need in group)
            return (
                f"no disk space: {_amount(needed)} are needed in {group[0].folder} ({listed}), "
                f"{_amount(free)} are free on the file system of {existing}."
            )
    return None


def _amount(size: int) -> str:
    return gib(size) if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def cpu_problem(machine: Machine) -> str | None:
    """Whether vLLM's CPU build runs on this processor: it is built for x86-64 with AVX2 or AVX-512."""
    if machine.architecture not in ("x86_64", "AMD64"):
        return f"vLLM's CPU engines are built for x86-64, this is {machine.architecture}."
    if machine.cpu_flags and "avx2" not in machine.cpu_flags:
        return "vLLM's CPU engines need a processor with AVX2; this one has none."
    return None
