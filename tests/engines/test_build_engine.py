"""What another process needs to make the same engine, and what it cannot be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines import build_engine
from millrace.engines.build_engine import engine_over, open_engine, save_engine
from millrace.errors import SetupError
from millrace.inference.engine import PagedEngine
from millrace.models.fused import set_deterministic
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.types import SamplingParams
from tests.models.families import bold_family
from tests.models.mixtures import mixture
from tests.models.tiny import SIZES, tiny_model

TOKENIZER = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
PROMPTS = [(9, 8, 7), (5,), (6, 5)]
PARAMS = [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)]


def policy(dtype: torch.dtype = torch.float32) -> Model:
    config = fresh_config("qwen3", {**SIZES, "head_dim": 16}, vocab_size=len(TOKENIZER), eos_token_id=0)
    return fresh_model(config, seed=5, dtype=dtype)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_of_a_folder_draws_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, deterministic: bool
) -> None:
    options = EngineConfig(cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=16, block_size=8)
    save_engine(options, policy(dtype), TOKENIZER, tmp_path, longest=64, deterministic=deterministic)
    engine = open_engine(tmp_path)
    model = policy(dtype)
    engine.update_weights(model.named_parameters(), 3)
    if deterministic:
        tiles = {getattr(module, "tile", None) for module in engine._model.modules()}
        assert 32 in tiles
    else:
        twin = engine_over(options, model, TOKENIZER, longest=64)
        assert isinstance(twin, PagedEngine)
        ours, theirs = engine.generate(PROMPTS, PARAMS), twin.generate(PROMPTS, PARAMS)
        assert [(one.token_ids, one.text) for one in ours] == [(one.token_ids, one.text) for one in theirs]
        assert all((one.logprobs == other.logprobs).all() for one, other in zip(ours, theirs, strict=True))
        assert engine._scheduler.blocks.num_blocks == twin._scheduler.blocks.num_blocks == 64
    assert engine.version == 3


def test_graphs_need_a_cuda_device(tmp_path: Path) -> None:
    options = EngineConfig(cuda_graphs=True)
    with pytest.raises(SetupError, match="^engine.cuda_graphs needs a CUDA device, and the model is on cpu"):
        engine_over(options, policy(), TOKENIZER, longest=64)
    save_engine(EngineConfig(), policy(), TOKENIZER, tmp_path, longest=64)
    assert json.loads((tmp_path / "engine.json").read_text())["longest"] == 64
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize("name", ["deterministic", "engine.cuda_graphs"])
def test_what_needs_the_attention_kernel_is_refused_where_it_was_not_checked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy()
    if name == "deterministic":
        set_deterministic(model)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(build_engine, "is_checked", lambda kernel, device: False)
    options = EngineConfig(cuda_graphs=name != "deterministic")
    with pytest.raises(
        SetupError, match=f"^{name} needs millrace's attention kernel.*millrace doctor --gpu$"
    ):
        engine_over(options, model, TOKENIZER, longest=64)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("make", "checked", "given", "expected"),
    [
        (partial(tiny_model, "qwen3"), True, None, True),
        (partial(tiny_model, "qwen3"), True, False, False),
        (partial(tiny_model, "qwen3"), False, None, False),
        (partial(mixture, "qwen3_moe"), True, None, False),
        (partial(bold_family, "gemma3n_text"), True, None, False),
    ],
)
def test_graphs_are_the_default_of_dense_models_with_equal_layers_on_a_checked_gpu(
    make: Callable[[], Model],
    checked: bool,
    given: bool | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, options = make(), EngineConfig(cuda_graphs=given)
    monkeypatch.setattr(build_engine, "is_checked", lambda kernel, device: checked)
    assert not build_engine._uses_graphs(options, model)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    assert build_engine._uses_graphs(options, model) == expected


def test_a_deterministic_model_takes_no_graphs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    monkeypatch.setattr(build_engine, "is_checked", lambda kernel, device: True)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    assert build_engine._uses_graphs(EngineConfig(), model)
    set_deterministic(model)
    assert not build_engine._uses_graphs(EngineConfig(), model)


# Two layers, two key heads of width 8, keys and values, float32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def test_the_cache_holds_what_the_requests_can_need_and_no_more():
    config = EngineConfig(max_num_seqs=10, block_size=4)
    assert build_engine.cache_tokens(config, tiny_model("llama"), 50) == 10 * 54


@pytest.mark.parametrize(("free", "tokens"), [(TOKEN_BYTES * 4 * 100, 100), (TOKEN_BYTES * 4 * 3, 54)])
def test_where_memory_is_short_it_takes_a_quarter_of_it_but_always_one_sequence(monkeypatch, free, tokens):
    monkeypatch.setattr(build_engine, "free_bytes", lambda device: free)
    config = EngineConfig(max_num_seqs=10, block_size=4)
    assert build_engine.cache_tokens(config, tiny_model("llama"), 50) == tokens


def test_what_the_recipe_says_is_taken_as_it_is():
    assert build_engine.cache_tokens(EngineConfig(cache_tokens=77), tiny_model("llama"), 50) == 77


def test_some_memory_is_free():
    assert 1 << 20 < build_engine.free_bytes(torch.device("cpu")) < 1 << 50
