from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from millrace.kernels import linear as products
from millrace.kernels.packed_attention import Segments
from millrace.models import fused
from millrace.models.attention import Packed
from millrace.models.fused import Linear, RMSNorm, forget_packed, fuse, pack, set_deterministic
from millrace.models.load import Model, load_model, save_model
from millrace.models.logprobs import hidden_states
from tests.close import close_fp32
from tests.models.tiny import SHAPES, VOCABULARY, tiny_model

DETERMINISTIC = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox"]
LENGTHS = (8, 5)


def own(architecture: str, **options: Any) -> Model:
    """The tiny model with transformers' own modules, whatever loading makes of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.models.layer_check.fuse", lambda model: None)
        # Not a copy of one that was made without the patch.
        return tiny_model.__wrapped__(architecture, **options)


def hidden(model: Model) -> Tensor:
    token_T = torch.arange(sum(LENGTHS)) * 7 % VOCABULARY
    position_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return hidden_states(model, token_T, position_T, Packed(Segments.of(torch.tensor(LENGTHS))))


def slopes(model: Model) -> dict[str, Tensor]:
    model.zero_grad()
    hidden(model).square().sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def kinds(model: Model) -> dict[str, int]:
    modules = list(model.modules())
    return {
        "linear": sum(isinstance(module, Linear) for module in modules),
        "norm": sum(isinstance(module, RMSNorm) for module in modules),
        "forward": sum("forward" in vars(module) for module in modules),
    }


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_fused_model_computes_what_its_own_modules_do(architecture: str) -> None:
    plain = own(architecture)
    ours = copy.deepcopy(plain)
    fuse(ours)
    with torch.no_grad():
        close_fp32(hidden(ours), hidden(plain), rtol=1e-4, atol=1e-5)
    expected, found = slopes(plain), slopes(ours)
    assert list(found) == list(expected)
    for name, slope in expected.items():
        close_fp32(found[name], slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))


# With a mixture of experts one unit in the last place may choose another expert.
@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", DETERMINISTIC)
def test_a_fused_bfloat16_model_is_rounded_where_its_own_modules_round(architecture: str) -> None:
    plain = own(architecture, dtype=torch.bfloat16)
    ours = copy.deepcopy(plain)
    fuse(ours)
    with torch.no_grad():
        assert torch.equal(hidden(ours), hidden(plain))


def test_what_is_recognised_is_replaced() -> None:
    found = {}
    for architecture in ("llama", "qwen3", "gemma2", "phi3", "gpt_neox"):
        model = own(architecture)
        assert kinds(model) == {"linear": 0, "norm": 0, "forward": 0}
        fuse(model)
        found[architecture] = kinds(model)
        once = dict(model.named_modules())
        fuse(model)
        assert dict(model.named_modules()) == once
    # Two layers of seven linears, and the head; two norms a layer, and the last; attention.
    assert found["llama"] == {"linear": 15, "norm": 5, "forward": 2}
    assert found["qwen3"] == {"linear": 15, "norm": 9, "forward": 2}
    assert found["gemma2"] == {"linear": 15, "norm": 9, "forward": 2}
    assert found["phi3"] == {"linear": 9, "norm": 5, "forward": 2}
    assert found["gpt_neox"] == {"linear": 9, "norm": 0, "forward": 2}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("architecture", "form"), [("qwen3", "llama"), ("olmo2", "olmo2"), ("gemma2", "gemma")]
)
def test_a_norm_of_fresh_weights_is_recognised_by_what_it_would_do_with_others(
    architecture: str, form: str
) -> None:
    """All weights 1 (Gemma: 0): where the product is rounded would not show in the model's own numbers."""
    model = own(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(0.0 if architecture == "gemma2" else 1.0)
    fuse(model)
    assert {module.form for module in model.modules() if isinstance(module, RMSNorm)} == {form}


class OddRMSNorm(nn.Module):
    """Like Llama's, but of the mean of the absolute values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class SpecialLinear(nn.Linear):
    pass


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the other way."""
    half = q.shape[-1] // 2
    turn = [torch.cat([x[..., half:], -x[..., :half]], -1) for x in (q, k)]
    return q * cos + turn[0] * sin, k * cos + turn[1] * sin


class OddAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(x, x, x, x)[0]


def test_what_only_looks_familiar_stays_as_it_is() -> None:
    odd: Any = nn.ModuleDict({"norm": OddRMSNorm(), "linear": SpecialLinear(4, 4)})
    odd["attention"] = OddAttention()
    fuse(odd)
    assert type(odd["norm"]) is OddRMSNorm
    assert type(odd["linear"]) is SpecialLinear
    assert "forward" not in vars(odd["attention"])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_parameters_keep_identity_name_and_order_and_a_saved_folder_loads(
    architecture: str, tmp_path: Path
) -> None:
    model = own(architecture)
    before = list(model.named_parameters())
    fuse(model)
    assert [(name, id(x)) for name, x in model.named_parameters()] == [(name, id(x)) for name, x in before]
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        close_fp32(hidden(loaded), hidden(model))


def test_a_copy_is_fused_and_its_own() -> None:
    model = own("qwen3")
    fuse(model)
    pack(model)
    with torch.no_grad():
        expected = hidden(model)
        twin = copy.deepcopy(model)
        assert kinds(twin) == kinds(model)
        assert torch.equal(hidden(twin), expected)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(hidden(twin), expected)
        assert float(hidden(model).abs().max()) == 0.0


def test_a_packed_weight_follows_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    packings, own_pack = list[tuple[int, ...]](), products.pack

    def counted(weight_ND: Tensor) -> Any:
        packings.append(tuple(weight_ND.shape))
        return own_pack(weight_ND)

    monkeypatch.setattr(products, "pack", counted)
    linear = nn.Linear(24, 16)
    fuse(nn.ModuleDict({"linear": linear}))  # type: ignore[arg-type]
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        linear(x)
        assert packings == []
        pack(linear)  # type: ignore[arg-type]
        for _ in range(2):
            close_fp32(linear(x), x @ linear.weight.T + linear.bias)
        assert packings == [(16, 24)]
        linear.weight.mul_(3.0)
        close_fp32(linear(x), x @ linear.weight.T + linear.bias)
        linear.weight.data = linear.weight.data * 2.0
        close_fp32(linear(x), x @ linear.weight.T + linear.bias)
        assert len(packings) == 3
        panel = weakref.ref(linear._packed[1].panel_PSC)
        assert panel() is not None
        forget_packed(linear)  # type: ignore[arg-type]
        assert panel() is None
        linear.weight.data.fill_(0.5)  # not counted by autograd, at the same address
        close_fp32(linear(x), x @ linear.weight.T + linear.bias)
    linear(x)
    assert len(packings) == 4


def apart(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """In place of attention: of each token alone, through its own query and value."""
    repeats = query.shape[1] // value.shape[1]
    mixed = query + (key * value).repeat_interleave(repeats, 1)
    return mixed.transpose(1, 2).contiguous(), None


def rows_alone(model: Model) -> None:
    AttentionInterface.register("apart", apart)
    model.set_attn_implementation("apart")


def states(model: Model, token_T: Tensor, position_T: Tensor) -> Tensor:
    output = model.base_model(input_ids=token_T[None], position_ids=position_T[None], use_cache=False)
    return output.last_hidden_state[0]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("architecture", DETERMINISTIC)
def test_a_token_has_the_same_bits_through_all_layers_whatever_the_batch(
    architecture: str, dtype: torch.dtype
) -> None:
    """All modules but attention: batches of 1 to 70 tokens, the token first, last or between."""
    model = own(architecture, dtype=dtype)
    fuse(model)
    set_deterministic(model)
    rows_alone(model)
    numbers = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    with torch.no_grad():
        expected = states(model, torch.tensor([5]), torch.tensor([9]))[0]
        for num_tokens in (1, 2, 7, 8, 9, 31, 32, 33, 50, 64, 65, 70):  # around vectors and tiles
            torch.set_num_threads(2 if num_tokens in (2, 33, 70) else 1)
            token_T = torch.randint(VOCABULARY, (num_tokens,), generator=numbers)
            position_T = torch.randint(100, (num_tokens,), generator=numbers)
            between = int(torch.randint(num_tokens, (1,), generator=numbers))
            place = (0, num_tokens - 1, between)[num_tokens % 3]
            token_T[place], position_T[place] = 5, 9
            assert torch.equal(states(model, token_T, position_T)[place], expected), (num_tokens, place)
    torch.set_num_threads(before)


def test_with_a_gradient_the_bits_are_the_same_and_slopes_ordinary() -> None:
    plain, model = own("qwen3"), own("qwen3")
    fuse(model)
    set_deterministic(model, tile=4)
    with torch.no_grad():
        expected = hidden(model)
    assert torch.equal(hidden(model), expected)
    found = slopes(model)
    for name, slope in slopes(plain).items():
        close_fp32(found[name], slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [*fused.INVARIANT_ACTIVATIONS, nn.GELU, partial(nn.GELU, approximate="tanh")]
)
def test_an_invariant_activation_is_the_activation_with_the_same_bits_everywhere(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    theirs = make()
    model: Any = nn.ModuleDict({"linear": nn.Linear(4, 4), "act": make()})
    fuse(model)
    set_deterministic(model)
    ours = model.act
    assert type(ours) is fused.InvariantActivation
    x = (torch.randn(300, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    expected = ours(x)
    assert expected.dtype == dtype
    # bfloat16 is rounded once; the chain in float32 may fall on the other side of a tie.
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    close_fp32(expected, theirs(x.double()), rtol=tolerance, atol=1e-6)
    for start in range(0, 40):
        for end in range(299, 260, -7):
            assert torch.equal(ours(x[start:end]), expected[start:end])
    close_fp32(ours(torch.tensor([-200.0, 200.0], dtype=dtype)), [0.0, 200.0])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_module_that_may_mix_rows_is_refused_and_nothing_changed(architecture: str) -> None:
    model = own(architecture)
    fuse(model)
    with pytest.raises(ValueError) as error:
        set_deterministic(model)
    sentence = str(error.value)
    assert sentence.startswith("module model.layers.0.mlp.")
    assert "whose rows are not known to be independent of the batch; turn deterministic off for " in sentence
    assert {module.tile for module in model.modules() if isinstance(module, Linear)} == {None}


def test_an_unknown_activation_and_a_tile_of_nothing_are_refused() -> None:
    model: Any = nn.ModuleDict({"linear": nn.Linear(4, 4), "act": nn.Mish()})
    fuse(model)
    with pytest.raises(ValueError) as error:
        set_deterministic(model)
    assert str(error.value) == (
        "module act is a Mish, whose rows are not known to be independent of the batch; "
        "turn deterministic off for ModuleDict"
    )
    with pytest.raises(ValueError) as error:
        set_deterministic(model, tile=0)
    assert str(error.value) == "tile is 0; a tile must hold at least 1 row"


def test_a_deterministic_model_keeps_no_packed_weights() -> None:
    model = own("llama")
    fuse(model)
    pack(model)
    set_deterministic(model)
    pack(model)
    assert {(module.packs, module.tile) for module in model.modules() if isinstance(module, Linear)} == {
        (False, 32)
    }
