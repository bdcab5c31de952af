"""A reward that is a model: one number for a prompt and its answer.

N = texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.data.tokenizers import load_tokenizer
from millrace.models.heads import load_scalar_model, max_positions, row_scores
from millrace.models.load import Model, ModelError
from millrace.types import Outcome, Prompt

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


class RewardModel:
    """The score of a model from `models.heads` at the last token of what it reads.

    It reads the prompt's text, the completion and the end of text, as `tokens` puts them together, with the
    model's own tokenizer, not the policy's. The same texts in the same order give the same bits.

    Raises:
        ModelError: the tokenizer has ids the model has no embedding for.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        num_ids = model.config.get_text_config().vocab_size
        most = max(tokenizer.get_vocab().values())
        if most >= num_ids:
            raise ModelError(
                f"the reward model's tokenizer has ids up to {most}, but its vocabulary holds {num_ids}; put "
                "the tokenizer it was made with into its folder"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = min(max_tokens, max_positions(model) or max_tokens)
        self._pad = model.config.get_text_config().pad_token_id
        self._max_tokens = max_tokens

    def tokens(self, text: str) -> list[int]:
        """The special tokens the tokenizer puts in front, the text, and one end of text.

        A BOS that the text begins with is not doubled. Where the model's config names the end of text as its
        padding, none is put behind: transformers reads the score before the padding, and so do we.
        """
        token_ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if start is not None and token_ids[:2] == [start, start]:
            token_ids = token_ids[1:]
        while token_ids[-1:] == [end]:
            token_ids = token_ids[:-1]
        return token_ids if end == self._pad and token_ids else [*token_ids, end]

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order.

        `failed` where the text has more tokens than the model reads, or the score is not finite: a model that
        cannot score an answer has not found it bad.
        """
        rows = [self.tokens(p.text + said) for p, said in zip(prompts, completions, strict=True)]
        readable = [row for row in rows if len(row) <= self.max_length]
        size = self._max_tokens // max(map(len, readable), default=1)
        scores = [
            score
            for first in range(0, len(readable), size)
            for score in row_scores(self.model, readable[first : first + size]).tolist()
        ]
        left = iter(scores)
        return [self._outcome(len(row), left) for row in rows]

    def close(self) -> None:
        """Nothing is held that must be given back."""

    def _outcome(self, num_tokens: int, left: Iterator[float]) -> Outcome:
        if num_tokens > self.max_length:
            return Outcome.failure(
                f"the text has {num_tokens} tokens, but the reward model reads at most {self.max_length}"
            )
        score = next(left)
        if not math.isfinite(score):
            return Outcome.failure(f"the reward model's score is {score}, which is not a finite number")
        return Outcome("score", score)


def load_reward_model(
    folder: str | Path, *, dtype: torch.dtype, device: torch.device | str, max_tokens: int
) -> RewardModel:
    """A reward from a folder that holds a sequence-classification model with one label, and its tokenizer.

    The folder is from `millrace reward-model` or transformers. `max_tokens` are those of one forward.

    Raises:
        ModelError: the model cannot be loaded; see `load_scalar_model`.
        DataError: the folder has no tokenizer that loads.
    """
    model = load_scalar_model(folder, dtype=dtype).to(device)
    return RewardModel(model, load_tokenizer(folder), max_tokens=max_tokens)
