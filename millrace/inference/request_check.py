"""Whether an engine can serve a request, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.inference.request import check_lengths
from millrace.inference.sampler import check_vocabulary
from millrace.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """Raises ValueError for a request that an engine cannot serve; see `PagedEngine.check_request`.

    Attributes:
        max_length: tokens of prompt and completion together that the model allows.
        num_slots: tokens that the KV pool holds.
        vocab_size: of the model.
    """

    max_length: int
    num_slots: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any, num_slots: int) -> RequestCheck:
        """Return the check of an engine for a model with this config."""
        text = config.get_text_config()
        max_length = int(getattr(text, "max_position_embeddings", 0) or 1 << 31)
        return cls(max_length, num_slots, int(text.vocab_size))

    def __call__(
        self, prompt: Sequence[int], params: SamplingParams, partial_output: Completion | None = None
    ) -> None:
        """Check a request, and the partial completion that it is to continue."""
        check_lengths(prompt, params, max_length=self.max_length, num_slots=self.num_slots)
        check_vocabulary(params, self.vocab_size)
        known = () if partial_output is None else partial_output.token_ids
        if len(known) >= params.max_tokens:
            raise ValueError(
                f"{len(known)} tokens are generated and max_tokens is {params.max_tokens}; raise it"
            )
        outside = [token for token in (min(prompt), max(prompt), *known) if not 0 <= token < self.vocab_size]
        if outside:
            where = "the partial completion" if outside[0] in known else "the prompt"
            raise ValueError(f"{where} holds token {outside[0]}; the vocabulary has {self.vocab_size}")
