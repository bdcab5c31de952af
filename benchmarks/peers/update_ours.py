"""A policy update by millrace; with `products`, its bare matrix products alone."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import torch
from products import Call, product, quickest
from torch import Tensor, nn
from update import serve
from update_task import BETAS, CLIP, LEARNING_RATE, MAX_GRAD_NORM, Sample, batch

from millrace.algorithms.weights import token_mean
from millrace.config.method_sections import PpoClipLoss
from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.data.shared_prefix import common_beginnings
from millrace.models.load import load_model
from millrace.run.build_algorithm import build_loss
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyObjective, PolicyTrainer
from millrace.types import Completion, Outcome, Trajectory, Turn


def packed(samples: list[Sample]) -> Batch:
    """The samples as a run would pack them, every drawn token weighing the same."""
    trajectories = []
    for sample in samples:
        logprobs, versions = np.float32(sample.logprobs), np.zeros(len(sample.drawn), np.int32)
        drawn = Completion(tuple(sample.drawn), logprobs, versions, "length", "")
        trajectories.append(Trajectory((Turn(tuple(sample.prompt), drawn),), Outcome("score", 0.0)))
    found = pack(trajectories)
    advantage_B = torch.tensor([sample.advantage for sample in samples])
    return replace(
        found,
        advantage_T=advantage_B[found.segment_T] * found.action_mask_T,
        weight_T=token_mean(found.action_mask_T, found.segment_T),
    )


class Ours:
    """`PolicyTrainer` as recipes use it."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        model = load_model(folder, dtype=getattr(torch, dtype))
        self._batch = packed(batch())
        self._trainer = PolicyTrainer(
            model,
            PolicyObjective(build_loss(PpoClipLoss(clip_low=CLIP, clip_high=CLIP))),
            adamw(model, betas=BETAS, weight_decay=0.0),
            learning_rate=lambda step: LEARNING_RATE,
            temperature=1.0,
            max_tokens=self._batch.num_tokens,
            max_grad_norm=MAX_GRAD_NORM,
        )

    def step(self) -> tuple[float, float]:
        """Both halves of the trainer."""
        self._trainer.forward_backward(self._batch)
        report = self._trainer.optim_step()
        return report.metrics["loss"], report.grad_norm


class Products:
    """What no update of the tokens can do without: each weight's product and both its gradients.

    Tokens that samples begin with together count once, since they have to be computed once only. Each product
    is by the quickest of torch's ways.
    """

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        model = load_model(folder, dtype=getattr(torch, dtype))
        found = packed(batch())
        num_drawn = int(found.action_mask_T.sum())
        shared = common_beginnings(found.token_T, found.length_B)
        num_tokens = found.num_tokens if shared is None else len(shared.kept_S)
        self._calls: list[Call] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                num_rows = num_drawn if module is model.get_output_embeddings() else num_tokens
                self._calls += _products(module.weight.detach(), num_rows)

    def step(self) -> tuple[float, float]:
        """All products; there is no loss."""
        for call in self._calls:
            call()
        return math.nan, math.nan


def _products(weight_ND: Tensor, num_rows: int) -> list[Call]:
    """The products x W^T, dy W and dy^T x of so many rows."""
    x_MD, slope_MN = (torch.randn(num_rows, size).to(weight_ND) for size in reversed(weight_ND.shape))
    return [
        product(x_MD, weight_ND),
        quickest([lambda: slope_MN @ weight_ND, product(slope_MN, weight_ND.T)]),
        quickest([lambda: slope_MN.T @ x_MD, product(slope_MN.T, x_MD.T)]),
    ]


if __name__ == "__main__":
    only_products = sys.argv[-1] == "products"
    serve(Products if only_products else Ours, ("millrace-rl", "torch", "transformers"))
