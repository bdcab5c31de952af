from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from millrace.inference.reference import ReferenceEngine
from millrace.kernels import linear
from millrace.kernels.linear import packed_linear
from millrace.models.decoding import prepare
from millrace.models.fused import Linear, fuse, set_deterministic
from millrace.models.load import Model, fresh_config, fresh_model, save_model
from millrace.models.logprobs import hidden_states, packed_context
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.inference.fresh import decode, paged, random_requests, same
from tests.models.tiny import SHAPES, VOCABULARY, tiny_model

# Of whose layers the order of things is known.
KNOWN = {"llama", "qwen2", "qwen3", "mistral"}


def replaced(model: Model) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "millrace_ordinary")]


@pytest.mark.parametrize("architecture", SHAPES)
def test_a_prepared_model_draws_the_same(architecture: str) -> None:
    model = tiny_model(architecture).requires_grad_(False)
    prompts, params = random_requests(7, 24)
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    assert len(replaced(model)) == (2 if architecture in KNOWN else 0)
    ours = paged(model).generate(prompts, params)
    assert same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        close_fp32(one.logprobs, other.logprobs, atol=3e-5)


def test_a_layer_that_turns_a_part_of_each_head_only_takes_its_own_way() -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "first_k_dense_replace": 2,
    }
    config = fresh_config("glm4_moe", sizes, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.float32).requires_grad_(False)
    prompts, params = random_requests(7, 12)
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    assert len(replaced(model)) == 2
    ours = paged(model).generate(prompts, params)
    assert same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        close_fp32(one.logprobs, other.logprobs, atol=3e-5)


def test_many_rows_take_the_other_way_to_the_same_numbers() -> None:
    model = tiny_model("llama").requires_grad_(False)
    prompts, params = random_requests(8, 150)
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    sizes = {"max_cache_tokens": 8192, "max_batch_tokens": 2048, "max_requests": 256}
    assert same(paged(model, **sizes).generate(prompts, params), theirs)


@pytest.mark.parametrize("asked", [False, True])
def test_only_the_last_token_of_a_prompt_goes_through_all_of_the_last_layer(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3").requires_grad_(False)
    prompts, params = [[3, 4, 5, 6], [7, 8]], [SamplingParams(max_tokens=1, prompt_logprobs=asked)] * 2
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    engine, rows = paged(model), list[int]()

    def product(x_TD: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        rows.append(len(x_TD))
        return packed_linear(x_TD, *given, **options)

    monkeypatch.setattr(linear, "packed_linear", product)
    ours = engine.generate(prompts, params)
    # Two layers of five products; who asks for the prompt's log-probabilities needs all tokens.
    assert rows == ([6] * 10 if asked else [6] * 6 + [2] * 4)
    assert same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        close_fp32(one.logprobs, other.logprobs, atol=3e-5)
        assert asked == (one.prompt_logprobs is not None)


@pytest.mark.parametrize("architecture", SHAPES)
def test_layers_are_called_one_after_another_where_nothing_stands_between_them(architecture: str) -> None:
    model = tiny_model(architecture).requires_grad_(False)
    prepare(model)
    assert hasattr(model, "millrace_stack") == (architecture in KNOWN)


@pytest.mark.parametrize("part", ["", "rotary_emb"])
def test_a_base_model_that_computes_something_else_stays_as_it_is(part: str) -> None:
    model = tiny_model("llama").requires_grad_(False)
    odd = model.model.get_submodule(part)
    forward = odd.forward

    def other(*given: Any, **options: Any) -> Any:
        if part:  # as Glm turns a part of each head only
            cos, sin = forward(*given, **options)
            return cos[..., ::2], sin[..., ::2]
        found = forward(*given, **options)
        found.last_hidden_state = found.last_hidden_state * 1.5
        return found

    odd.forward = other
    prepare(model)
    assert len(replaced(model)) == 2 and not hasattr(model, "millrace_stack")


def test_new_weights_are_packed_anew() -> None:
    first, second = (tiny_model("qwen3", seed=seed).requires_grad_(False) for seed in (1, 2))
    prompts, params = random_requests(9, 12)
    expected = ReferenceEngine(copy.deepcopy(second), decode).generate(prompts, params)
    prepare(first)
    engine = paged(first)
    engine.generate(prompts, params)
    engine.load_weights(list(second.named_parameters()), 1)
    assert same(engine.generate(prompts, params), expected)


def test_queries_keys_and_values_are_packed_as_one_and_anew_when_one_is_written() -> None:
    query, key = (torch.nn.Linear(64, size) for size in (32, 16))
    for one in (query, key):
        Linear.adopt(one)
    query.packs = True
    x_TD = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        packed = query.packed_weight(key)
        assert packed is not None and query.packed_weight(key) is packed
        both_TN = torch.cat([query.weight, key.weight])
        close_fp32(packed_linear(x_TD, packed), x_TD @ both_TN.T, atol=1e-6)
        key.weight.mul_(2)
        both_TN[32:] *= 2
        packed = query.packed_weight(key)
        assert packed is not None
        close_fp32(packed_linear(x_TD, packed), x_TD @ both_TN.T, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_layer_with_a_bias_for_keys_alone_stays_as_it_is(architecture: str) -> None:
    model = tiny_model(architecture).requires_grad_(False)
    attention = model.model.layers[0].self_attn
    bias = None if architecture == "qwen2" else torch.nn.Parameter(torch.ones(16), requires_grad=False)
    attention.k_proj.bias = bias
    prepare(model)
    assert len(replaced(model)) == 1


def test_names_weights_and_files_stay_as_they_are(tmp_path: Any) -> None:
    model = tiny_model("qwen3")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    prepare(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_packed_weights_sleep_with_the_others() -> None:
    model = tiny_model("llama", seed=1).requires_grad_(False)
    sent = [(name, parameter.clone()) for name, parameter in model.named_parameters()]
    prepare(model)
    engine = paged(model)
    prompts, params = random_requests(3, 6)
    before = engine.generate(prompts, params)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    # Keys and values of both layers are in the copies of the queries.
    assert [linear._packed[1] is not None for linear in linears].count(True) == 15 - 4
    engine.sleep(["weights"])
    assert all(linear._packed == (None, None) for linear in linears)
    engine.wake(["weights"])
    engine.load_weights(sent, 1)
    assert same(engine.generate(prompts, params), before)


def test_a_copy_has_weights_of_its_own() -> None:
    model = tiny_model("llama").requires_grad_(False)
    prepare(model)
    prompts, params = random_requests(3, 6)
    before = paged(model).generate(prompts, params)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.add_(0.05)
    changed = paged(copied).generate(prompts, params)
    assert not same(changed, before)
    assert same(paged(model).generate(prompts, params), before)


def test_bfloat16_is_close_to_what_the_modules_compute() -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16).requires_grad_(False)
    prompts, params = random_requests(5, 30)
    plain = paged(copy.deepcopy(model)).generate(prompts, params)
    prepare(model)
    assert len(replaced(model)) == 2
    ours = paged(model).generate(prompts, params)
    gaps = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(ours, plain, strict=True)]
    assert sum(gaps) / len(gaps) < 0.15


@pytest.mark.parametrize("dtype", [torch.float64])
def test_what_cannot_be_packed_stays_as_it_is(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    prepare(model)
    assert replaced(model) == []


def test_a_deterministic_model_stays_as_it_is() -> None:
    model = tiny_model("llama")
    fuse(model)
    set_deterministic(model)
    prepare(model)
    assert replaced(model) == []


def scaled(module: Any, factor: float) -> Callable[..., Any]:
    forward = module.forward
    return lambda *given, **options: forward(*given, **options) * factor


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp", "input_layernorm", "post_attention_layernorm"])
def test_a_layer_that_computes_something_else_stays_as_it_is(part: str) -> None:
    model = tiny_model("qwen3").requires_grad_(False)
    odd = model.model.layers[1].get_submodule(part)
    # As Granite scales what a layer adds. A norm is called by both ways, so a scaled one stays known.
    odd.forward = scaled(odd, 1.5)
    prepare(model)
    kept = 2 if part.endswith("layernorm") else 1
    assert len(replaced(model)) == kept


def test_the_layers_own_forward_is_taken_where_it_must_be() -> None:
    model = tiny_model("llama").requires_grad_(False)
    token_T, position_T = torch.tensor([3, 4, 5]), torch.arange(3)
    context = packed_context(model, torch.tensor([3]))
    expected_TD = hidden_states(model, token_T, position_T, context)
    prepare(model)
    with torch.no_grad():
        close_fp32(hidden_states(model, token_T, position_T, context), expected_TD)
