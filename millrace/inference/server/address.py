"""Where a server listens, and who could reach it. No torch: a mistake shows before a model is loaded."""

from __future__ import annotations

import socket
from ipaddress import ip_address


def check_address(host: str, token: str | None) -> None:
    """Refuse to let strangers in.

    Raises:
        ValueError: the host can be reached from elsewhere and there is no token, or no header can carry it.
    """
    if token is None and not is_loopback(host):
        raise ValueError(
            f"host {host} can be reached from other machines; set a token with --token or the environment "
            "variable MILLRACE_TOKEN, or listen on 127.0.0.1"
        )
    if token is not None and (not token or not all("!" <= letter <= "~" for letter in token)):
        raise ValueError("the token must be printable ASCII without spaces, or no header could carry it")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost may mean anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket on an address that does not listen yet.

    Args:
        host: an address or a name.
        port: 0 takes a free one.

    Raises:
        ValueError: the address is not this machine's, or the port is taken.
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
    """The URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
