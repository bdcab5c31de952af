"""Stages one after the other are the model, and their schedule cannot wait in a circle."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from millrace.distributed.pipeline_stages import (
    Absent,
    MicroBatchRow,
    StageStep,
    deal_layers,
    pieces,
    schedule,
    stage_model,
    stage_states,
    whole_row,
)
from millrace.models.fused import set_deterministic
from millrace.models.heads import scalar_model
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.logprobs import hidden_states, packed_context
from tests.models.deep import NUM_LAYERS, check_refused, deep_model, weighted_batch
from tests.models.tiny import SHAPES, SIZES


def chained(model: Model, row: MicroBatchRow, num_stages: int) -> Tensor:
    found = pieces(model, num_stages)
    received_1TD = None
    for stage in range(num_stages):
        received_1TD = stage_states(stage_model(model, found, stage), row, received_1TD)
    return received_1TD[0]


@pytest.mark.slow_beyond(1)
@torch.no_grad()
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("architecture", [*SHAPES, "granite", "critic"])
def test_stages_one_after_the_other_are_the_whole_model(architecture, num_stages):
    model = scalar_model(deep_model("llama")) if architecture == "critic" else deep_model(architecture)
    row = whole_row(model, weighted_batch(0))
    expected_TD = hidden_states(model, row.token_T, row.position_T, row.context)
    assert torch.equal(chained(model, row, num_stages), expected_TD)


def test_stages_of_a_deterministic_model_attend_as_the_paged_engine_does():
    model, micro = deep_model("llama"), weighted_batch(0)
    assert whole_row(model, micro).context.paged is None
    set_deterministic(model)
    rows, expected = whole_row(model, micro).context.paged, packed_context(model, micro.length_B).paged
    assert torch.equal(rows.slot_T, expected.slot_T)
    assert rows.exact
    # Of a rank that lacks the head, too.
    model.lm_head = Absent()
    assert whole_row(model, micro).context.paged.exact


def test_weights_that_no_stage_can_hold_alone_are_refused():
    model = deep_model("llama")
    model.model.layers[2].mlp = model.model.layers[1].mlp
    check_refused(
        ValueError,
        "weight model.layers.1.mlp.gate_proj.weight of LlamaForCausalLM belongs to stages [1, 2]",
        lambda: pieces(model, 4),
    )
    model = deep_model("llama")
    model.model.bias = torch.nn.Parameter(torch.zeros(3))
    check_refused(
        ValueError, "weight model.bias of LlamaForCausalLM belongs to no stage", lambda: pieces(model, 2)
    )
    model.model.layers = model.model.layers[:3]
    check_refused(ValueError, "LlamaForCausalLM keeps its layers in no list", lambda: pieces(model, 2))


def test_embedding_and_head_are_at_the_ends():
    placed = {piece.name: piece.stage for piece in pieces(deep_model("llama"), 3)}
    assert placed == {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.layers.2": 1,
        "model.layers.3": 2,
        "model.norm": 2,
        "lm_head": 2,
    }


# A head as large as a layer of llama's 7744 weights, or as mixtral's 3072 of attention, 128 of the router, 64
# of norms and 9216 of two experts of four, leaves the choice; one that is larger takes a layer's place.
@pytest.mark.parametrize(("architecture", "vocabulary"), [("llama", 7744 // 32), ("mixtral", 12480 // 32)])
def test_a_head_that_is_more_work_than_a_layer_takes_its_place(architecture, vocabulary):
    shape = {**SIZES, **SHAPES[architecture], "num_hidden_layers": NUM_LAYERS}
    for more, of_last in ((0, 2), (1, 1)):
        config = fresh_config(architecture, shape, vocab_size=vocabulary + more, eos_token_id=0)
        found = pieces(fresh_model(config, seed=0, dtype=torch.float32), 2)
        assert sum(piece.stage for piece in found if ".layers." in piece.name) == of_last


@pytest.mark.parametrize("head_cost", [0.0, 0.3, 1.7, 4.0, 11.0])
@pytest.mark.parametrize("num_layers", [4, 7, 12])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_other_deal_of_layers_has_a_shorter_longest_stage(num_layers, num_stages, head_cost):
    dealt = deal_layers(num_layers, num_stages, head_cost=head_cost)
    assert [layer for layers in dealt for layer in layers] == list(range(num_layers))

    def longest(sizes: list[int]) -> float:
        return max(*sizes[:-1], sizes[-1] + head_cost)

    every = []
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        ends = [0, *cuts, num_layers]
        every.append(longest([end - start for start, end in zip(ends, ends[1:], strict=False)]))
    assert longest([len(layers) for layers in dealt]) == min(every)


def test_layers_that_do_not_divide_go_to_later_stages():
    assert [len(layers) for layers in deal_layers(10, 4, head_cost=0.0)] == [2, 2, 3, 3]
    assert [len(layers) for layers in deal_layers(11, 4, head_cost=1.5)] == [3, 3, 3, 2]


SCHEDULES = [(r, c, m) for r in (2, 3, 4) for c in (1, 2, 3) for m in (1, 2, 3, 5, 8)]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_chunks", "num_micros"), SCHEDULES)
def test_a_schedule_does_everything_once_and_ends_even_if_nothing_is_buffered(
    num_ranks, num_chunks, num_micros, backward
):
    steps = schedule(num_ranks, num_chunks, num_micros, backward=backward)
    num_stages = num_ranks * num_chunks
    acts = ("forward", "backward") if backward else ("forward",)
    done = [step for mine in steps for step in mine if step.act in ("forward", "backward")]
    assert sorted(map(str, done)) == sorted(
        str(StageStep(act, stage, micro))
        for act in acts
        for stage in range(num_stages)
        for micro in range(num_micros)
    )
    assert all(step.stage % num_ranks == rank for rank, mine in enumerate(steps) for step in mine)
    check_play(steps, num_stages)


def check_play(steps: tuple[tuple[StageStep, ...], ...], num_stages: int) -> None:
    """Play all ranks, a transfer only when both its sides have come to it, a step only with what it needs."""
    at, here = [0] * len(steps), set[StageStep]()
    while any(place < len(mine) for place, mine in zip(at, steps, strict=True)):
        moved = False
        for rank, mine in enumerate(steps):
            step = mine[at[rank]] if at[rank] < len(mine) else None
            if step is None or step.act.startswith("receive"):
                continue
            if step.act.startswith("send"):
                other = step.other % len(steps)
                wanted = StageStep(step.act.replace("send", "receive"), step.other, step.micro)
                assert wanted.other == step.stage
                if steps[other][at[other] : at[other] + 1] != (wanted,):
                    continue
                here.add(wanted)
                at[other] += 1
            else:
                assert_has_what_it_needs(step, here, num_stages)
                here.add(step)
            at[rank] += 1
            moved = True
        assert moved, [mine[place : place + 1] for place, mine in zip(at, steps, strict=True)]


def assert_has_what_it_needs(step: StageStep, here: set[StageStep], num_stages: int) -> None:
    if step.act == "backward":
        assert StageStep("forward", step.stage, step.micro) in here
        assert step.stage == num_stages - 1 or StageStep("receive gradient", step.stage, step.micro) in here
    else:
        assert step.stage == 0 or StageStep("receive hidden states", step.stage, step.micro) in here


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "num_rounds"), [(2, 1, 3), (4, 1, 2), (3, 2, 2), (4, 3, 3)]
)
def test_a_schedule_of_whole_rounds_takes_the_least_time_and_holds_no_more_than_it_says(
    num_ranks, num_chunks, num_rounds
):
    num_micros = num_ranks * num_rounds
    last = num_ranks * num_chunks - 1
    steps = schedule(num_ranks, num_chunks, num_micros)
    left = [[step for step in mine if step.act in ("forward", "backward")] for mine in steps]
    ends: dict[StageStep, int] = {}
    held, most = [0] * num_ranks, [0] * num_ranks
    free = [0] * num_ranks
    while any(left):
        for rank, mine in enumerate(left):
            if not mine:
                continue
            act, stage, micro = mine[0].act, mine[0].stage, mine[0].micro
            before = StageStep(act, stage + (-1 if act == "forward" else 1), micro)
            if act == "backward" and stage == last:
                before = StageStep("forward", last, micro)
            starts = 0 if act == "forward" and stage == 0 else ends.get(before)
            if starts is None:
                continue
            ends[mine.pop(0)] = free[rank] = max(free[rank], starts) + 1
            held[rank] += 1 if act == "forward" else -1
            most[rank] = max(most[rank], held[rank])
    assert max(ends.values()) == 2 * (num_micros * num_chunks + num_ranks - 1)
    said = [
        num_ranks - rank
        if num_chunks == 1
        else min(2 * (num_ranks - rank) - 1 + num_ranks * (num_chunks - 1), num_micros * num_chunks)
        for rank in range(num_ranks)
    ]
    assert most == said
