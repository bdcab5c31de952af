"""A shell and a hand-over of weights make the very same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.saving import load_shell, save_shell
from tests.models.tiny import SIZES, VOCABULARY, tiny_model

TOKENS = torch.tensor([[3, 5, 7, 9]])
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def biased(dtype: torch.dtype) -> Model:
    """A mixture of experts whose router has a bias that is no weight."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape = {**SIZES, **experts, "first_k_dense_replace": 1, "n_shared_experts": 1}
    config = fresh_config("dots1", shape, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=3, dtype=dtype)
    gate = model.get_submodule(BIAS.rpartition(".")[0])
    gate.e_score_correction_bias = torch.linspace(0.3, -0.3, 8)
    return model


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        model.set_attn_implementation("eager")
        return model(TOKENS, use_cache=False).logits


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mixtral", "dots1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_its_weights_a_shell_is_the_model(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    model = biased(dtype) if architecture == "dots1" else tiny_model(architecture, dtype=dtype)
    save_shell(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "fixed.safetensors",
        "generation_config.json",
    ]
    shell = load_shell(tmp_path, dtype=dtype)
    assert shell.dtype == dtype
    assert not torch.equal(logits(shell), logits(model))
    with torch.no_grad():
        for (name, ours), (other, theirs) in zip(
            shell.named_parameters(), model.named_parameters(), strict=True
        ):
            assert name == other
            ours.copy_(theirs)
    assert torch.equal(logits(shell), logits(model))
    if architecture == "dots1":
        assert shell.get_buffer(BIAS).tolist() == model.get_buffer(BIAS).tolist()
