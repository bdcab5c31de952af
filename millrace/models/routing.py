"""Which experts tokens go to: recorded, replayed, and kept in balance.

A mixture of experts is sampled by one computation and trained by another, and where two experts score nearly
alike, rounding alone sends a token elsewhere. Replay takes the choice from a record: that of the sampler (R3)
or that of the weights before the update (R2). Only the choice is taken; its weights are computed from the
present scores, so the router learns.

T = tokens of a packed row, or of this rank's part of it (context and sequence parallel), L = layers with a
router in model order, K = experts of a token, E = experts, D = model width.

Sources: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers"
(R3); Zheng et al. 2025, "Group sequence policy optimization" (routing replay).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.models.facts import experts_of

BIAS = "e_score_correction_bias"
TRIAL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Form:
    """How a router makes weights of its logits; `normalised` divides a token's scores by their sum."""

    score: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float

    def weights(self, logit_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """Return the weights of the given experts, [T, K] float32."""
        weight_TK = self._scores(logit_TE).gather(1, expert_TK)
        if self.normalised:
            # A forced expert may have lost all its mass; then 0 and not NaN.
            weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + 1e-20)
        return weight_TK * self.scale

    def probabilities(self, logit_TE: Tensor) -> Tensor:
        """Return the scores of all experts, divided by their sum, [T, E] float32."""
        score_TE = self._scores(logit_TE)
        return score_TE if self.score == "softmax" else score_TE / score_TE.sum(1, keepdim=True)

    def _scores(self, logit_TE: Tensor) -> Tensor:
        logit_TE = logit_TE.float()
        return logit_TE.softmax(1) if self.score == "softmax" else logit_TE.sigmoid()


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    module: nn.Module
    form: Form
    num_experts: int
    num_choices: int


class Record:
    """The routers' decisions in one forward, from `Routers.record`; empty before it."""

    def __init__(self, routers: list[_Router]) -> None:
        self._routers = routers
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def expert_TLK(self) -> Tensor:
        """Each token's experts, int32 in [0, E); ValueError before a forward."""
        return torch.stack([expert_TK.int() for _, expert_TK in self._decisions()], 1)

    def mass_LE(self, count_TL: Tensor) -> Tensor:
        """Sum the routers' probabilities over tokens, token t `count_TL` times, float32, with gradient.

        Sigmoid scores are divided by their sum first. Before a forward it raises a ValueError.
        """
        logits = [logit_TE for logit_TE, _ in self._decisions()]
        return torch.stack(
            [
                count_TL[:, layer].float() @ router.form.probabilities(logit_TE)
                for layer, (router, logit_TE) in enumerate(zip(self._routers, logits, strict=True))
            ]
        )

    def add(self, layer: int, logit_TE: Tensor, expert_TK: Tensor) -> None:
        """Record the decisions of one router; a layer computed again replaces its earlier record."""
        self._seen[layer] = logit_TE, expert_TK

    def _decisions(self) -> list[tuple[Tensor, Tensor]]:
        for layer, router in enumerate(self._routers):
            if layer not in self._seen:
                raise ValueError(f"no forward has passed {router.name}; run the model inside of `record`")
        return [self._seen[layer] for layer in range(len(self._routers))]


class Routers:
    """The routers of a mixture of experts; nothing of the model is changed outside of the contexts.

    `num_layers` is L (layers with a router), `num_experts` E, and `num_choices` K.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find routers, and by trials their forms; ValueError if none, or with weights we cannot compute."""
        forms: dict[type[nn.Module], tuple[Form, int, int]] = {}
        self._routers = []
        for name, module in _routers_of(model).items():
            kind = type(module)
            if kind not in forms:
                forms[kind] = _tried(name, module)
            self._routers.append(_Router(name, module, *forms[kind]))
        if not self._routers:
            raise ValueError(f"a {model.config.model_type} has no routers; only a mixture of experts has")
        self.num_layers = len(self._routers)
        self.num_experts = self._routers[0].num_experts
        self.num_choices = self._routers[0].num_choices

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Record the routers' decisions in one forward inside; read it before the next.

        Inside of `replay`, the forced experts are recorded.
        """
        record = Record(self._routers)
        with self.watch(record.add):
            yield record

    @contextmanager
    def watch(self, see: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
        """Call `see` in the forwards inside with a router's index, logits [T, E] and experts [T, K]."""

        def hook(layer: int, router: _Router) -> Callable[..., None]:
            return lambda module, args, output: see(layer, output[0], output[2])

        with self._hooked(hook):
            yield

    @contextmanager
    def replay(self, expert_TLK: Tensor) -> Iterator[None]:
        """Send the tokens of a forward inside to the experts given, with weights from the present scores.

        The backward belongs inside too where layers are computed again in it (activation checkpointing).
        `expert_TLK` are integers in [0, E), no expert twice; or -1 for all experts of a token in a layer: the
        router's own choice then stays (for a token that the sampler never computed).

        Raises:
            ValueError: shape, dtype or numbers do not fit the model; or, in the forward, the row has another
                number of tokens.
        """
        self._check(expert_TLK)

        def hook(layer: int, router: _Router) -> Callable[..., tuple[Tensor, ...]]:
            forced_TK = expert_TLK[:, layer]

            def force(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                logit_TE, weight_TK, own_TK = output
                if len(forced_TK) != len(own_TK):
                    raise ValueError(
                        f"expert_TLK has {len(forced_TK)} tokens, but the row that {router.name} sees has "
                        f"{len(own_TK)}; replay the same tokens that were recorded"
                    )
                given_TK = forced_TK.to(own_TK)
                chosen_TK = torch.where(given_TK < 0, own_TK, given_TK)
                return logit_TE, router.form.weights(logit_TE, chosen_TK).to(weight_TK.dtype), chosen_TK

            return force

        with self._hooked(hook):
            yield

    def prepare_biases(self) -> None:
        """Convert the biases of the choice to float32: in a narrower dtype their small steps would be lost.

        It raises a ValueError if the model's routers have none.
        """
        for router in self._routers:
            if BIAS not in router.module._buffers:
                raise ValueError(f"router {router.name} has no bias {BIAS} for the choice")
            setattr(router.module, BIAS, getattr(router.module, BIAS).float())

    def move_biases(self, load_LE: Tensor, *, step: float) -> None:
        """Balance without a loss: move each expert's bias, which only the choice sees, by `moved_bias`.

        Call it after each optimizer step, with the same loads [L, E] on all ranks (otherwise a ValueError):
        choices of each expert over the whole step and all ranks. The biases are buffers, which
        `prepare_biases` has been through, and belong to the weights that a sampler needs.
        """
        if load_LE.shape != (self.num_layers, self.num_experts):
            raise ValueError(
                f"load_LE has shape {tuple(load_LE.shape)}; the model has {self.num_layers} layers of "
                f"{self.num_experts} experts"
            )
        for router, load_E in zip(self._routers, load_LE, strict=True):
            bias_E = getattr(router.module, BIAS)
            bias_E.copy_(moved_bias(bias_E, load_E, step=step))

    @contextmanager
    def _hooked(self, hook: Callable[[int, _Router], Callable[..., Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, router in enumerate(self._routers):
                stack.callback(router.module.register_forward_hook(hook(layer, router)).remove)
            yield

    def _check(self, expert_TLK: Tensor) -> None:
        size, dtype = expert_TLK.shape, expert_TLK.dtype
        integers = (torch.int16, torch.int32, torch.int64)
        if size[1:] != (self.num_layers, self.num_choices) or dtype not in integers:
            raise ValueError(
                f"expert_TLK has shape {tuple(size)} and {dtype}; the model needs integers [T, "
                f"{self.num_layers}, {self.num_choices}]: tokens, layers with a router, experts of a token"
            )
        sorted_TLK = expert_TLK.sort(2).values
        own_TL = (expert_TLK == -1).all(2)
        wrong_TL = (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any(2)
        wrong_TL |= ((expert_TLK < 0) | (expert_TLK >= self.num_experts)).any(2)
        wrong = (wrong_TL & ~own_TL).nonzero()
        if len(wrong):
            t, layer = wrong[0].tolist()
            raise ValueError(
                f"expert_TLK sends token {t} in layer {layer} to {expert_TLK[t, layer].tolist()}; it must be "
                f"{self.num_choices} different experts below {self.num_experts}, or -1 throughout"
            )


def expert_load(expert_TLK: Tensor, num_experts: int) -> Tensor:
    """Count choices of each expert, [L, E] int64, ignoring -1; sum it over ranks and micro-batches."""
    # Layer by layer, since a wide copy of the whole record would be large.
    loads = [
        torch.bincount(layer_TK.flatten().long() + 1, minlength=num_experts + 1)[1:]
        for layer_TK in expert_TLK.unbind(1)
    ]
    return torch.stack(loads)


def load_metrics(load_LE: Tensor) -> dict[str, float]:
    """Compute how evenly experts are used, as means over the layers; nothing where no token chose any.

    `router_max_load` is the largest load over the mean one, 1 where all are equal and E / K at worst;
    `router_load_entropy` is the entropy of the load fractions over log E, 1 where all are equal.
    """
    if not bool((load_LE.sum(1) > 0).all()):
        return {}
    fraction_LE = load_LE.double() / load_LE.sum(1, keepdim=True)
    entropy_L = torch.special.entr(fraction_LE).sum(1) / math.log(load_LE.shape[1])
    return {
        "router_max_load": float(fraction_LE.amax(1).mean()) * load_LE.shape[1],
        "router_load_entropy": float(entropy_L.mean()),
    }


def balance_loss(mass_LE: Tensor, load_LE: Tensor, *, num_choices: int, coefficient: float) -> Tensor:
    """Add up E sum_e f_e P_e over the layers, times the coefficient: least where the loads are equal.

    f_e = load_e / tokens is the fraction of tokens that chose expert e (they add up to K) and P_e its
    mean probability. `load_LE` counts the tokens of all ranks, and for independence of the micro-batch split,
    of all micro-batches; `mass_LE` adds up probabilities over those of this rank and this micro-batch. The
    parts of the loss, and their gradients, add up to the loss of one process.

    Raises:
        ValueError: shapes do not fit, num_choices is below 1, or the coefficient below 0.

    Source: Fedus et al. 2021, "Switch transformers", equations 4 to 6; K experts as in transformers.
    """
    if mass_LE.shape != load_LE.shape:
        raise ValueError(
            f"mass_LE has shape {tuple(mass_LE.shape)} and load_LE {tuple(load_LE.shape)}; they must be "
            f"[L, E]"
        )
    if num_choices < 1 or coefficient < 0:
        raise ValueError(
            f"num_choices is {num_choices} and coefficient {coefficient}; they must be at least 1 and 0"
        )
    num_tokens_L1 = (load_LE.sum(1, keepdim=True) / num_choices).clamp(min=1)
    fraction_LE, mean_LE = load_LE / num_tokens_L1, mass_LE / num_tokens_L1
    return coefficient * load_LE.shape[1] * (fraction_LE * mean_LE).sum()


def moved_bias(bias_E: Tensor, load_E: Tensor, *, step: float) -> Tensor:
    """Move each bias by `step`: up where the load is below the mean, down where it is above; [E] float32.

    The bias is added to the experts' scores for the choice only. DeepSeek-V3 used a step of 0.001; one not
    above 0 is a ValueError.

    Source: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts".
    """
    if step <= 0:
        raise ValueError(f"step is {step}; it must be above 0")
    load_E = load_E.to(bias_E.device, torch.float32)
    return bias_E.float() + step * (load_E.mean() - load_E).sign()


def has_routers(model: nn.Module) -> bool:
    """Return whether a model is a mixture of experts."""
    return bool(_routers_of(model))


def _routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules next to a layer's experts with a row for each expert (routers), by name."""
    found = {}
    for name, experts in experts_of(model).items():
        beside = name.rpartition(".")[0]
        for key, child in model.get_submodule(beside).named_children():
            weight = getattr(child, "weight", None)
            if child is not experts and weight is not None and len(weight) == experts.num_experts:
                found[f"{beside}.{key}"] = child
    return found


def _tried(name: str, router: Any) -> tuple[Form, int, int]:
    generator = torch.Generator().manual_seed(0)
    trial = copy.copy(router)

    def drawn(like: Tensor | None) -> Tensor | None:
        return None if like is None else torch.randn(like.shape, generator=generator)

    # The copy is shallow: the model keeps its own numbers.
    trial._parameters = {key: drawn(x) for key, x in router._parameters.items()}
    trial._buffers = {key: drawn(x) for key, x in router._buffers.items()}
    try:
        hidden_TD = torch.randn(TRIAL_TOKENS, router.weight.shape[1], generator=generator)
        # Small, so that no expert takes all.
        hidden_TD = hidden_TD / hidden_TD.shape[1] ** 0.5
        logit_TE, weight_TK, expert_TK = type(router).forward(trial, hidden_TD)
        for score in ("softmax", "sigmoid"):
            for normalised in (True, False):
                form = Form(score, normalised, float(getattr(router, "routed_scaling_factor", 1.0)))
                if torch.allclose(form.weights(logit_TE, expert_TK), weight_TK.float(), rtol=1e-4):
                    return form, logit_TE.shape[1], expert_TK.shape[1]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"router {name} is a {type(router).__name__}, which cannot be tried: {error}"
        ) from None
    raise ValueError(
        f"router {name} is a {type(router).__name__}, whose weights are neither a softmax nor sigmoids of "
        f"its scores; its routing can be neither replayed nor balanced"
    )
