"""A pipeline is tried against the whole model, which no rank holds: what differs is refused, by all alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.distributed import pipeline
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.distributed.pipeline import Pipeline
from millrace.distributed.pipeline_stages import pieces
from millrace.distributed.pipeline_trial import ELSEWHERE, _Together, _whole_model
from millrace.models.load import LANGUAGE, Model, ModelError
from millrace.planner.layout import Layout
from tests.models.deep import deep_model
from tests.models.families import bold_family
from tests.ranks import run_ranks

CPU = torch.device("cpu")
CUT = "model type llama cannot be cut into stages; set mesh.pp to 1: "


def used_twice(model: Model, mesh: Mesh, use: str) -> None:
    """The embedding is used again after the last layer."""

    def again(base: Any, args: Any, output: Any) -> None:
        token_1T = torch.arange(1, 8)[None]
        more_1TD = base.embed_tokens(token_1T) if use == "look up" else base.embed_tokens.weight[token_1T]
        output.last_hidden_state = output.last_hidden_state + more_1TD

    model.model.register_forward_hook(again)


def looked_up_again(model: Model, mesh: Mesh) -> None:
    used_twice(model, mesh, "look up")


def read_again(model: Model, mesh: Mesh) -> None:
    used_twice(model, mesh, "read")


def one_fails(model: Model, mesh: Mesh) -> None:
    """A layer of the second rank cannot compute; it fails in the middle of what the ranks share."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no such layer")

    if mesh.rank("pp") == 1:
        model.model.layers[3].register_forward_pre_hook(fail)


def nan(model: Model, mesh: Mesh) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = torch.nan


def wrong_output(model: Model, mesh: Mesh) -> None:
    """Each layer gives a pair, as transformers' layers once did."""
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, x_1TD: (x_1TD, None))


SENTENCES: dict[Callable[[Model, Mesh], None], str] = {
    looked_up_again: f"{CUT}their result differs by ",
    read_again: f"{CUT}'_Relay' object has no attribute 'weight'",
    one_fails: f"{CUT}no such layer",
    nan: f"{CUT}their result differs by nan from the whole model's",
    wrong_output: f"{CUT}'tuple' object has no attribute 'contiguous'",
}


def refused(rank: int) -> dict[str, Tensor]:
    """What each rank says of what it refuses."""
    mesh, told = make_mesh(Layout(pp=2), "cpu"), []
    for change in SENTENCES:
        for num_chunks in (1, 2):
            model = deep_model("llama")
            change(model, mesh)
            with pytest.raises(ModelError) as caught:
                Pipeline(model, mesh, num_chunks=num_chunks)
            told.append(str(caught.value))
            # Nobody waits for anybody still.
            dist.barrier()
    check_positions_that_stages_do_not_have(mesh)
    check_apart(mesh)
    check_the_other_trial(mesh)
    return {"told": torch.tensor(list(json.dumps(told).encode()))}


def check_positions_that_stages_do_not_have(mesh: Mesh) -> None:
    """Layers that ask a cache for positions, or whose context travels in one."""
    for family in ("llama4_text", "stablelm"):
        with pytest.raises(ModelError) as caught:
            Pipeline(bold_family(family), mesh)
        sentence = f"model type {family} cannot be cut into stages; set mesh.pp to 1: "
        assert str(caught.value).startswith(sentence), str(caught.value)
        dist.barrier()


def check_apart(mesh: Mesh) -> None:
    """Ranks that mean different pieces do not wait for each other."""
    cut = Pipeline(deep_model("llama"), mesh)
    if mesh.rank("pp") == 1:
        names = list(cut._stage_of)
        cut._stage_of = {name: cut._stage_of[name] for name in (*names[1:], names[0])}
    with pytest.raises(ModelError, match=f"^{ELSEWHERE}$"):
        cut.check()


def check_the_other_trial(mesh: Mesh) -> None:
    """A packed forward that is not the model's own plain one is refused with what the last rank finds."""
    cut = Pipeline(deep_model("llama"), mesh)
    cut.check(LANGUAGE)
    with torch.no_grad():
        # Positions of a packed row that its own attention does not look at.
        cut.model.model.rotary_emb.inv_freq.fill_(torch.nan)
    with pytest.raises(ModelError) as caught:
        cut.check(LANGUAGE)
    sentence = "model type llama cannot be trained by millrace: its packed log-probabilities differ "
    sentence += "from its own by nan"
    assert str(caught.value) == sentence


@pytest.fixture(scope="module")
def two() -> list[list[str]]:
    return [json.loads(bytes(told["told"].tolist())) for told in run_ranks(2, refused)]


@pytest.mark.slow
@pytest.mark.world
def test_what_is_not_its_stages_is_refused_by_both_ranks_in_the_same_sentence(two):
    one, other = two
    assert one == other
    expected = [sentence for sentence in SENTENCES.values() for _ in range(2)]
    for told, sentence in zip(one, expected, strict=True):
        assert told.startswith(sentence)


def test_the_whole_computes_where_it_is_told_and_the_model_stays_as_it_is():
    model = deep_model("llama")
    names = [name for name, _ in model.named_parameters()]
    stage_of = {piece.name: piece.stage for piece in pieces(model, 2)}
    # As where weights lie in the host's memory and a device computes.
    whole = _whole_model(model, stage_of, _Together(SimpleNamespace(), CPU), torch.device("meta"))
    assert next(whole.parameters()).is_meta
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(parameter.is_meta for parameter in model.parameters())


def without_memory(rank: int) -> dict[str, Tensor]:
    """How often a model without numbers and one with numbers are tried."""
    mesh = make_mesh(Layout(pp=2), "cpu")
    tried = []
    pipeline.check_stages = lambda *args, **kwargs: tried.append(kwargs)  # type: ignore[assignment]
    Pipeline(deep_model("llama").to("meta"), mesh)
    assert tried == []
    Pipeline(deep_model("llama"), mesh)
    return {"tried": torch.tensor(len(tried))}


@pytest.mark.world
def test_a_model_is_tried_when_it_has_numbers():
    assert [int(told["tried"]) for told in run_ranks(2, without_memory)] == [1, 1]
