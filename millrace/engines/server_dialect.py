"""What a worker needs of an inference server, whatever its HTTP interface; and checks of its replies."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, cast, get_args

import numpy as np

from millrace.engines.http_client import HttpClient, ServerError
from millrace.inference.request import FinishReason
from millrace.inference.results import first_stop
from millrace.transport.shared_memory import WeightManifest
from millrace.types import Completion, SamplingParams, Support

T = TypeVar("T")
# Metrics that grow while a server works; our server has vLLM's names. Those of SGLang grow at each step.
PROGRESS = re.compile(
    r"^(?:vllm:(?:prompt_tokens|generation_tokens|request_success)|sglang:(?:realtime_tokens|num_requests))"
    r"_total(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


class Dialect(Protocol):
    """The HTTP interface of one kind of server. Every method raises ServerError if the server fails it.

    Attributes:
        client: its connections.
    """

    client: HttpClient

    async def probe(self, token_ids: Sequence[int], text: str | None) -> None:
        """Check that the server has the right model, tokenizer and options.

        Args:
            token_ids: tokens of the policy.
            text: what the policy's tokenizer decodes them to, special tokens included; None to skip that.

        Raises:
            ServerError: something is missing; the message names the option of the server that brings it.
        """
        ...

    async def generate(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; an aborted one has its tokens so far.

        Raises:
            ValueError: the server refuses the request.
        """
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort requests by id, whose `generate` then returns; ignore those that have ended."""
        ...

    def weights_at(
        self, weights: int, manifest: WeightManifest, folder: str
    ) -> AbstractAsyncContextManager[str]:
        """Yield the path from which the server loads the weights; see `weight_files`.

        Args:
            weights: descriptor of the trainer's shared memory.
            manifest: from `SharedWeights.write`.
            folder: that trainer and server share; empty for this machine's memory.
        """
        ...

    async def update_weights(self, path: str, manifest: WeightManifest) -> None:
        """Load all weights from `weights_at` between two tokens of the requests, and verify them."""
        ...

    async def version(self) -> int:
        """Return the policy version that the server reports."""
        ...

    async def verify(self, token_ids: Sequence[int]) -> list[float]:
        """Verify what an update may leave stale; return log-probabilities of the canary's tokens.

        Returns:
            The log-probability of each token but the first, at temperature 1.
        """
        ...


async def progress(client: HttpClient, timeout_s: float) -> float:
    """Return a number that grows while the server works."""
    text = await client.get_text("/metrics", timeout_s=timeout_s)
    found = PROGRESS.findall(text)
    if not found:
        raise ServerError(
            f"GET {client.url}/metrics has neither vllm:generation_tokens_total nor "
            "sglang:realtime_tokens_total; is it the server?"
        )
    return float(sum(map(float, found)))


def field(reply: Any, name: str, kind: type[T], place: str) -> T:
    """Return a field of a reply; ServerError if it is missing or of another type."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(value, kind):
        raise ServerError(f"the reply of {place} has no {name}, or one that is no {kind.__name__}")
    return value


def finish_reason(reply: Any, place: str) -> FinishReason:
    """Return how a completion ended; ServerError if it is not known."""
    reason = field(reply, "finish_reason", str, place)
    for known in get_args(FinishReason):
        if reason == known:
            return cast("FinishReason", known)
    raise ServerError(f"{place} sent the finish reason {reason!r}, which is unknown")


def numbers(values: Any, count: int, what: str, place: str) -> np.ndarray:
    """Convert a JSON list of `count` numbers to float32; ServerError if one is missing or no number.

    A log-probability that is not finite is null in JSON.
    """
    if not isinstance(values, list) or len(values) != count:
        length = len(values) if isinstance(values, list) else "no"
        raise ServerError(f"{place} sent {count} tokens and {length} {what}")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ServerError(f"{place} sent a token without a finite one of its {what}")
    return np.array(values, np.float32)


def tokens(values: Any, place: str) -> tuple[int, ...]:
    """Convert a JSON list to token ids; ServerError if it is none."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ServerError(f"{place} sent a completion that is no list of token ids")
    return tuple(values)


def versions_of(spans: Any, count: int, place: str) -> np.ndarray:
    """Return the policy version of each token from spans of tokens; ServerError if a token has none."""
    versions = np.full(count, -1, np.int32)
    for span in spans or []:
        try:
            versions[span["start"] : span["end"]] = int(span["version"])
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{place} sent the weight versions {spans!r}, which are no numbers") from None
    if (versions < 0).any():
        raise ServerError(f"{place} sent a token without its weight version")
    return versions


def check_end(completion: Completion, params: SamplingParams, place: str) -> Completion:
    """Return a completion whose end agrees with its tokens; ServerError otherwise."""
    count, reason = len(completion.token_ids), completion.finish_reason
    if count > params.max_tokens:
        raise ServerError(f"{place} sent {count} tokens, and at most {params.max_tokens} were requested")
    if reason == "length" and count < params.max_tokens:
        raise ServerError(
            f"{place} ended a completion for its length after {count} tokens, and {params.max_tokens} were "
            "requested; is the server's longest sequence (--max-model-len, --context-length), or its cache, "
            "shorter than the recipe's?"
        )
    if (
        reason == "stop"
        and not params.stop
        and completion.token_ids[-1:] not in [(token,) for token in params.stop_token_ids]
    ):
        raise ServerError(f"{place} ended a completion with a stop token that it does not hold")
    return completion


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    at = first_stop(text, stops) if stops else None
    return text if at is None else text[:at]


def remaining(params: SamplingParams, num_tokens: int) -> dict[str, Any]:
    """Return the fields of `params` that change for a completion that goes on after `num_tokens` tokens.

    The server counts positions from the first new token, so that the seed must be another one: with the same
    random numbers, the new tokens would depend on the earlier ones.
    """
    if params.presence_penalty or params.frequency_penalty:
        raise ValueError(
            "presence_penalty and frequency_penalty of a partial completion are not supported by a server"
        )
    seed = hashlib.blake2b(f"{params.seed}:{num_tokens}".encode(), digest_size=8).digest()
    return {
        "max_tokens": params.max_tokens - num_tokens,
        "min_tokens": max(0, params.min_tokens - num_tokens),
        "seed": int.from_bytes(seed, "little"),
    }


def joined(
    partial: Completion, rest: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Completion:
    """Return the completion of a partial one and of the tokens that follow.

    A stop string may begin in the first and end in the second, which only this end can see.
    """
    token_ids, end = partial.token_ids + rest.token_ids, len(partial.token_ids) + len(rest.token_ids)
    reason = rest.finish_reason
    for count in range(len(partial.token_ids) + 1, end) if stops else ():
        if first_stop(decode(token_ids[:count]), stops) is not None:
            end, reason = count, "stop"
            break
    supports = [one.support for one in (partial, rest) if one.support is not None]
    return Completion(
        token_ids[:end],
        np.concatenate([partial.logprobs, rest.logprobs])[:end],
        np.concatenate([partial.versions, rest.versions])[:end],
        reason,
        cut_text(decode(token_ids[:end]), stops),
        support=_first(supports, end) if supports else None,
        reason=rest.reason,
    )


def _first(supports: Sequence[Support], count: int) -> Support:
    """Return the candidates of the first `count` tokens of several supports."""
    whole = Support.joined(supports)
    counts = whole.counts[:count]
    return Support(whole.token_ids[: int(counts.sum())], counts, whole.logprobs[:count])
