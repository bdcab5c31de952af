"""A trainer and two samplers in a gloo group: all of it in one call, since each process costs seconds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from millrace.transport.broadcast import BroadcastReceiver, BroadcastSender
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import WeightReceiver, WeightSender
from tests.ranks import run_ranks
from tests.transport.pieces import Sampler, awkward

pytestmark = pytest.mark.world


def said(call: Callable[[], object]) -> str:
    with pytest.raises(WeightSyncError) as error:
        call()
    return str(error.value)


def check_every_bit(rank: int, bucket_bytes: int, count: int, *, delta: bool) -> None:
    """The first `count` weights, in buckets of a size that need be no multiple of theirs."""
    sender = WeightSender(BroadcastSender(bucket_bytes=bucket_bytes), delta=delta)
    sampler = Sampler(awkward()[:count])
    receiver = WeightReceiver(BroadcastReceiver(), sampler.load, sampler.held)
    for version, seed in enumerate([3, 3, 4]):
        if rank == 0:
            sender.send(iter(awkward(seed)[:count]), version)
            share = sender.metrics["sync/payload_share"]
            assert share == 1.0 if not delta or version != 1 else share < 0.01
        else:
            assert receiver.receive() == version
            assert sampler.holds(awkward(seed)[:count])


def check_refusals(rank: int) -> None:
    """One refuses twice in the middle of the stream, then both in more words than an answer holds."""
    sampler = Sampler(awkward() if rank == 1 else [("x" * 5000, torch.zeros(1))])
    if rank == 0:
        sender = WeightSender(BroadcastSender(bucket_bytes=100_000))
        text = said(lambda: sender.send(awkward(1), 1))
        assert text.startswith("sampler 1 refused version 1 (1 of 2 samplers did): weight matrix is not one")
        assert text.endswith("; it was tried twice")
        text = said(lambda: sender.send([("x" * 5000, torch.ones(1, 2))], 2))
        assert text.startswith("sampler 0 refused version 2 (2 of 2 samplers did): weight xxx")
        assert text.endswith("xxx ...; it was tried twice")
        return
    receiver = WeightReceiver(BroadcastReceiver(), sampler.load, sampler.held)
    if rank == 1:
        # What another one refused comes to all again.
        assert [receiver.receive() for _ in range(2)] == [1, 1]
        assert sampler.holds(awkward(1))
    else:
        assert said(receiver.receive).endswith("weight matrix is not one of the engine's")
    assert said(receiver.receive).startswith("version 2 was refused: weight xxx")


def check_the_lost(rank: int) -> None:
    """The trainer says nothing within the timeout of a group, which is short only once the group is there."""
    group = dist.new_group()
    dist.barrier(group)
    if rank > 0:
        _set_pg_timeout(timedelta(seconds=0.2), group)
        receiver = WeightReceiver(BroadcastReceiver(group), lambda named, version: None, dict)
        text = said(receiver.receive)
        assert text.startswith("a process was lost or came too late while weights were broadcast: ")
    # Until the others have seen that, the trainer is there.
    dist.barrier()


def on_each(rank: int) -> dict[str, Tensor]:
    check_every_bit(rank, 7, 4, delta=False)
    check_every_bit(rank, 40_001, 11, delta=True)
    check_every_bit(rank, 1 << 20, 11, delta=False)
    check_refusals(rank)
    check_the_lost(rank)
    return {"came_through": torch.tensor(rank)}


def test_a_broadcast_brings_every_bit_or_says_why_not() -> None:
    assert [int(found["came_through"]) for found in run_ranks(3, on_each)] == [0, 1, 2]
