"""Build a Completion from an ended request: text, stop strings, supports, prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.inference.request import Request
from millrace.types import Completion, Support

# Window of tokens decoded to find a stop string: so many for each of its characters, plus a margin. A token
# may be a part of a character, and the first token of a window may be cut.
WINDOW_TOKENS = 4
WINDOW_MARGIN = 16


@dataclass(slots=True)
class _Extra:
    """Outputs that only some requests have."""

    text: str | None = None
    supports: list[tuple[np.ndarray, float]] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)


class Results:
    """Outputs of requests besides their tokens, stored until the completion is built.

    `decode` converts tokens to text without special tokens; `routed` is (layers with a router, experts of a
    token) if completions record routing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], routed: tuple[int, int] | None = None) -> None:
        self._decode, self._routed = decode, routed
        self._extras: dict[str, _Extra] = {}

    def resume(self, request: Request, partial_output: Completion) -> None:
        """Take over the supports of a partial completion, for a request that resumes it."""
        if partial_output.support is not None:
            ends = np.cumsum(partial_output.support.counts)[:-1]
            tokens = np.split(partial_output.support.token_ids, ends)
            self._extra(request).supports = list(
                zip(tokens, partial_output.support.logprobs.tolist(), strict=True)
            )

    def add_support(self, request: Request, token_ids: np.ndarray, logprob: float) -> None:
        """Store the support that a token was sampled from, and its log-probability within it."""
        self._extra(request).supports.append((token_ids, logprob))

    def add_prompt_logprobs(self, request: Request, logprob_N: np.ndarray) -> None:
        """Append the log-probabilities of the next prompt tokens."""
        self._extra(request).prompt_logprobs.append(logprob_N)

    def num_prompt_logprobs(self, request: Request) -> int:
        """Return the number of prompt log-probabilities stored so far."""
        return sum(len(part) for part in self._extra(request).prompt_logprobs)

    def ends_in_stop(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Return whether the text of these tokens contains a stop string; if so, store the text cut there."""
        stops = request.params.stop
        if len(token_ids) < request.params.min_tokens:
            return False
        reach = WINDOW_MARGIN + WINDOW_TOKENS * max(map(len, stops))
        if len(token_ids) > reach and first_stop(self._decode(token_ids[-reach:]), stops) is None:
            return False
        text = self._decode(token_ids)
        cut = first_stop(text, stops)
        if cut is not None:
            self._extra(request).text = text[:cut]
        return cut is not None

    def completion(self, request: Request, texts: dict[tuple[int, ...], str]) -> Completion:
        """Build the completion of an ended request and delete its stored outputs.

        `texts` is a cache of decoded token sequences; a new text is added to it.
        """
        assert request.finish_reason is not None
        extra = self._extras.pop(request.id, None) or _Extra()
        token_ids = tuple(request.generated.tolist())
        if extra.text is None and token_ids not in texts:
            texts[token_ids] = self._decode(token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=request.logprobs,
            versions=request.versions,
            finish_reason=request.finish_reason,
            text=texts[token_ids] if extra.text is None else extra.text,
            support=joined(extra.supports),
            prompt_logprobs=np.concatenate(extra.prompt_logprobs) if extra.prompt_logprobs else None,
            experts=self._experts(request),
            reason=request.reason,
        )

    def _experts(self, request: Request) -> np.ndarray | None:
        """The experts of each token of prompt and completion; -1 for tokens that were not computed."""
        if self._routed is None:
            return None
        experts = np.full((len(request.prompt) + len(request.generated), *self._routed), -1, np.int16)
        if request.experts is not None:
            experts[: len(request.experts)] = request.experts
        return experts

    def _extra(self, request: Request) -> _Extra:
        return self._extras.setdefault(request.id, _Extra())


def joined(supports: Sequence[tuple[np.ndarray, float]]) -> Support | None:
    """Concatenate the supports of a completion; each is (tokens, log-probability). None if there are none."""
    if not supports:
        return None
    token_ids, logprobs = zip(*supports, strict=True)
    counts = np.array([len(ids) for ids in token_ids], dtype=np.int32)
    return Support(np.concatenate(token_ids), counts, np.array(logprobs, dtype=np.float32))


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the index of the earliest stop string in `text`; None if it contains none."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)
