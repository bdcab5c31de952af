"""What vLLM and SGLang have in common: how an update is verified by log-probabilities."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from millrace.engines.http_client import HttpClient, ServerError
from millrace.transport.shared_memory import WeightManifest
from millrace.types import SamplingParams

if TYPE_CHECKING:
    from millrace.inference.engine import KvPolicy

# Least log-probability of a sampled token; vLLM writes this one for minus infinity.
LEAST_LOGPROB = -9999.0
# Largest difference between two computations of one log-probability, by dtype.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.35}
# Tokens of the prompt by which stale keys and values are found: more than a block of any server.
PREFIX_TOKENS = 300
# Parameters that change the log-probabilities of other servers and not millrace's.
_CHANGING = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "forbidden_token_ids",
    "logit_bias",
    "prompt_logprobs",
    "prompt_top_tokens",
)


class ExternalDialect(ABC):
    """A part of a `Dialect`: `verify`, by the log-probabilities of a prompt and of a token after it.

    `path` is that of requests to generate.
    """

    path: ClassVar[str]

    def __init__(
        self,
        client: HttpClient,
        *,
        timeout_s: float,
        load_s: float,
        kv: KvPolicy,
        longest: int,
        decode: Callable[[Sequence[int]], str],
        dtype: str,
    ) -> None:
        """Take a server's connections.

        Args:
            client: connections to the server.
            timeout_s: deadline for replies that need no computation.
            load_s: deadline for a weight update.
            kv: whether requests in flight recompute their keys and values after an update.
            longest: tokens of the longest sequence.
            decode: converts tokens to text without special tokens.
            dtype: of the weights.
        """
        self.client, self._timeout_s, self._load_s, self._kv = client, timeout_s, load_s, kv
        self._longest, self._decode, self._rounding = longest, decode, ROUNDING[dtype]
        self._place = f"POST {client.url}{self.path}"
        self._version, self._num_updates = -1, 0
        # The trainer's checksum of each weight of the last update.
        self._sent: dict[str, str] = {}
        # No other run uses the prefix cache of this one, whose updates have the same numbers.
        self._name = secrets.token_hex(6)
        self._probes = (f"probe-{self._name}-{number}" for number in itertools.count())

    @property
    def _salt(self) -> str:
        """Of the prefix cache since the last update."""
        return f"{self._name}-{self._num_updates}"

    def _check_names(self, manifest: WeightManifest) -> None:
        """Check that an update has the names of the last one, if there was one; ServerError otherwise."""
        if self._sent and (odd := sorted(self._sent.keys() ^ manifest["tensors"].keys())):
            raise ServerError(
                f"version {manifest['version']} has other weights than the last one; the first is {odd[0]}"
            )

    def _updated(self, manifest: WeightManifest) -> None:
        self._version, self._sent = manifest["version"], dict(manifest["fingerprint"])
        self._num_updates += 1

    async def verify(self, token_ids: Sequence[int]) -> list[float]:
        """See `Dialect`; it also compares a token from the prefix cache with one computed without it."""
        scores, _ = await asyncio.gather(self._scored(token_ids), self._check_prefix(token_ids))
        return scores

    async def _scored(self, prompt: Sequence[int]) -> list[float]:
        if len(prompt) >= self._longest:
            raise ServerError(
                f"{self.client.url} cannot score {len(prompt)} tokens of sequences of {self._longest}"
            )
        return await self._scores(prompt)

    async def _check_prefix(self, token_ids: Sequence[int]) -> None:
        """Check that the prefix cache of this version holds nothing of older weights.

        The same prompt was sent after the last update, so that a stale block would be found now.
        """
        prompt = list(itertools.islice(itertools.cycle(token_ids), min(PREFIX_TOKENS, self._longest - 2)))
        token, logprob, num_cached = await self._greedy(prompt)
        far = abs(logprob - (await self._scored([*prompt, token]))[-1])
        if not far <= self._rounding:
            raise ServerError(
                f"{self.client.url} uses keys and values of older weights after version {self._version} was "
                f"loaded: a log-probability from its prefix cache is {far:.2g} from the computed one"
            )
        if num_cached:
            raise ServerError(
                f"{self.client.url} took {num_cached} tokens from its prefix cache, which is of older "
                f"weights than version {self._version}"
            )

    @abstractmethod
    async def _scores(self, prompt: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, without the prefix cache."""

    @abstractmethod
    async def _greedy(self, prompt: Sequence[int]) -> tuple[int, float, int]:
        """Sample the likeliest token after a prompt, with the prefix cache.

        Returns:
            The token, its log-probability, and how many tokens the server reports to have found in the cache;
            0 if it reports none.
        """


def checked_logprobs(found: Sequence[tuple[Any, Any]], token_ids: Sequence[int], place: str) -> np.ndarray:
    """Return log-probabilities from pairs of a token and its own; ServerError unless each token has one."""
    if len(found) != len(token_ids):
        raise ServerError(f"{place} sent {len(token_ids)} tokens and {len(found)} log-probabilities")
    for (of, value), token in zip(found, token_ids, strict=True):
        if not isinstance(value, (int, float)) or not LEAST_LOGPROB < value < math.inf:
            raise ServerError(f"{place} sent a token without a finite log-probability")
        if of != token:
            raise ServerError(f"{place} sent the log-probability of another token")
    return np.array([value for _, value in found], np.float32)


def check_same_logprobs(params: SamplingParams, kind: str) -> None:
    """Raise ValueError for parameters with which another server's log-probabilities differ from millrace's.

    millrace's are those after the temperature alone.
    """
    default = SamplingParams()
    for name in _CHANGING:
        if getattr(params, name) != getattr(default, name):
            raise ValueError(f"{name} is not supported with engine.kind {kind}")
    if params.logprobs == "raw" and params.temperature != 1:
        raise ValueError(f"raw log-probabilities are not supported with engine.kind {kind}")


def truncates(params: SamplingParams) -> bool:
    """Return whether tokens are sampled from a part of the vocabulary."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
