"""A request, and the table of the running requests, stored as columns. No torch.

R = rows, one for each request that may run at once, L = tokens of the longest running request, rounded up,
C = blocks of it, S = stop tokens of the request that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from millrace.inference.block_manager import check_positive
from millrace.types import Completion, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_PRIORITY = 1_000_000_000
# Returns `Request.experts` of a row of the table.
ExpertsOf: TypeAlias = "Callable[[RequestTable, int], np.ndarray]"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its sampling parameters, and its result.

    Requests run in the order of (priority, arrival), the number of requests added before; -1 until added.
    `row` is that of the table while the request runs, else -1; the generated tokens, with log-probability and
    policy version of each, are valid while it has none. `experts`, int16 [m, L, K], are those of the m
    computed tokens in layers with a router, stored when it last left its row; None if they are not recorded.
    `reason` has details for aborts and errors.

    `text` is that of the completion, cut at a stop string, if one was found. `supports` has (tokens,
    log-probability) of each token sampled from a support, `prompt_logprobs` the prompt's so far, in pieces,
    `prompt_top` (tokens, log-probabilities) of the most likely tokens at the same places.

    A priority beyond MAX_PRIORITY, either way, is a ValueError.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    row: int = -1
    arrival: int = -1
    generated: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    experts: np.ndarray | None = None
    text: str | None = None
    supports: list[tuple[np.ndarray, float]] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)
    prompt_top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority is {self.priority}; it must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            )

    @property
    def is_special(self) -> bool:
        """Whether it needs work in every step: stop strings or prompt log-probabilities."""
        return bool(self.params.stop) or self.params.prompt_logprobs

    def resume(self, partial_output: Completion) -> None:
        """Continue a partial completion, like a preempted request."""
        self.generated = np.array(partial_output.token_ids, np.int32)
        self.logprobs, self.versions = partial_output.logprobs, partial_output.versions
        if partial_output.support is not None:
            ends = np.cumsum(partial_output.support.counts)[:-1]
            tokens = np.split(partial_output.support.token_ids, ends)
            self.supports = list(zip(tokens, partial_output.support.logprobs.tolist(), strict=True))

    def known_tokens(self) -> np.ndarray:
        """Return prompt and generated tokens of a request without a row, int32."""
        prompt = np.array(self.prompt, dtype=np.int32)
        return np.concatenate((prompt, self.generated)) if len(self.generated) else prompt


class RequestTable:
    """Columns of the running requests; a row is meaningful where `used_R` is set.

    Arrays that grow are replaced by longer ones: read them from the table in each step. Without a row, or
    with blocks of no size, it raises a ValueError.

    Attributes:
        token_RL: int32, prompt tokens, then generated tokens.
        logprob_RL: float32, log-probability of each generated token, at the token's position.
        version_RL: int32, policy version of each generated token.
        num_prompt_R: int64, tokens of the prompt.
        num_tokens_R: int64, known tokens: prompt and generated.
        num_computed_R: int64, tokens with keys and values in the pool.
        limit_R: int64, total tokens at which the request ends.
        min_R: int64, total tokens below which no stop token ends it.
        stop_RS: int32, stop tokens, padded with -1.
        block_RC: int32, the block table, of which `num_blocks_R` entries are used.
        forked_R: bool, whether the next block written may be shared, so that it needs copy on write.
        num_hashed_R: int64, blocks that are in the prefix cache, found there or added.
        digests: digest of the last of these blocks.
        caches_R: bool, whether full blocks are added to the prefix cache.
        free_rows: stack of free rows; the last is used first.
    """

    def __init__(self, num_rows: int, block_size: int, experts_of: ExpertsOf | None = None) -> None:
        """Create an empty table; `experts_of` returns `Request.experts` of a row, None without them."""
        check_positive(num_rows=num_rows, block_size=block_size)
        self._block_size = block_size
        self.requests: list[Request | None] = [None] * num_rows
        self.digests: list[bytes] = [b""] * num_rows
        self.free_rows = list(range(num_rows))[::-1]
        self._experts_of = experts_of
        self.used_R, self.forked_R, self.caches_R = (np.zeros(num_rows, bool) for _ in range(3))
        self.num_prompt_R, self.num_tokens_R, self.num_computed_R = self._counts(3)
        self.limit_R, self.min_R, self.num_blocks_R, self.num_hashed_R = self._counts(4)
        self.priority_R, self.arrival_R = self._counts(2)
        self.stop_RS = np.full((num_rows, 1), -1, np.int32)
        self.token_RL, self.version_RL = (np.zeros((num_rows, block_size), np.int32) for _ in range(2))
        self.logprob_RL = np.zeros((num_rows, block_size), np.float32)
        self.block_RC = np.zeros((num_rows, 1), np.int32)

    def _counts(self, num: int) -> list[np.ndarray]:
        return [np.zeros(len(self.requests), np.int64) for _ in range(num)]

    def request(self, row: int) -> Request:
        """Return the request of a used row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def put(self, rows: Sequence[int], requests: Sequence[Request], known: Sequence[np.ndarray]) -> None:
        """Fill rows taken from `free_rows` with requests, without computed tokens and without blocks.

        `known` are the tokens of each request, from `Request.known_tokens`.
        """
        if not rows:
            return
        self.reserve(max(map(len, known)))
        lengths = [len(request.prompt) for request in requests]
        self.num_prompt_R[rows] = lengths
        self.num_tokens_R[rows] = [len(tokens) for tokens in known]
        self.limit_R[rows] = [n + r.params.max_tokens for n, r in zip(lengths, requests, strict=True)]
        self.min_R[rows] = [n + r.params.min_tokens for n, r in zip(lengths, requests, strict=True)]
        self.priority_R[rows] = [request.priority for request in requests]
        self.arrival_R[rows] = [request.arrival for request in requests]
        for column in (self.num_computed_R, self.num_blocks_R, self.num_hashed_R, self.forked_R):
            column[rows] = 0
        self.used_R[rows] = True
        stops: dict[tuple[int, ...], list[int]] = {}
        for row, request, tokens in zip(rows, requests, known, strict=True):
            self.requests[row] = request
            request.row = row
            self.token_RL[row, : len(tokens)] = tokens
            stops.setdefault(request.params.stop_token_ids, []).append(row)
            if len(request.generated):
                generated = slice(len(request.prompt), len(tokens))
                self.logprob_RL[row, generated] = request.logprobs
                self.version_RL[row, generated] = request.versions
        for stop, places in stops.items():
            missing = len(stop) - self.stop_RS.shape[1]
            if missing > 0:
                self.stop_RS = np.pad(self.stop_RS, ((0, 0), (0, missing)), constant_values=-1)
            self.stop_RS[places] = -1
            self.stop_RS[places, : len(stop)] = stop

    def take(self, row: int) -> Request:
        """Free a row, copy its generated tokens into its request, and return the request.

        A free row is a ValueError.
        """
        request = self.requests[row]
        if request is None:
            raise ValueError(f"row {row} is free already")
        generated = slice(len(request.prompt), self.num_tokens_R[row])
        request.generated = self.token_RL[row, generated].copy()
        request.logprobs = self.logprob_RL[row, generated].copy()
        request.versions = self.version_RL[row, generated].copy()
        if self._experts_of is not None:
            request.experts = self._experts_of(self, row)
        request.row = -1
        self.requests[row] = None
        self.used_R[row] = False
        self.free_rows.append(row)
        return request

    def generated(self, request: Request, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a request's generated tokens, log-probabilities and versions, from index `first` on."""
        row = request.row
        if row < 0:
            return request.generated[first:], request.logprobs[first:], request.versions[first:]
        part = slice(len(request.prompt) + first, int(self.num_tokens_R[row]))
        columns = (self.token_RL, self.logprob_RL, self.version_RL)
        token_L, logprob_L, version_L = (column[row, part].copy() for column in columns)
        return token_L, logprob_L, version_L

    def share(self, row: int, followers: Sequence[int]) -> None:
        """Copy a row's block table, computed count and prefix-cache state to other rows."""
        held = slice(self.num_blocks_R[row])
        self.block_RC[followers, held] = self.block_RC[row, held]
        for column in (self.num_blocks_R, self.num_computed_R, self.num_hashed_R):
            column[followers] = column[row]
        for follower in followers:
            self.digests[follower] = self.digests[row]

    def blocks(self, row: int) -> list[int]:
        """Return the blocks of a row, in the order of their tokens."""
        held: list[int] = self.block_RC[row, : self.num_blocks_R[row]].tolist()
        return held

    def reserve(self, num_tokens: int) -> None:
        """Grow the columns to at least `num_tokens`; arrays that are too short at least double."""
        length = self.token_RL.shape[1]
        if num_tokens <= length:
            return
        num_blocks = -(-max(num_tokens, 2 * length) // self._block_size)
        # Only used rows are copied, so the memory of free rows is never touched.
        used = self.used_R.nonzero()[0]
        for name in ("token_RL", "logprob_RL", "version_RL", "block_RC"):
            old = getattr(self, name)
            width = num_blocks if name == "block_RC" else num_blocks * self._block_size
            new = np.zeros((len(old), width), old.dtype)
            new[used, : old.shape[1]] = old[used]
            setattr(self, name, new)


def check_lengths(prompt: Sequence[int], params: SamplingParams, *, max_length: int, num_slots: int) -> None:
    """Raise for a request that could never finish.

    Raises:
        ValueError: the prompt is empty, or with `max_tokens` longer than `max_length`, which the model
            allows, or than the `num_slots` of the KV pool.
    """
    if not len(prompt):
        raise ValueError("the prompt is empty; a completion needs at least one token to follow")
    lengths = f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}"
    total = len(prompt) + params.max_tokens
    if total > max_length:
        raise ValueError(
            f"{lengths}; the model allows {max_length} in all: shorten the prompt or lower max_tokens"
        )
    if total > num_slots:
        raise ValueError(
            f"{lengths}; the whole KV pool holds {num_slots}: make the pool larger, shorten the prompt or "
            "lower max_tokens"
        )
