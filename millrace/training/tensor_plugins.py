"""Losses, advantages and corrections of a user's own, between checked tensors.

T = tokens that the policy chose, one trajectory (in a loss: one segment) after the other; N = trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millrace.algorithms.losses import LossTerms
from millrace.data.plugin import Plugin
from millrace.training.estimate import Scored

LOSS_INPUTS = ("policy_logprob_T", "sampler_logprob_T", "advantage_T", "segment_T", "num_segments")
CORRECTION_INPUTS = ("proximal_logprob_T", "sampler_logprob_T", "segment_T", "num_segments")
ADVANTAGE_INPUTS = (
    *("reward_N", "group_N", "num_groups", "length_N"),
    *("trajectory_T", "reward_T", "sampler_logprob_T"),
)


class LossPlugin:
    """A policy loss of a user's own: the inputs of `losses`, by name, to one number for each token."""

    def __init__(self, reference: str, options: Mapping[str, Any]) -> None:
        """Import the function; SetupError if it cannot be called."""
        self._plugin = Plugin.load("policy.loss.function", reference, LOSS_INPUTS, options)

    def __call__(self, t: LossTerms) -> tuple[Tensor, None]:
        """Return the loss, [T]; PluginError if the function raises, or its result is no such loss."""
        given = (t.policy_N, t.start_N, t.advantage_N, t.segment_N, t.num_segments)
        loss_T = self._plugin(**dict(zip(LOSS_INPUTS, given, strict=True)))
        check_numbers(
            self._plugin, loss_T, (tuple(t.policy_N.shape),), "one for each token", t.policy_N.device
        )
        if t.policy_N.requires_grad and not loss_T.requires_grad:
            raise self._plugin.refuse(
                "returned a loss without a gradient; compute it from policy_logprob_T, without detach, "
                "item or no_grad"
            )
        check_finite(self._plugin, loss_T, (t.policy_N, t.start_N, t.advantage_N))
        return loss_T, None


class AdvantagePlugin:
    """An advantage of a user's own: rewards and groups, by name, to a number for each trajectory or token."""

    def __init__(self, reference: str, options: Mapping[str, Any]) -> None:
        """Import the function; SetupError if it cannot be called."""
        self._plugin = Plugin.load("advantage.function", reference, ADVANTAGE_INPUTS, options)

    def __call__(self, scored: Scored) -> tuple[Tensor, None]:
        """Return the advantage of each token, [T], and no target of a critic.

        Raises:
            PluginError: the function raises, or its result is no advantage of these trajectories or tokens.
        """
        chosen = scored.chosen
        given = {
            "reward_N": scored.reward_N,
            "group_N": scored.group_N,
            "num_groups": scored.num_groups,
            "length_N": chosen.length_B,
            "trajectory_T": chosen.segment_N,
            "reward_T": scored.rewards,
            "sampler_logprob_T": chosen.take(scored.batch.sampler_logprob_T),
        }
        # The function may write to what it gets, and others read these.
        copies = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()
        }
        found = self._plugin(**copies)
        shapes = (tuple(scored.reward_N.shape), tuple(chosen.index_N.shape))
        what = "one for each trajectory, or one for each token"
        check_numbers(self._plugin, found, shapes, what, scored.reward_N.device)
        check_detached(self._plugin, found, "an advantage")
        check_finite(self._plugin, found, (scored.reward_N,))
        return (found.float()[chosen.segment_N] if found.shape == shapes[0] else found.float()), None


class CorrectionPlugin:
    """A correction of a user's own: log-probabilities, by name, to the factor of each token's loss."""

    def __init__(self, reference: str, options: Mapping[str, Any]) -> None:
        """Import the function; SetupError if it cannot be called."""
        self._plugin = Plugin.load("policy.correction.function", reference, CORRECTION_INPUTS, options)

    def __call__(self, proximal_N: Tensor, sampler_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
        """Return the factors, [N]; PluginError if the function raises, or its result is no such factors."""
        # The function may write to what it gets.
        given = (proximal_N.clone(), sampler_N.clone(), segment_N.clone(), num_segments)
        found_N = self._plugin(**dict(zip(CORRECTION_INPUTS, given, strict=True)))
        shape, device = tuple(proximal_N.shape), proximal_N.device
        check_numbers(self._plugin, found_N, (shape,), "one for each token", device)
        check_detached(self._plugin, found_N, "a correction")
        check_finite(self._plugin, found_N, (proximal_N, sampler_N))
        return found_N.to(proximal_N.dtype)


def check_detached(plugin: Plugin, found: Tensor, what: str) -> None:
    """Raise PluginError for a result that has a graph."""
    if found.requires_grad:
        raise plugin.refuse(
            f"returned a tensor with a graph, and {what} has no gradient; detach it, or compute it under "
            "torch.no_grad()"
        )


def check_numbers(
    plugin: Plugin, found: Any, shapes: tuple[tuple[int, ...], ...], what: str, device: torch.device
) -> None:
    """Check that a result is a tensor of floating-point numbers of one of these shapes; else PluginError."""
    expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    if not isinstance(found, Tensor):
        raise plugin.refuse(f"returned a {type(found).__name__}; return a tensor of shape {expected}, {what}")
    if tuple(found.shape) not in shapes:
        raise plugin.refuse(
            f"returned a tensor of shape {list(found.shape)}; return one of shape {expected}, {what}"
        )
    if not found.is_floating_point():
        raise plugin.refuse(f"returned a tensor of {found.dtype}; return floating-point numbers (.float())")
    if found.device != device:
        raise plugin.refuse(
            f"returned a tensor on {found.device}; return one on {device}, where its inputs are"
        )


def check_finite(plugin: Plugin, found: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Raise PluginError for a number that is not finite, unless an input has such a number already."""
    finite = torch.isfinite(found)
    if bool(finite.all()) or not all(bool(torch.isfinite(each).all()) for each in inputs):
        return
    found = found.detach()
    place = int((~finite).nonzero()[0, 0])
    raise plugin.refuse(
        f"returned {found[place].item()} at place {place} of {len(found)}, from finite inputs; bound what it "
        "divides by, and what it takes the logarithm or exponential of"
    )
