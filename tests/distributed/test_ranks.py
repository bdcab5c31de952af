from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.distributed.ranks import Ranks, device_of, given_ranks, joined, lost_others, open_store
from millrace.observability.metrics import Spans
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_ranks_are_those_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert given_ranks() is None
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="has RANK=1, WORLD_SIZE=None; a rank needs both"):
        given_ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="has RANK=1, WORLD_SIZE=two"):
        given_ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert given_ranks() == (1, 2)
    with (
        pytest.raises(ValueError, match="the recipe's mesh asks for 4 ranks, and 2 were started"),
        joined(4, device=CPU, phase_s=60),
    ):
        pass


def test_a_process_alone_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined(1, device=CPU, phase_s=60) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
    with (
        pytest.raises(ValueError, match="asks for 2 ranks, and 1 were started"),
        joined(2, device=CPU, phase_s=60),
    ):
        pass


def test_ranks_of_one_machine_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of(11, 8) == 3
    # As Ray shows each actor its own alone.
    assert device_of(11, 1) == 0
    monkeypatch.delenv("LOCAL_RANK")
    assert device_of(1, 8) == 1


def test_who_lost_the_others_is_told_from_who_failed() -> None:
    assert lost_others(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert lost_others(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms"))
    assert lost_others(torch.distributed.DistBackendError("gone"))
    assert not lost_others(RuntimeError("shapes do not fit"))


def test_ranks_wait_for_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, timedelta]()
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: given.update(default=timeout))
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: given.update(own=timeout))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Ranks, "barrier", lambda self: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined(2, device=CPU, phase_s=30.0) as ranks:
        assert (ranks.rank, ranks.size) == (1, 2)
    assert given == {"default": timedelta(minutes=1), "own": timedelta(minutes=1)}


def begun(rank: int) -> dict[str, Tensor]:
    ranks, spans, waited = Ranks(rank, 2), Spans(), list[float]()
    spans.report_ends(lambda name, seconds: waited.append(seconds))
    ranks.report_waits(lambda: spans("for the other"))
    # As on two machines, whose clocks differ: here it is 100 s and 1,100 s.
    now_s = 100.0 + 1000.0 * rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s)
        since_s = ranks.since(now_s - 10.0 * (rank + 1))
    return {"started_s": torch.tensor(since_s, dtype=torch.float64), "waited_s": torch.tensor(waited)}


@pytest.mark.world
def test_all_ranks_count_seconds_from_when_the_first_one_started_and_know_when_they_wait() -> None:
    told = run_ranks(2, begun)
    # Ten seconds ago, as the first one says, by each one's own clock.
    assert [float(rank["started_s"]) for rank in told] == [90.0, 1090.0]
    # They meet, and hear the first one's word.
    assert [len(rank["waited_s"]) for rank in told] == [2, 2]


def test_alone_a_rank_started_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert Ranks().since(42.0) == 42.0


@pytest.mark.world
def test_the_store_of_the_ranks_answers_on_one_address_alone() -> None:
    store = open_store("127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port), timeout=60) as connected:
        assert connected.getpeername() == ("127.0.0.1", store.port)
    with socket.socket() as another, pytest.raises(ConnectionRefusedError):
        another.connect(("127.0.0.2", store.port))
