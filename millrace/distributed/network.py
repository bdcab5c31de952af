"""The network interface by which a rank reaches the others, for gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address

import psutil


class NetworkError(ValueError):
    """The ranks cannot reach each other at the given address; the message names the remedy."""


def gloo_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME: the interface from which MASTER_ADDR, the rendezvous host, is reached.

    Gloo's own choice is the address that this machine's name resolves to, often a loopback one, which ranks
    on other machines cannot reach. The result is empty where the environment has the variable already, has no
    MASTER_ADDR, or the interface is unknown.

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
    """Return the interface of each address of this machine."""
    addresses = psutil.net_if_addrs()
    return {one.address.partition("%")[0]: name for name, own in addresses.items() for one in own}


def choose_interface() -> None:
    """Set `gloo_variables` in this process."""
    os.environ.update(gloo_variables(os.environ))
