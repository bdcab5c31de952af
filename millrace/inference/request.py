"""One request, and the columns in which the running requests live. No torch.

R = rows, one for each request that may run at once, L = tokens of the longest running request, rounded up,
C = blocks of it, S = stop tokens of the request that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from millrace.types import Completion, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_PRIORITY = 1_000_000_000


def _no_tokens() -> np.ndarray:
    return np.empty(0, np.int32)


def _no_logprobs() -> np.ndarray:
    return np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to be continued, and what became of it.

    Attributes:
        id: the caller's name for it.
        prompt: its tokens.
        params: how it is drawn.
        priority: lower goes first; of equals, who came first.
        row: its place in the table while it runs, else -1.
        arrival: how many requests had been added before it; -1 until it is added.
        drawn: int32 [n], the tokens drawn, while it has no row.
        logprobs: float32 [n], of these tokens.
        versions: int32 [n], the weight version that drew each.
        experts: int16 [m, L, K], where the m tokens were sent that were computed when it last gave up its
            row, in layers with a router; None where nobody asks.
        finish_reason: why it ended; None until it does.
        reason: more words on that, for aborts and errors.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    row: int = -1
    arrival: int = -1
    drawn: np.ndarray = field(default_factory=_no_tokens)
    logprobs: np.ndarray = field(default_factory=_no_logprobs)
    versions: np.ndarray = field(default_factory=_no_tokens)
    experts: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse a priority that no column holds.

        Raises:
            ValueError: it is further from 0 than MAX_PRIORITY.
        """
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority is {self.priority}; it must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            )

    @property
    def is_special(self) -> bool:
        """Whether it must be looked at in every step: its text, or its prompt's log-probabilities."""
        return bool(self.params.stop) or self.params.prompt_logprobs

    def go_on(self, drawn: Completion) -> None:
        """Begin with what was drawn before, as one that was preempted."""
        self.drawn = np.array(drawn.token_ids, np.int32)
        self.logprobs, self.versions = drawn.logprobs, drawn.versions

    def known_tokens(self) -> np.ndarray:
        """Prompt and drawn tokens of a request without a row, int32."""
        prompt = np.array(self.prompt, dtype=np.int32)
        return np.concatenate((prompt, self.drawn)) if len(self.drawn) else prompt


class RequestTable:
    """Columns of the running requests; a row is meaningful where `used_R` is set.

    Arrays that grow are replaced by longer ones: read them from the table in each step.

    Attributes:
        requests: who has the row.
        used_R: bool, whether anybody does.
        token_RL: int32, prompt, then drawn tokens.
        logprob_RL: float32, of drawn tokens, at the token's place.
        version_RL: int32, the weight version that drew them.
        num_prompt_R: int64, tokens of the prompt.
        num_tokens_R: int64, tokens known: prompt and drawn.
        num_computed_R: int64, tokens whose keys and values are in the pool.
        limit_R: int64, tokens at which the request ends.
        min_R: int64, tokens below which no stop token ends it.
        stop_RS: int32, stop tokens, padded with -1.
        priority_R: int64, as in the request.
        arrival_R: int64, as in the request.
        block_RC: int32, the block table.
        num_blocks_R: int64, entries of it that are held.
        forked_R: bool, whether the block it writes to next may have other holders.
        num_hashed_R: int64, blocks that were handed to the prefix cache (or came from it).
        digests: of the last of these blocks.
        caches_R: bool, whether full blocks are handed to the prefix cache.
        free_rows: rows nobody has; the last goes first.
        experts_of: what `Request.experts` is for a row; None where nobody asks.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        """Empty columns.

        Raises:
            ValueError: a number is below 1.
        """
        for name, value in (("num_rows", num_rows), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._block_size = block_size
        self.requests: list[Request | None] = [None] * num_rows
        self.digests: list[bytes] = [b""] * num_rows
        self.free_rows = list(range(num_rows))[::-1]
        self.experts_of: Callable[[int], np.ndarray] | None = None
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
        """Who has this row; somebody does."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def put(self, rows: Sequence[int], requests: Sequence[Request], known: Sequence[np.ndarray]) -> None:
        """Give rows to requests, with nothing computed and no blocks yet.

        Args:
            rows: taken from `free_rows`.
            requests: one for each row.
            known: tokens of each, as `Request.known_tokens` gives them.
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
            if len(request.drawn):
                drawn = slice(len(request.prompt), len(tokens))
                self.logprob_RL[row, drawn] = request.logprobs
                self.version_RL[row, drawn] = request.versions
        for stop, places in stops.items():
            missing = len(stop) - self.stop_RS.shape[1]
            if missing > 0:
                self.stop_RS = np.pad(self.stop_RS, ((0, 0), (0, missing)), constant_values=-1)
            self.stop_RS[places] = -1
            self.stop_RS[places, : len(stop)] = stop

    def take(self, row: int) -> Request:
        """Free a row; what its request has drawn moves into the request, which is given back.

        Raises:
            ValueError: nobody has the row.
        """
        request = self.requests[row]
        if request is None:
            raise ValueError(f"row {row} is free already")
        drawn = slice(len(request.prompt), self.num_tokens_R[row])
        request.drawn = self.token_RL[row, drawn].copy()
        request.logprobs = self.logprob_RL[row, drawn].copy()
        request.versions = self.version_RL[row, drawn].copy()
        if self.experts_of is not None:
            request.experts = self.experts_of(row)
        request.row = -1
        self.requests[row] = None
        self.used_R[row] = False
        self.free_rows.append(row)
        return request

    def drawn(self, request: Request, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, log-probabilities and versions that a request drew, from the one numbered `first` on."""
        row = request.row
        if row < 0:
            return request.drawn[first:], request.logprobs[first:], request.versions[first:]
        part = slice(len(request.prompt) + first, int(self.num_tokens_R[row]))
        columns = (self.token_RL, self.logprob_RL, self.version_RL)
        token_L, logprob_L, version_L = (column[row, part].copy() for column in columns)
        return token_L, logprob_L, version_L

    def share(self, row: int, heirs: Sequence[int]) -> None:
        """Let other rows stand where this one stands: its blocks, what is computed, what is hashed."""
        held = slice(self.num_blocks_R[row])
        self.block_RC[heirs, held] = self.block_RC[row, held]
        for column in (self.num_blocks_R, self.num_computed_R, self.num_hashed_R):
            column[heirs] = column[row]
        for heir in heirs:
            self.digests[heir] = self.digests[row]

    def blocks(self, row: int) -> list[int]:
        """The blocks that a row holds, in the order of their tokens."""
        held: list[int] = self.block_RC[row, : self.num_blocks_R[row]].tolist()
        return held

    def reserve(self, num_tokens: int) -> None:
        """Make room for requests of so many tokens; arrays that are too short at least double."""
        length = self.token_RL.shape[1]
        if num_tokens <= length:
            return
        num_blocks = -(-max(num_tokens, 2 * length) // self._block_size)
        # Of rows nobody has nothing is copied, so that their memory is never touched.
        used = self.used_R.nonzero()[0]
        for name in ("token_RL", "logprob_RL", "version_RL", "block_RC"):
            old = getattr(self, name)
            width = num_blocks if name == "block_RC" else num_blocks * self._block_size
            new = np.zeros((len(old), width), old.dtype)
            new[used, : old.shape[1]] = old[used]
            setattr(self, name, new)
