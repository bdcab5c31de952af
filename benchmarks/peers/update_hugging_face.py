"""A policy update as a plain loop over transformers' model.

The first word after the usual arguments says how the samples lie: `padded`, a row each, filled up to the
longest; `packed`, one row for all, kept apart by their positions, of which transformers makes a mask. With
`compile` after it, the model is compiled.

B = rows, L = length of a row.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from update import serve
from update_task import BETAS, CLIP, LEARNING_RATE, MAX_GRAD_NORM, Sample, batch


class Columns:
    """What is known of each token, [B L] each; what fills a row up is 0 everywhere.

    Attributes:
        token: its id.
        position: in its sample.
        inside: 1 where there is a token.
        drawn: 1 where the policy drew it.
        logprob: under the weights that drew it.
        advantage: of its sample.
    """

    def __init__(self, rows: list[list[Sample]]) -> None:
        self.token = _rectangle([[x for one in row for x in one.tokens] for row in rows])
        self.position = _rectangle([[x for one in row for x in range(len(one.tokens))] for row in rows])
        self.inside = _rectangle([[1 for one in row for _ in one.tokens] for row in rows])
        self.drawn = _rectangle(
            [[x for one in row for x in _after(one, [1] * len(one.drawn))] for row in rows]
        )
        self.logprob = _rectangle([[x for one in row for x in _after(one, one.logprobs)] for row in rows])
        self.advantage = _rectangle([[one.advantage for one in row for _ in one.tokens] for row in rows])


def _after(one: Sample, of_drawn: list[float]) -> list[float]:
    """Numbers of the drawn tokens, and 0 for each of the prompt's."""
    return [0] * len(one.prompt) + of_drawn


def _rectangle(rows: list[list[float]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


class Loop:
    """Forward, clipped loss of the drawn tokens, backward, clipped gradient, fused AdamW."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        layout, *more = sys.argv[4:]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).train()
        self._forward = torch.compile(self._model) if "compile" in more else self._model
        samples = batch()
        self._columns = Columns([samples] if layout == "packed" else [[one] for one in samples])
        self._where = (
            {"position_ids": self._columns.position}
            if layout == "packed"
            else {"attention_mask": self._columns.inside}
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
        )

    def step(self) -> tuple[float, float]:
        """One turn of the loop."""
        loss = self._loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def _loss(self) -> Tensor:
        known = self._columns
        logit_BLV = self._forward(input_ids=known.token, use_cache=False, **self._where).logits
        every_BLV = logit_BLV[:, :-1].float().log_softmax(-1)
        logprob_BL = every_BLV.gather(2, known.token[:, 1:, None])[:, :, 0]
        ratio_BL = (logprob_BL - known.logprob[:, 1:]).exp()
        advantage_BL, drawn_BL = known.advantage[:, 1:], known.drawn[:, 1:]
        clipped_BL = ratio_BL.clamp(1 - CLIP, 1 + CLIP)
        loss_BL = -torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
        return (loss_BL * drawn_BL).sum() / drawn_BL.sum()


if __name__ == "__main__":
    serve(Loop, ("torch", "transformers"))
