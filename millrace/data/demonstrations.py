"""Demonstrations that SFT imitates, as tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from millrace.config.inputs import DataConfig
from millrace.data.rows import DataError
from millrace.data.streamed_prompts import StreamedPrompts
from millrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spans = tuple[tuple[int, ...], ...]


class Demonstrations:
    """The prompts whose demonstration fits, and the tokens of each demonstration.

    Attributes:
        prompts: in the given order; on disk where those given are.
        num_long: number of prompts left out because their demonstration is too long.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
    ) -> None:
        """Tokenize every demonstration; one of a prompt on disk is not held, but tokenized again when used.

        Args:
            prompts: to train on.
            config: `too_long` selects whether a demonstration that does not fit is left out.
            tokenizer: of the policy; its end of text ends every completion.
            max_tokens: of prompt and demonstration together.

        Raises:
            DataError: a prompt has no demonstration, one is too long and may not be left out, or none fits.
        """
        self._tokenizer = tokenizer
        self._held: dict[str, Spans] = {}
        streamed = isinstance(prompts, StreamedPrompts)
        kept = array("q")
        for place, prompt in enumerate(prompts):
            spans = self._encoded(prompt)
            length = len(prompt.token_ids) + sum(map(len, spans))
            if length <= max_tokens:
                kept.append(place)
                if not streamed:
                    self._held[prompt.id] = spans
            elif config.too_long == "refuse":
                raise DataError(
                    f"prompt {prompt.id} and its demonstration have {length} tokens and at most {max_tokens} "
                    "are allowed; shorten it, or set data.too_long to filter"
                )
        if not kept:
            raise DataError(
                f"no demonstration fits into {max_tokens} tokens together with its prompt; choose a model "
                "with more positions, or raise policy.tokens_per_micro_batch"
            )
        self.num_long = len(prompts) - len(kept)
        self.prompts: Sequence[Prompt] = (
            prompts.only(np.array(kept, np.int64))
            if isinstance(prompts, StreamedPrompts)
            else [prompts[place] for place in kept]
        )

    def tokens(self, prompt: Prompt) -> Spans:
        """Return the tokens of a demonstration, as `packing.pack_demonstrations` continues its prompt.

        That is the completion, its end of text included; of an episode, completions and replies in turn.
        """
        held = self._held.get(prompt.id)
        return self._encoded(prompt) if held is None else held

    def _encoded(self, prompt: Prompt) -> Spans:
        if not prompt.demonstration:
            raise DataError(
                f"prompt {prompt.id} has no demonstration to imitate in SFT; set data.demonstration_column"
            )
        turns = prompt.demonstration
        texts = (turns,) if isinstance(turns, str) else turns
        tokenizer = self._tokenizer
        encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        # Completions have even places here.
        return tuple(
            (*ids, tokenizer.eos_token_id) if n % 2 == 0 else (*ids,) for n, ids in enumerate(encoded)
        )
