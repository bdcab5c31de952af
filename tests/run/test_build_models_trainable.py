"""What learns, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.config.inputs import AdapterConfig, ModelConfig
from millrace.models.adapter_folder import CONFIG, WEIGHTS
from millrace.models.adapters import adapted_layers, trained_weights
from millrace.models.load import ModelError
from millrace.run.build import build
from millrace.run.build_models import ADAPTER, check_base, choose_weights
from millrace.training.policy import BaseScorer
from millrace.training.scorer import ModelScorer
from millrace.transport.fingerprint import fingerprint
from tests.close import close_fp32
from tests.end_to_end.tiny import tiny_recipe
from tests.training.pieces import random_batch, tiny_model

FRESH = {"sft": None, "model.adapter": {"rank": 2, "targets": ["q_proj", "v_proj"]}}


def moved(parts):
    """The policy's trainer after the pairs were given numbers."""
    trainer = parts.reinforcer(0, None, None)
    parts.policy_weights.activate(trainer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trained_weights(trainer.model):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return trainer


def test_the_sampler_gets_the_merged_weights_and_proves_them(tmp_path):
    parts = build(tiny_recipe(tmp_path, FRESH), None)
    plain = build(tiny_recipe(tmp_path), None)
    assert parts.engine.fingerprint() == plain.engine.fingerprint()
    parts.transport.update_weights(moved(parts).named_tensors(), 3)
    ours, theirs = parts.engine.fingerprint(), plain.engine.fingerprint()
    assert (parts.engine.version, list(ours)) == (3, list(theirs))
    different = {name for name in ours if ours[name] != theirs[name]}
    ends = ("q_proj.weight", "v_proj.weight")
    assert different == {name for name in ours if name.endswith(ends)}
    assert len(different) == 4


def test_the_optimizer_is_over_the_pairs_alone(tmp_path):
    trainer = build(tiny_recipe(tmp_path, FRESH), None).reinforcer(0, None, None)
    held = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    assert [weight.shape for weight in held] == [weight.shape for weight in trained_weights(trainer.model)]
    assert sum(weight.numel() for weight in held) == 2 * (2 * (16 + 16) + 2 * (16 + 8))


@pytest.mark.slow
def test_the_base_is_the_reference_only_where_the_run_begins_with_it(tmp_path):
    config = {"policy.kl.coefficient": 0.1}
    cases = [(FRESH, BaseScorer), (FRESH | {"sft": {"steps": 2}}, ModelScorer), ({}, ModelScorer)]
    for number, (changes, kind) in enumerate(cases):
        parts = build(tiny_recipe(tmp_path, config | changes), None)
        parts.save_model(tmp_path / str(number))
        assert type(parts.reference(tmp_path / str(number))) is kind


@pytest.mark.slow
def test_a_saved_policy_is_an_ordinary_folder_with_the_adapter_in_a_folder_of_its_own(tmp_path):
    config = tiny_recipe(tmp_path, FRESH)
    parts = build(config, None)
    trainer = moved(parts)
    folder = tmp_path / "checkpoint" / "model"
    parts.save_model(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert len(load_file(folder / ADAPTER / WEIGHTS)) == 2 * 4
    assert json.loads((folder / ADAPTER / CONFIG).read_text())["r"] == 2
    sent = dict(trainer.named_tensors())
    held = load_file(folder / "model.safetensors")
    assert [name for name in held if not torch.equal(held[name], sent[name])] == []

    again = build(config, tmp_path / "checkpoint").reinforcer(0, None, None)
    for ours, theirs in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # An adapter of another run is gone on with from its folder.
    given = FRESH | {"model.adapter": {"path": str(folder / ADAPTER)}}
    parts = build(tiny_recipe(tmp_path, given), None)
    assert parts.engine.fingerprint() == fingerprint(sent.items())
    # Without the adapter in the recipe, the merged model is a model like any other.
    merged = {"sft": None, "model": {"path": str(folder)}, "tokenizer": {}}
    plain = build(tiny_recipe(tmp_path, merged), None).reinforcer(0, None, None)
    assert adapted_layers(plain.model) == {}
    batch = random_batch(0)
    close_fp32(plain.scorer.logprobs(batch), trainer.scorer.logprobs(batch), atol=1e-5)


def test_a_checkpoint_without_its_adapter_or_beside_another_base_is_not_taken_up(tmp_path):
    config = tiny_recipe(tmp_path, FRESH)
    folder = tmp_path / "checkpoint"
    build(config, None).save_model(folder / "model")
    other = tiny_recipe(tmp_path, FRESH | {"seed": 1})
    with pytest.raises(ModelError) as caught:
        build(other, folder)
    assert str(caught.value) == (
        f"adapter {folder / 'model' / ADAPTER} was trained beside other weights than the fresh model of this "
        "seed now holds; put those back, or start a new run from the checkpoint's model folder, where they "
        "are merged"
    )
    for path in (folder / "model" / ADAPTER).iterdir():
        path.unlink()
    with pytest.raises(ModelError, match=r"adapter folder .*adapter has no adapter_config.json"):
        build(config, folder)


def test_frozen_weights_of_the_recipe_do_not_learn(tmp_path):
    parts = build(tiny_recipe(tmp_path, {"model.frozen": ["model.layers.0.*"]}), None)
    model = parts.reinforcer(0, None, None).model
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")}
    assert len(frozen) == 11
    with pytest.raises(ModelError, match="model.frozen 'head' matches no weight"):
        build(tiny_recipe(tmp_path, {"model.frozen": ["head"]}), None)


def test_where_everything_learns_there_is_no_checksum_and_nothing_is_changed():
    model = tiny_model()
    choose_weights(ModelConfig(), model, Path("nowhere"), seed=0)
    assert check_base(ModelConfig(), model, Path("nowhere")) == ""
    assert len(trained_weights(model)) == len(list(model.parameters()))


def test_the_checksum_of_a_base_is_that_of_the_weights_beside_the_adapter():
    config, sums = ModelConfig(adapter=AdapterConfig(rank=2)), []
    for base, adapter in ((0, 0), (0, 1), (1, 0)):
        model = tiny_model(base)
        choose_weights(config, model, None, seed=adapter)
        sums.append(check_base(config, model, None))
    assert sums[0] == sums[1] != sums[2]
    assert [len(one) for one in sums] == [64] * 3
