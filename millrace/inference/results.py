"""Build a Completion from an ended request: text, stop strings, supports, prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from millrace.inference.request import Request
from millrace.types import Completion, Support, TopTokens

# Window of tokens decoded to find a stop string: so many for each of its characters, plus a margin. A token
# may be a part of a character, and the first token of a window may be cut.
WINDOW_TOKENS = 4
WINDOW_MARGIN = 16

# Converts tokens to text without special tokens.
Decode = Callable[[Sequence[int]], str]


def ends_in_stop(request: Request, token_ids: Sequence[int], decode: Decode) -> bool:
    """Return whether the text of these tokens contains a stop string; if so, store the text cut there."""
    stops = request.params.stop
    if len(token_ids) < request.params.min_tokens:
        return False
    reach = WINDOW_MARGIN + WINDOW_TOKENS * max(map(len, stops))
    if len(token_ids) > reach and first_stop(decode(token_ids[-reach:]), stops) is None:
        return False
    text = decode(token_ids)
    cut = first_stop(text, stops)
    if cut is not None:
        request.text = text[:cut]
    return cut is not None


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the index of the earliest stop string in `text`; None if it contains none."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def completion_of(
    request: Request, decode: Decode, texts: dict[tuple[int, ...], str], *, routed: tuple[int, int] | None
) -> Completion:
    """Build the completion of an ended request.

    `texts` is a cache of decoded token sequences; a new text is added to it. `routed` is (layers with a
    router, experts of a token) if completions record the experts of each token of prompt and completion; -1
    for tokens that were not computed.
    """
    assert request.finish_reason is not None
    token_ids = tuple(request.generated.tolist())
    if request.text is None and token_ids not in texts:
        texts[token_ids] = decode(token_ids)
    experts = None
    if routed is not None:
        experts = np.full((len(request.prompt) + len(token_ids), *routed), -1, np.int16)
        if request.experts is not None:
            experts[: len(request.experts)] = request.experts
    return Completion(
        token_ids=token_ids,
        logprobs=request.logprobs,
        versions=request.versions,
        finish_reason=request.finish_reason,
        text=texts[token_ids] if request.text is None else request.text,
        support=joined(request.supports),
        prompt_logprobs=np.concatenate(request.prompt_logprobs) if request.prompt_logprobs else None,
        prompt_top=_top_tokens(request.prompt_top),
        experts=experts,
        reason=request.reason,
    )


def _top_tokens(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> TopTokens | None:
    if not parts:
        return None
    token_ids, logprobs = zip(*parts, strict=True)
    return TopTokens(np.concatenate(token_ids), np.concatenate(logprobs))


def joined(supports: Sequence[tuple[np.ndarray, float]]) -> Support | None:
    """Concatenate the supports of a completion; each is (tokens, log-probability). None if there are none."""
    if not supports:
        return None
    token_ids, logprobs = zip(*supports, strict=True)
    counts = np.array([len(ids) for ids in token_ids], dtype=np.int32)
    return Support(np.concatenate(token_ids), counts, np.array(logprobs, dtype=np.float32))
