"""Which network interface gloo uses."""

from __future__ import annotations

import pytest

from millrace.distributed.network import NetworkError, gloo_variables


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_of_one_machine_stay_on_loopback(host: str) -> None:
    shared = {"MASTER_ADDR": host, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # lo, or lo0 on macOS.
    assert gloo_variables(shared)["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_a_given_interface_and_a_single_process_are_left_as_they_are() -> None:
    assert gloo_variables({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}) == {}
    assert gloo_variables({}) == {}


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(NetworkError, match="cannot reach MASTER_ADDR first.invalid .*; set it to the first"):
        gloo_variables({"MASTER_ADDR": "first.invalid"})


def test_loopback_is_refused_where_ranks_run_on_other_machines_too() -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(
        NetworkError, match=r"is this machine's loopback address 127\.0\.0\.1, and 4 ranks run"
    ):
        gloo_variables(shared)
