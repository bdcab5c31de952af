from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from millrace.inference.engine import PagedEngine
from millrace.inference.graphs import DecodeGraphs, bucket
from millrace.models.load import Model
from tests.inference.fresh import decode, paged, random_requests, same
from tests.inference.invariants import check_engine
from tests.models.mixtures import mixture
from tests.models.tiny import tiny_model
from tests.twins.reference import ReferenceEngine


def replayed(model: Model, recorded: list[int], **more: Any) -> PagedEngine:
    """An engine whose decode steps go through the buffers of graphs; a recording repeats the call itself."""

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = call()
        recorded.append(len(out))
        return lambda: None if out.copy_(call()) is out else None, out

    engine = paged(model, max_requests=6, max_batch_tokens=64, **more)
    runner: Any = engine._runner
    runner._graphs = DecodeGraphs(
        runner._forward, max_rows=6, max_length=128, block_size=4, device=runner.device, record=record
    )
    return engine


def test_steps_that_are_filled_up_and_replayed_draw_the_same() -> None:
    model = tiny_model("qwen3")
    recorded: list[int] = []
    prompts, params = random_requests(3, 20)
    engine = replayed(model, recorded)
    ours = engine.generate(prompts, params)
    assert same(ours, ReferenceEngine(model, decode).generate(prompts, params))
    assert sorted(recorded) == [1, 2, 4, 8]
    check_engine(engine)


@pytest.mark.slow
def test_replayed_steps_record_where_tokens_went() -> None:
    model = mixture("qwen3_moe")
    recorded: list[int] = []
    prompts, params = random_requests(3, 20)
    ours = replayed(model, recorded, record_experts=True).generate(prompts, params)
    assert sorted(recorded) == [1, 2, 4, 8]
    for one, other in zip(ours, paged(model, record_experts=True).generate(prompts, params), strict=True):
        assert one.experts is not None and other.experts is not None
        assert one.experts.tolist() == other.experts.tolist()


def test_a_step_that_does_not_fit_is_not_replayed() -> None:
    recorded: list[int] = []
    engine = replayed(tiny_model("llama"), recorded)
    prompts, params = random_requests(4, 1)
    engine.add(prompts[0], params)
    engine.step()  # the prompt
    assert recorded == []


@pytest.mark.parametrize(
    ("num", "size"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (128, 128), (129, 192)]
)
def test_sizes(num: int, size: int) -> None:
    assert bucket(num) == size


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="cuda_graphs is on but the model is on cpu; turn it off"):
        paged(tiny_model("llama"), cuda_graphs=True)
