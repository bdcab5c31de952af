"""The network interface by which a rank reaches the others, for gloo."""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

# Linux: lists the IPv4 addresses of all interfaces, as records of an interface's name and an address.
_SIOCGIFCONF, _RECORD_BYTES, _NAME_BYTES, _ADDRESS_AT = 0x8912, 40, 16, 20
_MOST_ADDRESSES = 1024
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


class NetworkError(ValueError):
    """The ranks cannot reach each other at the given address; the message names the remedy."""


def gloo_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME: the interface from which MASTER_ADDR, the rendezvous host, is reached.

    Gloo's own choice is the address that this machine's name resolves to, often a loopback one, which ranks
    on other machines cannot reach. The result is empty where the environment has the variable already, has no
    MASTER_ADDR, or the interface is unknown, as on macOS.

    Raises:
        NetworkError: MASTER_ADDR does not resolve, or is this machine's loopback while ranks run elsewhere.
    """
    host = environment.get("MASTER_ADDR")
    if not host or "GLOO_SOCKET_IFNAME" in environment:
        return {}
    own = _own_address(host)
    size, here = (environment.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ip_address(own).is_loopback and size and here and size != here:
        raise NetworkError(
            f"MASTER_ADDR {host} is this machine's loopback address {own}, and {size} ranks run on several "
            "machines; set it to the first machine's address in their network (torchrun: --master-addr, or "
            "--local-addr on each machine)"
        )
    name = _interfaces().get(own)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _own_address(host: str) -> str:
    """Return the address of this machine from which `host` is reached; no packet is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as towards:
            towards.connect(address)
            own: str = towards.getsockname()[0]
    except OSError as error:
        raise NetworkError(
            f"this machine, {socket.gethostname()}, cannot reach MASTER_ADDR {host} ({error}); set it to the "
            "first machine's address in their network (torchrun: --master-addr, or --local-addr on each "
            "machine)"
        ) from None
    return own.partition("%")[0]


def _interfaces() -> dict[str, str]:
    """Return the interface of each address of this machine; empty where this is not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    records = array.array("B", bytes(_RECORD_BYTES * _MOST_ADDRESSES))
    asked = struct.pack("iL", len(records), records.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (num_bytes,) = struct.unpack_from("i", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))
    found = {}
    for at in range(0, num_bytes, _RECORD_BYTES):
        record = records[at : at + _RECORD_BYTES].tobytes()
        # A second address of an interface has a label after a colon.
        name = record[:_NAME_BYTES].partition(b"\0")[0].decode().partition(":")[0]
        found[socket.inet_ntoa(record[_ADDRESS_AT : _ADDRESS_AT + 4])] = name
    lines = _IPV6_ADDRESSES.read_text("ascii").splitlines() if _IPV6_ADDRESSES.exists() else []
    for address, *_, name in map(str.split, lines):
        found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))] = name
    return found


def choose_interface() -> None:
    """Set `gloo_variables` in this process."""
    os.environ.update(gloo_variables(os.environ))
