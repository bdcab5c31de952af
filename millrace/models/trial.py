"""Test our forward of an architecture against transformers' own, on a small twin of a model.

A model's packed numbers and the gradient of every weight are compared with those of transformers' plain,
uncached forward of each sequence alone. How far rounding may take them apart is measured, by embeddings that
are moved by a rounding error. A trial counts only where it has power: the same comparison with a fault that
is planted in one layer of each kind must fail.

`inference.trial` tries the engine in the same way.

T = tokens of all sequences laid end to end, D = model width.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations
from millrace.kernels.packed_attention import Segments
from millrace.models import attention
from millrace.models.attention import Packed
from millrace.models.facts import CacheView, LayerFacts, backbone, record_facts
from millrace.models.fused import fuse
from millrace.models.logprobs import hidden_states, states
from millrace.models.own_attention import adopt, plain_implementation
from millrace.models.twin import (
    LONGEST,
    SPAN,
    VOCABULARY,
    TwinError,
    decoder_stack,
    embolden,
    first_line,
    layer_kinds,
    twin_of,
)
from millrace.models.verdicts import verdicts

LENGTHS = (23, 41, 9)
# Tokens with which all sequences begin.
COMMON = 8
# Log-probabilities of a right model differ by at most this, or by so many times what rounding moves its own.
LEAST, FLOORS = 1e-4, 20.0
NUDGE = 1e-7
# Gradients are sums over tokens; so they are compared relative to the largest of their weight.
LEAST_GRADIENT, SMALL_GRADIENT = 1e-3, 1e-3
# A planted fault is caught where it moves the numbers by so many times what is allowed.
POWER = 10.0
# A choice of experts may depend on a rounding error; so an architecture must fail with both seeds.
SEEDS = (0, 1)
FAULTS = (ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError, NotImplementedError)
# Fields for the longest sequence.
ALL_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length")
# Fields of a config by which no number changes.
IDLE = (
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "initializer_range",
    "id2label",
    "label2id",
)


@dataclass(frozen=True, slots=True)
class TrialReadout:
    """What a trial compares of a kind of model.

    `auto` makes such models, or `model_class` those of a config that `auto` does not know, as that of a part
    of a model. `packed` makes the numbers of the final hidden states of a packed row, [T, D] to [T, ...];
    `plain` those of the tokens of one sequence, [1, T] to [1, T, ...], by transformers' own modules.
    """

    what: str
    auto: Any
    packed: Callable[[PreTrainedModel, Tensor], Tensor]
    plain: Callable[[PreTrainedModel, Tensor], Tensor]
    model_class: Any = None

    def of(self, model: PreTrainedModel) -> TrialReadout:
        """Return this readout for the class of a model."""
        return replace(self, model_class=type(model))

    def make(self, config: PretrainedConfig, implementation: str | None = None) -> PreTrainedModel:
        """Build a model of a config in float32, with transformers' own attention or another."""
        implementation = implementation or plain_implementation(config)
        known = self.model_class is None or type(config) in self.auto._model_mapping
        made = self.auto.from_config if known else self.model_class._from_config
        model: PreTrainedModel = made(config, attn_implementation=implementation, dtype=torch.float32)
        return model


@dataclass(frozen=True, slots=True, eq=False)
class TrialResult:
    """Numbers of the trial's sequences, and the gradient of every weight."""

    numbers: Tensor
    gradients: dict[str, Tensor]


def find_problem(config: PretrainedConfig, reading: TrialReadout) -> str:
    """Describe the problem of our forward for the models of a config; empty if it is correct.

    It takes about a second, whatever the sizes of the config are, and nothing where the answer is known.
    """
    return answer("packed", config, reading, partial(try_packed, reading=reading))


def answer(
    what: str, config: PretrainedConfig, reading: TrialReadout, find: Callable[[PretrainedConfig], str]
) -> str:
    """Return the result of a trial, `find`, of the twin of a config's models; cached."""

    def of_twin() -> str:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            try:
                small = twin_of(copy.deepcopy(config), reading.make)
            except TwinError as error:
                return f"it cannot be tried: {error}"
            except FAULTS as error:
                return f"transformers cannot make it: {first_line(error)}"
            return verdicts().of(f"{what} {reading.what} {_words(small, LONGEST)}", lambda: find(small))

    return verdicts().of(f"{what} {reading.what} {_words(config)}", of_twin)


def _words(config: PretrainedConfig, most: int | None = None) -> str:
    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): kept(each) for key, each in value.items() if key not in IDLE}
        if isinstance(value, list | tuple):
            return [kept(each) for each in value]
        return "large" if type(value) is int and most is not None and value > most else value

    return json.dumps([type(config).__name__, kept(config.to_dict())], sort_keys=True, default=str)


def sequences() -> list[list[int]]:
    """Return the tokens of the trial's sequences, which begin alike."""
    draw = random.Random(0)
    common = [draw.randrange(2, VOCABULARY) for _ in range(COMMON)]
    return [common + [draw.randrange(2, VOCABULARY) for _ in range(length - COMMON)] for length in LENGTHS]


def try_packed(small: PretrainedConfig, reading: TrialReadout) -> str:
    """Describe the problem of our forward for the twins of a config; empty if it is correct."""
    return try_seeds(small, reading, _try_seed, told)


def try_seeds(
    small: PretrainedConfig,
    reading: TrialReadout,
    try_seed: Callable[[PretrainedConfig, TrialReadout, int], str],
    explain: Callable[[Exception], str],
) -> str:
    """Return the problem of a twin with the last of `SEEDS`; empty where one of them shows none.

    `try_seed` may raise one of `FAULTS`, which `explain` describes.
    """
    small = with_small_spans(small, reading)
    problem = ""
    for seed in SEEDS:
        try:
            problem = try_seed(small, reading, seed)
        except FAULTS as error:
            problem = explain(error)
        if not problem:
            return ""
    return problem


def with_small_spans(small: PretrainedConfig, reading: TrialReadout) -> PretrainedConfig:
    """Return the config of a twin in which every number of tokens is small enough to matter in a trial.

    A whole number above the length of a trial may count tokens under any name. Where a small one gives other
    numbers, it does.
    """
    small = copy.deepcopy(small)
    tokens = sequences()[1]
    plain = bold_model(small, reading, SEEDS[0])
    expected = plain_numbers(plain, reading, [tokens])
    shapes = [p.shape for p in plain.parameters()]
    text = small.get_text_config()
    for name, value in text.to_dict().items():
        if type(value) is not int or value <= LONGEST or name in ALL_POSITIONS:
            continue
        setattr(text, name, SPAN)
        found = None
        # Where a small number makes no model, it counts something else.
        with suppress(*FAULTS):
            other = bold_model(copy.deepcopy(small), reading, SEEDS[0])
            if [p.shape for p in other.parameters()] == shapes:
                found = plain_numbers(other, reading, [tokens])
        if found is None or torch.equal(found, expected):
            setattr(text, name, value)
        else:
            expected = found
    return small


def bold_model(small: PretrainedConfig, reading: TrialReadout, seed: int) -> PreTrainedModel:
    """Build a twin with transformers' own modules."""
    model = reading.make(copy.deepcopy(small)).eval()
    embolden(model, seed)
    return model


def our_model(plain: PreTrainedModel, reading: TrialReadout) -> PreTrainedModel:
    """Build the same twin with our modules."""
    attention.register()
    adopt(plain.config.model_type)
    # Made anew: of some, attention is a class of its own.
    ours = reading.make(copy.deepcopy(plain.config), attention.NAME).eval()
    ours.load_state_dict(plain.state_dict())
    record_facts(ours)
    fuse(ours)
    return ours


@torch.no_grad()
def plain_numbers(model: PreTrainedModel, reading: TrialReadout, tokens: list[list[int]]) -> Tensor:
    """Compute the results of transformers' own modules for each sequence alone."""
    return torch.cat([reading.plain(model, torch.tensor([each]))[0].float() for each in tokens])


def nudged(plain: PreTrainedModel) -> PreTrainedModel:
    """Copy the twin with embeddings that differ by a rounding error."""
    other = copy.deepcopy(plain)
    weight = other.get_input_embeddings().weight
    with torch.no_grad():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight.add_(noise.to(weight) * NUDGE)
    return other


def allowed_difference(expected: Tensor, other: Tensor) -> float:
    """Return how far right numbers may be from the expected ones by rounding."""
    return max(LEAST, FLOORS * float((other - expected).abs().max()))


def _try_seed(small: PretrainedConfig, reading: TrialReadout, seed: int) -> str:
    plain = bold_model(small, reading, seed)
    ours, tokens = our_model(plain, reading), sequences()
    truth, other = (_with_gradients(model, reading, tokens) for model in (plain, nudged(plain)))
    if not truth.numbers.isfinite().all():
        return "the trial has no power: transformers' own numbers are not finite"
    allowed = allowed_difference(truth.numbers, other.numbers)
    try:
        packed = packed_numbers(ours, reading, tokens)
    except FAULTS as error:
        return _cause(plain, reading, allowed) or told(error)
    found = distance(packed, truth.numbers)
    if not found <= allowed:
        cause = _cause(plain, reading, allowed)
        if not cause and distance(packed[: LENGTHS[0]], truth.numbers[: LENGTHS[0]]) <= allowed:
            cause = (
                "only the first sequence of a row is right: others see it, or count positions from its first"
            )
        differ = (
            f"its packed {reading.what} differ from its own by {found:.2g}, rounding allows {allowed:.1g}"
        )
        return cause or differ
    trained = _trained(ours, reading, tokens)
    found = distance(trained.numbers, truth.numbers)
    if not found <= allowed:
        return f"its {reading.what} differ from its own by {found:.2g} where sequences begin alike"
    slopes, slack = (_apart(truth.gradients, each.gradients) for each in (trained, other))
    excess = {name: each / max(LEAST_GRADIENT, FLOORS * slack[name]) for name, each in slopes.items()}
    worst = max(excess, key=lambda name: excess[name] if excess[name] == excess[name] else float("inf"))
    if not excess[worst] <= 1:
        return f"the gradient of its {worst} differs from its own by {slopes[worst]:.2g} of the largest"
    return _no_power(ours, plain, reading, tokens, truth.numbers, allowed)


@torch.no_grad()
def _cause(plain: PreTrainedModel, reading: TrialReadout, allowed: float) -> str:
    token_1T = torch.tensor(sequences()[:1])
    expected = reading.plain(plain, token_1T)[0]
    changed_1T = token_1T.clone()
    changed_1T[:, -1] += 1
    if distance(reading.plain(plain, changed_1T)[0, :-1], expected[:-1]) > allowed:
        return "what it makes of a token depends on the tokens behind it, as in an encoder"
    hidden_1TD = backbone(plain)(token_1T, use_cache=False).last_hidden_state
    try:
        apart = distance(reading.packed(plain, hidden_1TD[0]), expected)
    except FAULTS:
        apart = float("inf")
    return "its head is not one linear layer on the final hidden states" if apart > allowed else ""


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite between other shapes."""
    return float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")


def packed_batch(tokens: list[list[int]]) -> Batch:
    """Build a training batch of the sequences."""
    pairs = [(each[:1], each[1:]) for each in tokens]
    return pack_demonstrations(pairs, lambda mask_T, _: mask_T.float())


@torch.no_grad()
def packed_numbers(
    ours: PreTrainedModel,
    reading: TrialReadout,
    tokens: list[list[int]],
    *,
    lengths: Sequence[int] | None = None,
    position_T: Tensor | None = None,
) -> Tensor:
    """Compute our results for the sequences in one row; other `lengths` or positions plant a fault."""
    batch = packed_batch(tokens)
    context = Packed(Segments.of(torch.tensor(lengths or [len(each) for each in tokens])))
    where_T = batch.position_T if position_T is None else position_T
    return reading.packed(ours, hidden_states(ours, batch.token_T, where_T, context)).float()


def _with_gradients(plain: PreTrainedModel, reading: TrialReadout, tokens: list[list[int]]) -> TrialResult:
    numbers = [reading.plain(plain, torch.tensor([each]))[0] for each in tokens]
    return _backward(plain, torch.cat(numbers))


def _trained(ours: PreTrainedModel, reading: TrialReadout, tokens: list[list[int]]) -> TrialResult:
    batch = packed_batch(tokens)
    return _backward(ours, reading.packed(ours, states(ours, batch, torch.arange(batch.num_tokens))))


def _backward(model: PreTrainedModel, numbers: Tensor) -> TrialResult:
    weights = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(1))
    (numbers * weights.to(numbers)).sum().backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    for parameter in model.parameters():
        parameter.grad = None
    return TrialResult(numbers.detach().float(), gradients)


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return differences relative to the largest gradient of each weight, or part of the largest of all."""
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    return {
        name: float((gradient - theirs[name]).abs().max())
        / max(float(gradient.abs().max()), SMALL_GRADIENT * largest)
        for name, gradient in ours.items()
    }


def _no_power(
    ours: PreTrainedModel,
    plain: PreTrainedModel,
    reading: TrialReadout,
    tokens: list[list[int]],
    expected: Tensor,
    allowed: float,
) -> str:
    """Name a planted fault that the trial would miss; empty where it catches all."""
    lengths = [len(each) for each in tokens]
    moved = [lengths[0] + 1, lengths[1] - 1, *lengths[2:]]
    compute = partial(packed_numbers, ours, reading, tokens)
    kinds, stack = layer_kinds(ours), decoder_stack(ours)
    assert stack is not None
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    mixing = [index for index in firsts if mixes_tokens(plain, reading, index)]
    if not mixing:
        return "the trial has no power: none of the layers that it found mixes tokens"
    for index in firsts:
        layer = stack[index]
        faults: list[tuple[str, Any]] = []
        if index in mixing:
            faults.append(("a segment that ends a token late", _segments_moved(layer, moved)))
        faults += [
            (f"a {name} that is a token too long", _longer(module, name)) for module, name in _limited(layer)
        ]
        for name, fault in faults:
            with fault:
                if not distance(compute(), expected) >= POWER * allowed:
                    return f"the trial has no power for layers like its layer {index}: it misses {name}"
    gap_T = packed_batch(tokens).position_T
    gap_T = gap_T + (gap_T >= COMMON).long()
    missed = not distance(compute(position_T=gap_T), expected) >= POWER * allowed
    if missed and _uses_positions(plain, tokens, POWER * allowed):
        return "the trial has no power for positions: it misses a gap in them"
    return ""


@contextmanager
def _segments_moved(layer: nn.Module, lengths: Sequence[int]) -> Iterator[None]:
    wrong = Packed(Segments.of(torch.tensor(lengths)))

    def changed(name: str, value: Any) -> Any:
        return wrong if name == "context" else value.within(wrong) if isinstance(value, CacheView) else value

    def swap(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return tuple(changed("", x) for x in args), {name: changed(name, x) for name, x in kwargs.items()}

    handle = layer.register_forward_pre_hook(swap, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _limited(layer: nn.Module) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for module in layer.modules():
        facts = getattr(module, "millrace_layer", None)
        if isinstance(facts, LayerFacts):
            found += [(module, name) for name in ("window", "chunk") if getattr(facts, name) is not None]
    return found


@contextmanager
def _longer(module: Any, name: str) -> Iterator[None]:
    facts = module.millrace_layer
    module.millrace_layer = replace(facts, **{name: getattr(facts, name) + 1})
    try:
        yield
    finally:
        module.millrace_layer = facts


@torch.no_grad()
def mixes_tokens(plain: PreTrainedModel, reading: TrialReadout, index: int) -> bool:
    """Return whether a layer's output for a token depends on the tokens before it."""
    stack, tokens = decoder_stack(plain), sequences()[2]
    assert stack is not None
    made: list[Tensor] = []

    def run(change: bool) -> Tensor:
        def alter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            moved = given.clone()
            moved[:, 0] += 1.0 if change else 0.0
            return ((moved, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": moved})

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            made.append(output[0] if isinstance(output, tuple) else output)

        handles = [
            stack[index].register_forward_pre_hook(alter, with_kwargs=True),
            stack[index].register_forward_hook(keep),
        ]
        try:
            reading.plain(plain, torch.tensor([tokens]))
        finally:
            for handle in handles:
                handle.remove()
        # One of another part of the model, or of pictures, is not called.
        return made[-1].reshape(len(tokens), -1)[1:] if made else torch.empty(0)

    return not torch.equal(run(False), run(True))


@torch.no_grad()
def _uses_positions(plain: PreTrainedModel, tokens: list[list[int]], least: float) -> bool:
    token_1T = torch.tensor([tokens[1]])
    position_1T = torch.arange(token_1T.shape[1])[None]
    try:
        hidden = [
            backbone(plain)(token_1T, position_ids=where, use_cache=False).last_hidden_state
            for where in (position_1T, position_1T + (position_1T >= COMMON))
        ]
    except FAULTS:
        return False
    return distance(hidden[0], hidden[1]) >= least


def told(error: Exception) -> str:
    """Return the message of an error, as a sentence of ours or as that of another library."""
    line = first_line(error)
    return line if type(error) is ValueError else f"its forward in a packed row fails: {line}"
