"""Checks of listen address, tokens and Host header. No torch: they run before a model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address


def check_address(host: str, token: str | None, admin_token: str | None = None) -> None:
    """Require a token for an address that other machines can reach.

    Raises:
        ValueError: other machines can reach the host and no token is set; a token is not valid in a header;
            or both tokens are equal.
    """
    if token is None and admin_token is None:
        require_loopback(host, "MILLRACE_TOKEN")
    for name, value in (("token", token), ("admin token", admin_token)):
        if value is not None and (not value or not all("!" <= letter <= "~" for letter in value)):
            raise ValueError(
                f"the {name} must be printable ASCII without spaces, or no header could carry it"
            )
    if token is not None and token == admin_token:
        raise ValueError(
            "the token and the admin token are the same, so every client could change the server; choose "
            "another one"
        )


def require_loopback(host: str, variable: str) -> None:
    """Require a loopback where no token is set; else a ValueError that names the variable of the token."""
    if not is_loopback(host):
        raise ValueError(
            f"host {host} can be reached from other machines; set a token with --token or the environment "
            f"variable {variable}, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address; False for any name but localhost."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_allowed_host(header: str, host: str, allowed: Collection[str] = ()) -> bool:
    """Return whether a request's Host header, with or without a port, names this server.

    An attacker can resolve a name of its own to this server (DNS rebinding), but not an address. If the
    listen address is a loopback, only loopback names and addresses are accepted, else every address; always
    those in `allowed`.
    """
    name = header.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    if name in {host.lower(), *(one.lower() for one in allowed)}:
        return True
    if is_loopback(host):
        return is_loopback(name)
    try:
        return bool(ip_address(name))
    except ValueError:
        return name == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address or name, not yet listening; port 0 selects a free one.

    An address that is not this machine's, or a port that is taken, is a ValueError.
    """
    found: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise ValueError(
            f"port {port} of {host} cannot be used: {error.strerror}; choose another --host or --port"
        ) from None
    return found


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket; `unix:PATH` for one in the file system."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
