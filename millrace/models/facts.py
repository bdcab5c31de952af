"""Attention requirements and KV cache shapes of each layer, recorded from the model's own forward.

A config does not define them: key heads and widths differ from layer to layer, some layers read another
layer's keys, some attend twice, and a window or a chunk may be only in the mask. So two forwards of a few
tokens are recorded. Attention returns zeros in them; if the hidden states of a token still depend on another
token, the model mixes tokens outside of attention (a convolution, a recurrence), for which millrace keeps no
state.

T = tokens of such a forward, D = model width, H = query heads, J = key heads, K = width of queries and keys,
V = width of values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel

# The name under which a recorded model gets a mask from us; otherwise it gets none.
RECORDED = "millrace_recorded"
TOKENS = 7
# No window or chunk is looked for beyond so many tokens.
LONGEST = 1 << 20
# Exceptions of a model's forward that is incompatible with ours.
FAULTS = (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError, IndexError)
# Most difference of the last token's hidden states in two forwards with different other tokens.
ROUNDING = {torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a layer's cached key and value of one token; `num_heads` counts key heads."""

    num_heads: int
    key_width: int
    value_width: int

    @property
    def num_numbers(self) -> int:
        """Numbers of one token."""
        return self.num_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Attention settings of one layer.

    A token sees itself and the `window - 1` tokens before it, and none of an earlier `chunk` of positions;
    None is no limit. `softcap` bounds the scores. `pools` are read by its calls of attention in a forward, of
    which most layers have one. With `writes` False an earlier layer stored them (shared keys).
    """

    name: str
    window: int | None
    chunk: int | None
    softcap: float | None
    pools: tuple[int, ...]
    writes: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Attention settings and pools of a model; layers are in the order in which a forward calls them.

    `pools` are each kept by one call of a layer. `asks_positions` is set if layers read token positions from
    a cache, not only from `position_ids`; `drops_context` if the keyword `context` does not reach attention.
    """

    layers: tuple[LayerFacts, ...]
    pools: tuple[PoolShape, ...]
    asks_positions: bool
    drops_context: bool

    @property
    def needs_view(self) -> bool:
        """Whether a forward must be given a `CacheView`."""
        return self.asks_positions or self.drops_context

    @property
    def token_numbers(self) -> int:
        """Numbers of all keys and values of one token."""
        return sum(pool.num_numbers for pool in self.pools)

    @property
    def uniform(self) -> PoolShape | None:
        """Shape of each layer's own pool, if all are equal, with keys as wide as values, and no chunks."""
        own = all(layer.pools == (n,) and layer.writes for n, layer in enumerate(self.layers))
        first = self.pools[0]
        same = len(set(self.pools)) == 1 and first.key_width == first.value_width
        return first if own and same and all(layer.chunk is None for layer in self.layers) else None


class ContextLost(ValueError):
    """Attention was called without a context."""


class CacheView:
    """A cache that keeps nothing: attention itself stores.

    It returns the positions of the tokens of a forward, and passes the context to attention on the keys.
    """

    def __init__(self, position_T: Tensor, context: Any) -> None:
        self._index_T = torch.arange(len(position_T), device=position_T.device)
        self._before_T = position_T - self._index_T
        self._context = context
        self._made: dict[Any, Any] = {}

    def within(self, context: Any) -> CacheView:
        """Return the view of the same forward in another context."""
        view = copy.copy(self)
        view._context = context
        return view

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged."""
        key.millrace_context = self._context  # type: ignore[attr-defined]
        return key, value

    def get_seq_length(self, *_: Any, **__: Any) -> Tensor:
        """Return a token's position minus its index in the row, [T]."""
        return self._before_T

    def once(self, key: Any, make: Callable[[Tensor], Any]) -> Any:
        """Return what `make` makes of the tokens' positions [T] in the first layer with this key."""
        if key not in self._made:
            self._made[key] = make(self.get_seq_length() + self._index_T)
        return self._made[key]

    def get_query_offset(self, *_: Any) -> int:
        """Return 0: a mask covers only the tokens of the forward."""
        return 0

    def get_mask_sizes(self, num_tokens: int, *_: Any) -> tuple[int, int]:
        """Return the sizes of a mask of the forward's tokens."""
        return num_tokens, 0


def carried_context(key: Tensor) -> Any:
    """Return the context that a `CacheView` left on keys, or None."""
    return getattr(key, "millrace_context", None)


# Queries [T, H, K], keys [T, J, K] and values [T, J, V].
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention, and its options."""

    module: nn.Module
    heads: Heads
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorder:
    """Attends to nothing, and keeps what layers would attend with."""

    calls: list[Call] = field(default_factory=list)


class _Masks:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._made: list[tuple[Tensor, dict[str, int | None] | ValueError]] = []

    def make(self, num_rows: int, mask_function: Callable[..., Any], device: Any) -> Tensor:
        """Limits without a kernel are errors only if a layer gets the mask: an absent encoder has one too."""
        limits: dict[str, int | None] | ValueError
        try:
            limits = fit(mask_function, self._longest)
        except ValueError as error:
            limits = error
        index_T = torch.arange(TOKENS, device=device)
        seen = mask_function(0 * index_T[:1], 0 * index_T[:1], index_T[:, None], index_T)
        mask = torch.as_tensor(seen, device=device).expand(num_rows, 1, TOKENS, TOKENS).contiguous()
        self._made.append((mask, limits))
        return mask

    def limits(self, layer: nn.Module, mask: Tensor) -> dict[str, int | None]:
        for made, limits in self._made:
            if (made.data_ptr(), made.shape, made.dtype) == (mask.data_ptr(), mask.shape, mask.dtype):
                if isinstance(limits, ValueError):
                    raise limits
                return limits
        raise ValueError(
            f"its {type(layer).__name__} adds a bias to the attention mask or changes it, "
            "which no kernel of millrace computes"
        )


_MASKS: ContextVar[_Masks] = ContextVar("masks")


def _recorded_mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **rest: Any
) -> Tensor:
    if q_length != TOKENS or kv_length != TOKENS:
        raise ValueError(f"it makes a mask of {q_length} by {kv_length} for {TOKENS} tokens")
    return _MASKS.get().make(batch_size, mask_function, rest.get("device", "cpu"))


def recorded_limits(layer: nn.Module, mask: Tensor | None) -> dict[str, int | None] | None:
    """Return window and chunk of a mask that a recorded model gave a layer; None without one."""
    return None if mask is None else _MASKS.get().limits(layer, mask)


def register() -> None:
    """Register the mask of recorded models with transformers; idempotent."""
    AttentionMaskInterface.register(RECORDED, _recorded_mask)


def facts_of(model: nn.Module) -> ModelFacts:
    """Return the recorded facts of a model; ValueError without them."""
    facts = getattr(model, "millrace_facts", None)
    if not isinstance(facts, ModelFacts):
        raise ValueError(f"nothing is known of this {type(model).__name__}; load it by millrace.models.load")
    return facts


def backbone(model: PreTrainedModel) -> Any:
    """Return the model without its head."""
    base = model.base_model
    if base is model:
        # Of some models transformers' own prefix names nothing.
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        base = inner[0] if len(inner) == 1 else base
    return base


def in_context(model: PreTrainedModel, position_T: Tensor, context: Any) -> dict[str, Any]:
    """Return the keywords with which a backbone's forward passes the context to attention."""
    facts = getattr(model, "millrace_facts", None)
    if facts is None or not facts.needs_view:
        return {"context": context}
    view = {"past_key_values": CacheView(position_T, context)}
    return view if facts.drops_context else {"context": context, **view}


def record_facts(model: PreTrainedModel, *, in_step: bool = False) -> ModelFacts:
    """Record a model made with our attention; store the facts on it and its attention layers.

    Weights do not matter; the model must compute. Where autograd is off, only other tokens' numbers and no
    gradients show a mixture of tokens outside of attention. With `in_step`, other ranks compute parts of the
    same forwards, and a model that drops the context is refused.

    Raises:
        ValueError: a layer attends in a way that millrace does not, or something else mixes tokens; the
            sentence begins with what it is.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation(RECORDED)
    drops = False
    try:
        calls, hidden_TD = _first(model, drops=False)
    except (ContextLost, TypeError) as error:
        if isinstance(error, TypeError) and "context" not in str(error):
            raise
        if in_step:
            raise ValueError("its layers pass on no context, and stages have no cache for it") from None
        drops = True
        calls, hidden_TD = _first(model, drops=True)
    finally:
        model.set_attn_implementation(implementation)
    asks = _second(model, calls, hidden_TD, drops=drops)
    facts = _facts(model, calls, asks=asks, drops=drops)
    model.millrace_facts = facts
    return facts


def _first(model: PreTrainedModel, *, drops: bool) -> tuple[list[Call], Tensor]:
    """Run a forward with masks; its last token must not have a gradient to the embeddings of others."""
    token = _MASKS.set(_Masks(_longest(model)))
    try:
        if not torch.is_grad_enabled():
            return _forward(model, 1, drops=drops)
        with _leaf(model) as leaves:
            calls, hidden_TD = _forward(model, 1, drops=drops)
        if leaves and _reaches(hidden_TD[-1], leaves[0]):
            raise ValueError(
                f"{_mixer(model, drops=drops)} mixes tokens outside of millrace's attention, as a "
                "convolution, a recurrence or an attention of its own does, and there is no kernel for it"
            )
        return [Call(c.module, _detached(c.heads), c.options) for c in calls], hidden_TD.detach()
    finally:
        _MASKS.reset(token)


@torch.no_grad()
def _second(model: PreTrainedModel, calls: list[Call], hidden_TD: Tensor, *, drops: bool) -> bool:
    """Return whether layers ask a cache for positions.

    A forward of other tokens before the same last one, of a row that began long before.
    """
    view, by_token = _Asked(torch.full((TOKENS,), LONGEST)), True
    try:
        others, other_TD = _forward(model, 2, drops=drops, view=view)
    except FAULTS:
        # Where one length must do for the whole row, it must not matter.
        by_token, asked, view = False, view.asked, _Asked(LONGEST)
        try:
            # Without having asked it wants another cache than we have, and gets none.
            others, other_TD = _forward(model, 2, drops=drops, view=view if asked else None)
        except FAULTS:
            others = []
    if len(others) != len(calls):
        view.asked = False
        others, other_TD = _forward(model, 2, drops=drops)
    difference = (other_TD[-1] - hidden_TD[-1]).abs().max() / hidden_TD[-1].abs().max().clamp(min=1e-30)
    # Weights that are not finite are reported by the trial of packed logits.
    if difference > ROUNDING.get(hidden_TD.dtype, 1e-3):
        raise ValueError("a token's hidden states depend on other tokens outside of attention")
    if not view.asked:
        return False
    pairs = ((one.heads, other.heads) for one, other in zip(calls, others, strict=True))
    matters = not all(torch.equal(x[-1], y[-1]) for pair in pairs for x, y in zip(*pair, strict=True))
    if matters and not by_token:
        raise ValueError(
            "its layers ask a cache for one position of a whole row, where each token has its own"
        )
    return matters


class _Asked(CacheView):
    def __init__(self, length: Any) -> None:
        self.recorder = Recorder()
        super().__init__(torch.arange(TOKENS), self.recorder)
        self.asked, self._length = False, length

    def get_seq_length(self, *_: Any, **__: Any) -> Any:
        self.asked = True
        return self._length


def _forward(
    model: PreTrainedModel, first: int, *, drops: bool, view: _Asked | None = None
) -> tuple[list[Call], Tensor]:
    """Return calls and final hidden states of tokens that count from `first`; the last token is fixed."""
    device = next(model.parameters()).device
    token_T = torch.arange(first, first + TOKENS, device=device)
    token_T[-1] = 0
    position_T = torch.arange(TOKENS, device=device)
    recorder = Recorder() if view is None else view.recorder
    brought: dict[str, Any] = {} if drops else {"context": recorder}
    if view is not None or drops:
        brought["past_key_values"] = CacheView(position_T, recorder) if view is None else view
    output = backbone(model)(
        input_ids=(token_T % model.config.get_text_config().vocab_size)[None],
        position_ids=position_T[None],
        use_cache=False,
        return_dict=True,
        **brought,
    )
    return recorder.calls, output.last_hidden_state[0]


def _detached(heads: Heads) -> Heads:
    query, key, value = (x.detach() for x in heads)
    return query, key, value


@contextmanager
def _leaf(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Start a graph at the first output of the input embedding, and keep that output."""
    leaves: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        # Not the leaf itself, which nothing may write to in place.
        return leaves[-1].clone()

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield leaves
    finally:
        handle.remove()


def _reaches(last_D: Tensor, x: Tensor) -> bool:
    if not last_D.requires_grad:
        return False
    # Some weights, since a plain sum of what a norm made depends on nothing.
    weight_D = torch.linspace(0.5, 1.5, last_D.numel(), device=last_D.device).view(last_D.shape)
    slope: Tensor | None = torch.autograd.grad(
        (last_D * weight_D).sum(), x, retain_graph=True, allow_unused=True
    )[0]
    return slope is not None and bool((slope[:, :-1].nan_to_num() != 0).any())


def _mixer(model: PreTrainedModel, *, drops: bool) -> str:
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def keep(name: str, module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
        given = next((x for x in (*inputs, *options.values()) if isinstance(x, Tensor) and x.ndim == 3), None)
        made = output[0] if isinstance(output, tuple) else output
        if given is None or not isinstance(made, Tensor) or made.ndim != 3 or not given.requires_grad:
            return
        if given.shape[:2] == made.shape[:2] == (1, TOKENS):
            seen.append((name, module, given, made))

    handles = [
        module.register_forward_hook(partial(keep, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    try:
        with _leaf(model):
            _forward(model, 1, drops=drops)
    finally:
        for handle in handles:
            handle.remove()
    for name, module, given, made in sorted(seen, key=lambda one: -one[0].count(".")):
        if _reaches(made[0, -1], given):
            return f"its {type(module).__name__} ({name})"
    return "it"


def _longest(model: PreTrainedModel) -> int:
    def numbers(tree: Any) -> Iterator[int]:
        for value in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(value, dict | list | tuple):
                yield from numbers(value)
            elif type(value) is int and 0 < value <= LONGEST:
                yield value

    return 3 + max(numbers(model.config.get_text_config().to_dict()), default=TOKENS)


def fit(mask_function: Callable[..., Any], longest: int) -> dict[str, int | None]:
    """Return window and chunk of a mask of transformers; ValueError if it has any other limits.

    `mask_function` returns for row, head, query and key whether the query sees the key. `longest` is more
    tokens than window or chunk.
    """
    last = longest - 1
    first = _first_seen(mask_function, last)
    window = chunk = None
    if first:
        # A window moves on by one with each token; chunks only now and then.
        before = _first_seen(mask_function, last - 1)
        if before == first - 1:
            window = last - first + 1
        else:
            chunk = first - (before if before != first else _first_seen(mask_function, first - 1))
    limit = window or chunk or 1
    near = {q + d for q in (0, limit, 2 * limit, 3 * limit) for d in range(-3, 4)}
    far = {last * n // 8 for n in range(1, 9)} | {1 << n for n in range(24)}
    for query in sorted(q for q in near | far if 0 <= q <= last):
        expected = max(0, query - (window or longest) + 1, query // (chunk or longest) * (chunk or longest))
        found = _first_seen(mask_function, query)
        if found != expected:
            raise ValueError(
                f"its mask lets token {query} see from token {found} on, which no window and no chunks do"
            )
    return {"window": window, "chunk": chunk}


def _first_seen(mask_function: Callable[..., Any], query: int) -> int:
    """Return the first key that a query sees, if it sees all from there to itself and none behind."""
    zero, key_L = torch.tensor(0), torch.arange(query + TOKENS)
    try:
        seen_L = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), key_L)).flatten()
    except (IndexError, RuntimeError, TypeError):
        raise ValueError("its mask depends on more than the places of two tokens") from None
    seen_L = seen_L.expand(len(key_L))
    first = int(seen_L.to(torch.uint8).argmax())
    if not bool(seen_L[first : query + 1].all()) or bool(seen_L[query + 1 :].any()) or first > query:
        raise ValueError(f"its mask does not let token {query} see itself and an unbroken run before it")
    return first


def _facts(model: PreTrainedModel, calls: list[Call], *, asks: bool, drops: bool) -> ModelFacts:
    names = {module: name for name, module in model.named_modules()}
    pools: list[PoolShape] = []
    stored: list[tuple[Tensor, Tensor]] = []
    by_module: dict[nn.Module, list[tuple[Call, int, bool]]] = {}
    for call in calls:
        _, key_TJK, value_TJK = call.heads
        found = [n for n, pair in enumerate(stored) if _same(pair[0], key_TJK) and _same(pair[1], value_TJK)]
        if not found:
            stored.append((key_TJK, value_TJK))
            pools.append(PoolShape(key_TJK.shape[1], key_TJK.shape[2], value_TJK.shape[2]))
        pool = found[0] if found else len(pools) - 1
        by_module.setdefault(call.module, []).append((call, pool, not found))
    layers = []
    for module, of_layer in by_module.items():
        (call, _, writes), *others = of_layer
        if any(other.options != call.options or wrote != writes for other, _, wrote in others):
            raise ValueError(f"its {type(module).__name__} attends several times in different ways")
        facts = LayerFacts(
            names.get(module, type(module).__name__),
            call.options["window"],
            call.options["chunk"],
            call.options["softcap"],
            tuple(pool for _, pool, _ in of_layer),
            writes,
        )
        module.millrace_layer = facts  # type: ignore[assignment]
        layers.append(facts)
    if not layers:
        raise ValueError("none of its layers calls attention by the interface of transformers")
    return ModelFacts(tuple(layers), tuple(pools), asks_positions=asks, drops_context=drops)


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


# The stacked weights of a layer's experts, [E, 2 M, D] and [E, D, M], under the names of Hugging Face.
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with a layer's stacked experts, by name, in model order; empty for a dense model."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts")
        and all(getattr(module, key, None) is not None for key in EXPERT_WEIGHTS)
    }
