from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from millrace.kernels.decode import Layers
from millrace.kernels.product_cpu import product
from millrace.models.decoding import prepare
from millrace.models.fused import Linear, fuse, set_deterministic
from millrace.models.load import Model, fresh_config, fresh_model, save_model
from millrace.models.logprobs import hidden_states, packed_context
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.inference.fresh import decode, paged, random_requests, same
from tests.models.tiny import SHAPES, VOCABULARY, tiny_model
from tests.twins.reference import ReferenceEngine

# Of whose layers the order of things is known.
KNOWN = {"llama", "qwen2", "qwen3", "mistral"}


def replaced(model: Model) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "millrace_ordinary")]


@pytest.mark.slow_beyond(1)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_many_rows_take_the_other_way_to_the_same_numbers() -> None:
    model = tiny_model("llama").requires_grad_(False)
    prompts, params = random_requests(8, 150)
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    sizes = {"max_cache_tokens": 8192, "max_batch_tokens": 2048, "max_requests": 256}
    assert same(paged(model, **sizes).generate(prompts, params), theirs)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_only_the_last_token_of_a_prompt_goes_through_all_of_the_last_layer(
    asked: bool, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3").requires_grad_(False)
    prompts, params = [[3, 4, 5, 6], [7, 8]], [SamplingParams(max_tokens=1, prompt_logprobs=asked)] * 2
    theirs = ReferenceEngine(copy.deepcopy(model), decode).generate(prompts, params)
    prepare(model)
    if not stacked:  # as where something else stands between the layers
        del model.millrace_stack
    engine, rows, own = paged(model), list[tuple[int, int]](), Layers.__call__

    def layers(self: Layers, x_TD: torch.Tensor, *given: Any) -> torch.Tensor:
        y_WD = own(self, x_TD, *given)
        rows.append((len(x_TD), len(y_WD)))
        return y_WD

    monkeypatch.setattr(Layers, "__call__", layers)
    ours = engine.generate(prompts, params)
    # Who asks for the prompt's log-probabilities needs all tokens.
    wanted = 6 if asked else 2
    assert rows == ([(6, wanted)] if stacked else [(6, 6), (6, wanted)])
    assert same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        close_fp32(one.logprobs, other.logprobs, atol=3e-5)
        assert asked == (one.prompt_logprobs is not None)


def test_angles_are_known_for_longer_rows_when_they_come() -> None:
    model = tiny_model("llama").requires_grad_(False)
    reference = ReferenceEngine(copy.deepcopy(model), decode)
    prepare(model)
    engine, known = paged(model), []
    numbers = torch.Generator().manual_seed(0)
    for length in (2, 7, 8, 100, 5):
        prompts = [torch.randint(1, VOCABULARY, (size,), generator=numbers).tolist() for size in (length, 1)]
        params = [SamplingParams(max_tokens=4, temperature=0.0)] * 2
        ours, theirs = engine.generate(prompts, params), reference.generate(prompts, params)
        assert same(ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            close_fp32(one.logprobs, other.logprobs, atol=3e-5)
        known.append(len(model.millrace_stack._angles[0]))
    # Up to the next power of two above the longest row: the last token drawn is not computed.
    assert known == [8, 16, 16, 128, 128]


@pytest.mark.slow_beyond(2)
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


@pytest.mark.slow
def test_new_weights_are_packed_anew() -> None:
    first, second = (tiny_model("qwen3", seed=seed).requires_grad_(False) for seed in (1, 2))
    prompts, params = random_requests(9, 12)
    expected = ReferenceEngine(copy.deepcopy(second), decode).generate(prompts, params)
    prepare(first)
    engine = paged(first)
    engine.generate(prompts, params)
    engine.update_weights(list(second.named_parameters()), 1)
    assert same(engine.generate(prompts, params), expected)


def written(module: Any, name: str) -> None:
    getattr(module, name).mul_(2)


def moved(module: Any, name: str) -> None:
    parameter = getattr(module, name)
    parameter.data = parameter.data * 3


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("change", [written, moved])
@pytest.mark.parametrize("part", ["q_proj.weight", "k_proj.weight", "v_proj.bias", "o_proj.weight"])
def test_queries_keys_and_values_are_packed_as_one_and_anew_after_one_changed(
    part: str, change: Callable[[Any, str], None]
) -> None:
    model = tiny_model("qwen2").requires_grad_(False)
    prepare(model)
    layer = model.model.layers[1]
    attention, parts = layer.self_attn, layer.millrace_parts
    x_TD = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]

    def check(weights: Any) -> None:
        expected_TN = torch.cat([F.linear(x_TD, linear.weight, linear.bias) for linear in linears], 1)
        close_fp32(product(x_TD, weights.products[0], weights.biases[0]), expected_TN, atol=1e-5)
        close_fp32(product(x_TD, weights.products[1]), F.linear(x_TD, attention.o_proj.weight), atol=1e-5)

    weights, layers = parts.weights(), layer.millrace_chain.layers()
    check(weights)
    assert parts.weights() is weights and layer.millrace_chain.layers() is layers
    name, _, tensor = part.partition(".")
    change(getattr(attention, name), tensor)
    assert layer.millrace_chain.layers() is not layers
    check(parts.weights())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("change", [written, moved])
@pytest.mark.parametrize(
    "part", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_norm", "model.norm"]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_changed_weight_is_drawn_with_at_once(
    part: str, stacked: bool, change: Callable[[Any, str], None]
) -> None:
    model = tiny_model("qwen3").requires_grad_(False)
    prepare(model)
    if not stacked:
        del model.millrace_stack
    prompts, params = random_requests(9, 12)
    before = paged(model).generate(prompts, params)
    change(model.get_submodule(part), "weight")
    ours = paged(model).generate(prompts, params)
    fresh = tiny_model("qwen3").requires_grad_(False)
    fresh.load_state_dict(model.state_dict())
    theirs = ReferenceEngine(fresh, decode).generate(prompts, params)
    assert same(ours, theirs)
    assert not same(ours, before)


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


@pytest.mark.parametrize("stacked", [False, True])
def test_packed_weights_sleep_with_the_others(stacked: bool) -> None:
    model = tiny_model("llama", seed=1).requires_grad_(False)
    sent = [(name, parameter.clone()) for name, parameter in model.named_parameters()]
    prepare(model)
    if not stacked:
        del model.millrace_stack
    engine = paged(model)
    prompts, params = random_requests(3, 6)
    before = engine.generate(prompts, params)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    # Those of the layers are packed together: queries, keys and values, output, gate and up, down.
    held = [weakref.ref(packed.panel_PSC) for _, packed in (linear._packed for linear in linears) if packed]
    assert len(held) == 1  # of the head
    for layer in model.model.layers:
        held += [weakref.ref(packed.panel_PSC) for packed in layer.millrace_parts.weights().products]
    assert len(held) == 9 and all(panel() is not None for panel in held)
    engine.sleep(["weights"])
    assert [panel() for panel in held] == [None] * 9
    engine.wake(["weights"])
    engine.update_weights(sent, 1)
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


@pytest.mark.slow
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
    odd.forward = scaled(odd, 1.5)  # as Granite scales what a layer adds
    prepare(model)
    assert len(replaced(model)) == 1 and not hasattr(model, "millrace_stack")


def test_the_layers_own_forward_is_taken_where_it_must_be() -> None:
    model = tiny_model("llama").requires_grad_(False)
    token_T, position_T = torch.tensor([3, 4, 5]), torch.arange(3)
    context = packed_context(model, torch.tensor([3]))
    expected_TD = hidden_states(model, token_T, position_T, context)
    prepare(model)
    with torch.no_grad():
        close_fp32(hidden_states(model, token_T, position_T, context), expected_TD)
