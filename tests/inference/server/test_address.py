"""Where a server listens, and who could reach it."""

from __future__ import annotations

import socket

import pytest

from millrace.inference.server.address import bind, check_address, is_allowed_host, is_loopback, url_of


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("example.org", False),
    ],
)
def test_only_a_loopback_address_needs_no_token(host, expected):
    assert is_loopback(host) == expected
    check_address(host, "secret")
    if expected:
        check_address(host, None)
        return
    with pytest.raises(ValueError, match=f"host {host} can be reached from other machines; set a token with"):
        check_address(host, None)


@pytest.mark.parametrize("token", ["", " a", "a b", "a\n", "ä"])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(
        ValueError, match="the token must be printable ASCII without spaces, or no header could carry it"
    ):
        check_address("127.0.0.1", token)


def test_the_two_tokens_differ_and_either_lets_others_in():
    with pytest.raises(ValueError, match="the admin token must be printable ASCII without spaces"):
        check_address("127.0.0.1", None, "a b")
    with pytest.raises(ValueError, match="the token and the admin token are the same, so every client"):
        check_address("127.0.0.1", "same", "same")
    check_address("192.168.1.5", None, "steers")
    check_address("192.168.1.5", "asks", "steers")


@pytest.mark.parametrize(
    ("header", "host", "expected"),
    [
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", True),
        ("LOCALHOST:8000", "127.0.0.1", True),
        ("localhost.", "127.0.0.1", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("", "127.0.0.1", False),
        ("evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("192.168.1.5", "127.0.0.1", False),
        ("0x7f.1", "127.0.0.1", False),
        ("[::1", "::1", True),
        ("mill.example:8000", "127.0.0.1", True),
        ("192.168.1.5:8000", "192.168.1.5", True),
        ("10.0.0.1", "0.0.0.0", True),
        ("localhost", "0.0.0.0", True),
        ("evil.example", "0.0.0.0", False),
        ("server", "server", True),
        ("server.evil.example", "server", False),
    ],
)
def test_names_that_others_own_are_not_answered_to(header, host, expected):
    assert is_allowed_host(header, host, ["Mill.example"]) is expected


@pytest.mark.world
def test_a_port_that_is_taken_is_refused_before_anything_listens():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        first.listen()
        assert url_of(first) == f"http://127.0.0.1:{port}"
        sentence = f"port {port} of 127.0.0.1 cannot be used: Address already in use; choose another --host"
        with pytest.raises(ValueError, match=sentence):
            bind("127.0.0.1", port)


@pytest.mark.world
def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"port 80 of 192\.0\.2\.1 cannot be used: Cannot assign"):
        bind("192.0.2.1", 80)


@pytest.mark.world
def test_an_address_of_six_parts_stands_in_brackets():
    with bind("::1", 0) as found:
        assert url_of(found) == f"http://[::1]:{found.getsockname()[1]}"
