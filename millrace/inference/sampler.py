"""Batched sampling of tokens, with separate parameters for each request.

N = entries of a batch, R = rows of the table, M = entries that need more than a temperature, V = vocabulary.

The logits of an entry are processed in vLLM's order: add the bias; mask tokens that are not allowed, are
forbidden, or would stop before `min_tokens`; apply penalties (repetition, frequency, presence); divide by the
temperature; min-p; top-k; top-p of the rest. Then one uniform random number selects the token. It is a
function of the request's seed and the token's position alone. So a token does not depend on its batch, on
aborted requests, or on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.sampling import row_logprob, sample, truncate
from millrace.types import SamplingParams

History = Callable[[int], tuple[np.ndarray, np.ndarray]]

_NUMBERS = attrgetter("temperature", "top_k", "top_p", "min_p")
_TOKENS = attrgetter("stop_token_ids", "allowed_token_ids", "forbidden_token_ids", "logit_bias")
_PENALTIES = attrgetter("repetition_penalty", "presence_penalty", "frequency_penalty")
_OFF = _PENALTIES(SamplingParams())


def uniform(seed_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) for each (seed, position): two rounds of the SplitMix64 finaliser.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    with np.errstate(over="ignore"):
        mixed = _mix(
            _mix(seed_B.astype(np.uint64)) + position_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        )
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise a ValueError that names field and token if the parameters hold one outside the vocabulary."""
    for name, tokens in params.token_ids().items():
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(
                f"{name} holds the token {max(tokens)}; "
                f"the vocabulary has {vocab_size}, from 0 to {vocab_size - 1}"
            )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled token for each entry of a batch; meaningless where `finite_N` is not set.

    `finite_N` is False where logits hold NaN or plus infinity, or every token is masked. `logprob_N` is
    float32, under the model's full distribution, divided by the temperature or raw; see
    `SamplingParams.logprobs`. `support` has the tokens each entry was sampled from, int32, ascending; None
    for an entry without truncation or allowed tokens, and one None if no entry has a support. `within_N` is
    the log-probability renormalised over the support; `logprob_N` for an entry without one.
    """

    token_N: np.ndarray
    logprob_N: np.ndarray
    support: list[np.ndarray | None] | None
    finite_N: np.ndarray
    within_N: np.ndarray


@dataclass(frozen=True, slots=True)
class _Edits:
    """Changes to the logits before the temperature; requests with equal parameters share one object."""

    params: SamplingParams
    biased: Tensor
    bias: Tensor
    allowed: Tensor
    forbidden: Tensor
    stop: Tensor
    penalised: bool

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device) -> _Edits:
        def indices(tokens: Sequence[int]) -> Tensor:
            return torch.tensor(tokens, dtype=torch.int64, device=device)

        return cls(
            params,
            indices([token for token, _ in params.logit_bias]),
            torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float64, device=device),
            indices(params.allowed_token_ids),
            indices(params.forbidden_token_ids),
            indices(params.stop_token_ids),
            _PENALTIES(params) != _OFF,
        )

    def apply(self, logit_V: Tensor, position: int, history: Callable[[], tuple[np.ndarray, ...]]) -> None:
        """Edit the logits of one entry in place."""
        logit_V[self.biased] += self.bias.to(logit_V.dtype)
        if len(self.allowed):
            kept = logit_V[self.allowed]
            logit_V.fill_(-torch.inf)
            logit_V[self.allowed] = kept
        logit_V[self.forbidden] = -torch.inf
        if position < self.params.min_tokens:
            logit_V[self.stop] = -torch.inf
        if self.penalised:
            self._penalise(logit_V, *history())

    def _penalise(self, logit_V: Tensor, prompt: np.ndarray, generated: np.ndarray) -> None:
        params, device = self.params, logit_V.device
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, generated])).astype(np.int64)).to(device)
        logit = logit_V[seen]
        penalty = params.repetition_penalty
        logit_V[seen] = torch.where(logit > 0, logit / penalty, logit * penalty)
        again, count = np.unique(generated, return_counts=True)
        minus = params.frequency_penalty * count + params.presence_penalty
        logit_V[torch.from_numpy(again.astype(np.int64)).to(device)] -= torch.from_numpy(minus).to(logit_V)


class SamplingTable:
    """The sampling parameters of the running requests as columns, one row for each request."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature_R = np.ones(num_rows)
        self._top_k_R = np.zeros(num_rows, dtype=np.int64)
        self._top_p_R = np.ones(num_rows)
        self._min_p_R = np.zeros(num_rows)
        self._seed_R = np.zeros(num_rows, dtype=np.uint64)
        self._raw_R = np.zeros(num_rows, dtype=bool)
        self._truncates_R = np.zeros(num_rows, dtype=bool)
        self._limited_R = np.zeros(num_rows, dtype=bool)  # to allowed tokens
        # The logits are edited at positions below this.
        self._edited_R = np.zeros(num_rows, dtype=np.int64)
        self._edits: list[_Edits | None] = [None] * num_rows

    def put(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Fill rows; the edits of requests that differ only in their seed are built once.

        A token outside the vocabulary is a ValueError, and no row is changed.
        """
        known: dict[tuple[object, ...], tuple[_Edits | None, int]] = {}
        edits: list[_Edits | None] = []
        edited: list[int] = []
        for one in params:
            # The tuples live as long as `params`, so their addresses are a key of constant cost.
            key = (*map(id, _TOKENS(one)), _PENALTIES(one), one.min_tokens)
            if key not in known:
                known[key] = self._look_at(one)
            edit, below = known[key]
            edits.append(edit)
            edited.append(below)
        if not edits:
            return
        row_N = np.asarray(rows)
        temperature_N, top_k_N, top_p_N, min_p_N = np.array([_NUMBERS(one) for one in params], dtype=float).T
        self._temperature_R[row_N] = temperature_N
        self._top_k_R[row_N] = top_k_N
        self._top_p_R[row_N] = top_p_N
        self._min_p_R[row_N] = min_p_N
        self._truncates_R[row_N] = (temperature_N > 0) & ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0))
        self._seed_R[row_N] = np.array([one.seed & 0xFFFFFFFFFFFFFFFF for one in params], dtype=np.uint64)
        self._raw_R[row_N] = [one.logprobs == "raw" for one in params]
        self._limited_R[row_N] = [bool(one.allowed_token_ids) for one in params]
        self._edited_R[row_N] = edited
        for row, edit in zip(rows, edits, strict=True):
            self._edits[row] = edit

    def sample(
        self, logit_NV: Tensor, row_N: np.ndarray, position_N: np.ndarray, history: History
    ) -> SampledTokens:
        """Sample one token for each entry.

        Logits are float32 or float64, and not modified. `row_N` is the row of each entry's sampling
        parameters; a row may occur more than once. `position_N` is the index of the token within its
        completion. `history` returns (prompt, tokens generated so far) of the n-th entry; it is called only
        for penalties.
        """
        temperature_N = self._column(self._temperature_R, row_N)
        uniform_N = torch.from_numpy(uniform(self._seed_R[row_N], position_N)).to(self._device)
        edited_N, truncated_N = position_N < self._edited_R[row_N], self._truncates_R[row_N]
        sampled_NV = logit_NV
        if edited_N.any() or truncated_N.any():
            sampled_NV = logit_NV.clone(memory_format=torch.contiguous_format)
            for n in np.flatnonzero(edited_N).tolist():
                edits = self._edits[row_N[n]]
                assert edits is not None
                edits.apply(sampled_NV[n], int(position_N[n]), partial(history, n))
            self._truncate(sampled_NV, row_N, np.flatnonzero(truncated_N))
        token_N, among_N = sample(sampled_NV, temperature_N, uniform_N)
        raw_N, logprob_N, within_N = self._raw_R[row_N], among_N, among_N
        support = None
        if sampled_NV is not logit_NV or raw_N.any():
            judged_N = temperature_N.masked_fill(torch.from_numpy(raw_N).to(self._device), 1)
            within_N = logprob_N = row_logprob(logit_NV, token_N, judged_N)
            limited_N = truncated_N | self._limited_R[row_N]
            if limited_N.any():
                support = _supports(sampled_NV, limited_N)
                # `among_N` comes from edited and tempered logits. Entries with edits or raw log-probabilities
                # are computed again over the same support.
                again_M = self._indices(limited_N & (edited_N | raw_N))
                ruled_out_MV = sampled_NV[again_M] == -torch.inf
                within_MV = logit_NV[again_M].masked_fill(ruled_out_MV, -torch.inf)
                within_M = row_logprob(within_MV, token_N[again_M], judged_N[again_M])
                within_N = torch.where(torch.from_numpy(limited_N).to(self._device), among_N, logprob_N)
                within_N = within_N.index_copy(0, again_M, within_M)
        finite_N = among_N.isfinite() & logprob_N.isfinite()
        columns = (token_N, logprob_N.float(), finite_N, within_N.float())
        token, logprob, finite, within = (column_N.cpu().numpy() for column_N in columns)
        return SampledTokens(token, logprob, support, finite, within)

    def _column(self, column_R: np.ndarray, row_N: np.ndarray) -> Tensor:
        return torch.from_numpy(column_R[row_N]).to(self._device)

    def _indices(self, true_N: np.ndarray) -> Tensor:
        return torch.from_numpy(np.flatnonzero(true_N)).to(self._device)

    def _look_at(self, params: SamplingParams) -> tuple[_Edits | None, int]:
        """The edits of a request, and the first position without edits."""
        check_vocabulary(params, self._vocab_size)
        always = params.allowed_token_ids or params.forbidden_token_ids or params.logit_bias
        if always or _PENALTIES(params) != _OFF:
            return _Edits.of(params, self._device), np.iinfo(np.int64).max
        if params.min_tokens and params.stop_token_ids:
            return _Edits.of(params, self._device), params.min_tokens
        return None, 0

    def _truncate(self, logit_NV: Tensor, row_N: np.ndarray, chosen_M: np.ndarray) -> None:
        """Mask tokens by top-k, top-p and min-p, in place, for some of the entries."""
        if len(chosen_M) == 0:
            return
        index_M = torch.from_numpy(chosen_M).to(self._device)
        whole = len(chosen_M) == len(logit_NV)  # spares two copies
        logit_MV = logit_NV if whole else logit_NV[index_M]
        truncate(
            logit_MV,
            self._column(self._temperature_R, row_N[chosen_M]),
            top_k_N=self._column(self._top_k_R, row_N[chosen_M]),
            top_p_N=self._column(self._top_p_R, row_N[chosen_M]),
            min_p_N=self._column(self._min_p_R, row_N[chosen_M]),
        )
        if not whole:
            logit_NV[index_M] = logit_MV


def _supports(logit_NV: Tensor, chosen_N: np.ndarray) -> list[np.ndarray | None]:
    kept_NV = (logit_NV > -torch.inf).cpu().numpy()
    return [
        np.flatnonzero(kept_V).astype(np.int32) if chosen else None
        for chosen, kept_V in zip(chosen_N.tolist(), kept_NV, strict=True)
    ]
