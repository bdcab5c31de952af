"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import settings


@pytest.mark.parametrize("connect", ["connect", "connect_ex"])
@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.org", 443)])
def test_no_test_reaches_the_network(connect, address):
    with (
        socket.socket() as open_socket,
        pytest.raises(OSError, match="tests run without a network.*" + address[0]),
    ):
        getattr(open_socket, connect)(address)


@pytest.mark.world
def test_this_machine_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        assert client.getpeername() == server.getsockname()


def test_libraries_know_that_they_are_offline():
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert os.environ[name] == "1"


def test_a_test_starts_with_few_threads():
    import torch

    assert torch.get_num_threads() <= 2


def test_random_examples_are_the_same_each_time():
    assert settings().derandomize
    assert settings().deadline is None


@pytest.mark.gpu
def test_a_test_marked_gpu_runs_only_where_there_is_one():
    import torch

    assert torch.cuda.is_available()
