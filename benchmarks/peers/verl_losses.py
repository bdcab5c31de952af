"""What verl's losses give over several epochs and minibatches, for tests/golden/verl_steps.json.

verl 0.9.1 is no dependency. In an environment that has it: `python benchmarks/peers/verl_losses.py FILE`.
A policy of one vector of logits, added to fixed ones at each token, takes plain gradient steps over two
minibatches of two micro-batches each, for two epochs.

B = rows, T = tokens of the padded rows, V = candidates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SEED, ROWS, WIDTH, CANDIDATES = 5, 6, 6, 5
EPOCHS, RATE = 2, 0.3
MINIBATCHES = (((0, 1), (2,)), ((3,), (4, 5)))
MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
TOKENS = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
SEQUENCES = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.03"}
TRUNCATED = {"rollout_is": "token", "rollout_is_threshold": 1.2}
ARMS: dict[str, dict[str, Any]] = {
    "decoupled, truncated": {"bypass_mode": False, **TRUNCATED},
    "bypass": {"loss_type": "ppo_clip"},
    "bypass, tokens rejected": {"loss_type": "ppo_clip", **TRUNCATED, **TOKENS},
    "bypass, sequences rejected": {"loss_type": "ppo_clip", **SEQUENCES},
    "bypass reinforce, tokens truncated": {"loss_type": "reinforce", **TRUNCATED},
    "bypass reinforce, sequences truncated": {
        "loss_type": "reinforce",
        **TRUNCATED,
        "rollout_is": "sequence",
    },
    "bypass reinforce, truncated and rejected": {"loss_type": "reinforce", **TRUNCATED, **TOKENS},
}


class Actor(SimpleNamespace):
    """The settings that verl's losses read of an actor."""

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or a default."""
        return getattr(self, name, default)


def inputs() -> dict[str, Tensor]:
    """A ragged batch in float64."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length_B = torch.randint(2, WIDTH + 1, (ROWS,), generator=generator)
    base_BTV = normal(ROWS, WIDTH, CANDIDATES)
    action_BT = torch.randint(0, CANDIDATES, (ROWS, WIDTH), generator=generator)
    drawn_BT = base_BTV.log_softmax(-1).gather(-1, action_BT[..., None])[..., 0]
    return {
        "mask": (torch.arange(WIDTH) < length_B[:, None]).double(),
        "base": base_BTV,
        "action": action_BT,
        "rollout": drawn_BT + 0.25 * normal(ROWS, WIDTH),
        "advantages": normal(ROWS, WIDTH),
    }


def logprobs(batch: dict[str, Tensor], policy_V: Tensor) -> Tensor:
    """Log-probability of each token, [B, T]."""
    return (batch["base"] + policy_V).log_softmax(-1).gather(-1, batch["action"][..., None])[..., 0]


def trained(batch: dict[str, Tensor], settings: dict[str, Any], mode: str) -> dict[str, list[Any]]:
    """Loss and gradient of each optimizer step."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    policy_V = torch.zeros(CANDIDATES, dtype=torch.float64, requires_grad=True)
    old_BT, weight_BT, loss_mode = batch["rollout"], None, "bypass_mode"
    if not settings.get("bypass_mode", True):
        own = {name: value for name, value in settings.items() if name != "bypass_mode"}
        old_BT, loss_mode = logprobs(batch, policy_V).detach(), "vanilla"
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            old_BT, batch["rollout"], batch["mask"], **own
        )
        weight_BT = weights.batch["rollout_is_weights"]
    found: dict[str, list[Any]] = {"loss": [], "gradient": []}
    for micros in MINIBATCHES * EPOCHS:
        rows = [row for micro in micros for row in micro]
        whole = {
            "dp_size": 1,
            "batch_num_tokens": batch["mask"][rows].sum(),
            "global_batch_size": len(rows),
            "loss_scale_factor": WIDTH,
        }
        actor = Actor(
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            global_batch_info=whole,
            policy_loss={"rollout_correction": settings},
        )
        loss = torch.zeros((), dtype=torch.float64)
        for micro in map(list, micros):
            part, _ = core_algos.get_policy_loss_fn(loss_mode)(
                old_log_prob=old_BT[micro],
                log_prob=logprobs(batch, policy_V)[micro],
                advantages=batch["advantages"][micro],
                response_mask=batch["mask"][micro],
                loss_agg_mode=mode,
                config=actor,
                rollout_is_weights=None if weight_BT is None else weight_BT[micro],
            )
            part.backward()
            loss = loss + part.detach()
        assert policy_V.grad is not None
        found["loss"].append(float(loss))
        found["gradient"].append(policy_V.grad.tolist())
        with torch.no_grad():
            policy_V -= RATE * policy_V.grad
        policy_V.grad = None
    return found


def main() -> None:
    """Write the file that the command names."""
    batch = inputs()
    cases = {f"{arm} | {mode}": trained(batch, ARMS[arm], mode) for arm in ARMS for mode in MODES}
    tree = {"rate": RATE, "inputs": {name: value.tolist() for name, value in batch.items()}, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(tree) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
