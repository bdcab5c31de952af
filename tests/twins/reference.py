"""The reference engine: the trainer's module, a dense cache, no cleverness. The slow twin of every engine.

T = packed tokens, B = rows being decoded, V = vocabulary, D = model width, L = layers with a router,
K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millrace.inference.canary_logprobs import sampler_logprobs
from millrace.inference.results import first_stop, joined
from millrace.inference.sampler import SampledTokens, SamplingTable, check_vocabulary
from millrace.inference.weight_loading import load_in_place
from millrace.kernels.packed_attention import Segments
from millrace.kernels.token_logprob import token_logprob
from millrace.models.attention import Context, Packed
from millrace.models.facts import facts_of
from millrace.models.load import Model, named_weights
from millrace.models.logprobs import hidden_states, output_head
from millrace.models.routing import Routers
from millrace.transport.fingerprint import fingerprint
from millrace.types import Completion, SamplingParams
from tests.twins.dense_cache import Decode, DenseCache, Prefill


@dataclass(slots=True)
class _Request:
    """One completion in the making."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[tuple[np.ndarray, float]] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    experts: list[np.ndarray] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "error"] | None = None
    reason: str = ""
    text: str | None = None


class ReferenceEngine:
    """Batched sampling over the trainer's own module with a plain KV cache.

    Requests are taken in waves that fit `max_cache_tokens`; equal prompts of a wave are prefilled once. Rows
    that are done leave the batch when half of it is done.
    """

    def __init__(
        self,
        model: Model,
        decode: Callable[[Sequence[int]], str],
        *,
        max_cache_tokens: int = 262_144,
        max_prefill_tokens: int = 16_384,
        record_experts: bool = False,
    ) -> None:
        """An engine at version 0 over `model`, which it owns from now on.

        Args:
            model: a model from `models.load`.
            decode: tokens to text, special tokens left out.
            max_cache_tokens: slots of the cache, over all rows of a wave.
            max_prefill_tokens: tokens of one prefill forward.
            record_experts: whether completions tell which experts their tokens went to.

        Raises:
            ValueError: experts are asked of a model that has none.
        """
        self.version = 0
        self._model = model
        self._decode = decode
        self._max_cache_tokens = max_cache_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._routers = Routers(model) if record_experts else None
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._max_length = int(
            getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 31
        )

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order; see `protocols.Engine`.

        Raises:
            ValueError: a request cannot be served; none of them is begun.
            RuntimeError: the model gave logits that are not finite; the other requests are finished first.
        """
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            self._check(index, prompt, wanted)
        requests = [_Request(tuple(prompt), wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        for wave in self._waves(requests):
            self._run(wave)
        for index, request in enumerate(requests):
            if request.finish_reason == "error":
                raise RuntimeError(f"prompt {index} of {len(requests)} failed: {request.reason}")
        return [self._completion(request) for request in requests]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight in place; see `PagedEngine.update_weights`."""
        load_in_place(self._model, named_tensors)
        self.version = version

    def fingerprint(self) -> dict[str, str]:
        """A checksum of each weight as the engine holds it."""
        return fingerprint(named_weights(self._model))

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, untempered, to compare with the trainer's."""
        return sampler_logprobs(self._model, token_ids)

    def _check(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a completion needs at least one token to follow")
        total = len(prompt) + params.max_tokens
        if total > self._max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and asks for {params.max_tokens} more; "
                f"the model allows {self._max_length} in all"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(
                f"prompt {index} holds the token {token}; the vocabulary has {self._vocab_size}, "
                f"from 0 to {self._vocab_size - 1}"
            )
        check_vocabulary(params, self._vocab_size)

    def _waves(self, requests: list[_Request]) -> Iterable[list[_Request]]:
        """Requests in order, as many at a time as the cache holds."""
        wave: list[_Request] = []
        longest = 0
        for request in requests:
            length = len(request.prompt) + request.params.max_tokens
            if wave and (len(wave) + 1) * max(longest, length) > self._max_cache_tokens:
                yield wave
                wave, longest = [], 0
            wave.append(request)
            longest = max(longest, length)
        if wave:
            yield wave

    def _run(self, wave: list[_Request]) -> None:
        """Prefill a wave, then decode it token by token until every request is done."""
        for request in wave:
            if request.params.prompt_logprobs:
                request.prompt_logprobs = self._score_prompt(request)
        cache, logit_BV = self._prefill(wave)
        sampling = SamplingTable(len(wave), self._vocab_size, self._device)
        sampling.put(range(len(wave)), [request.params for request in wave])
        row_B = np.arange(len(wave))
        length_B = torch.tensor([len(request.prompt) for request in wave], device=self._device)
        active = list(wave)
        step = 0
        while True:
            # Every row of the batch has drawn `step` tokens, so that is the position of the next one.
            position_B = np.full(len(active), step)
            drawn = sampling.sample(logit_BV, row_B, position_B, partial(_history, active))
            self._append(active, drawn)
            step += 1
            going = [i for i, request in enumerate(active) if request.finish_reason is None]
            if not going:
                return
            token_B = torch.from_numpy(drawn.token_N).to(self._device)
            if len(going) <= len(active) // 2:
                keep = torch.tensor(going, device=self._device)
                cache.take(keep, cache.keys[0].shape[2])
                active = [active[i] for i in going]
                row_B, length_B, token_B = row_B[going], length_B[keep], token_B[keep]
            # A finished row that stays is decoded into its own slots and never read; its slot must exist.
            slot_B = (length_B + step - 1).clamp(max=cache.keys[0].shape[2] - 1)
            hidden_BD, expert_BLK = self._forward(token_B, slot_B, Decode(cache, slot_B))
            if expert_BLK is not None:
                for request, expert_LK in zip(active, expert_BLK, strict=True):
                    if request.finish_reason is None:
                        request.experts.append(expert_LK[None])
            logit_BV = output_head(self._model).logits(hidden_BD)

    def _prefill(self, wave: list[_Request]) -> tuple[DenseCache, Tensor]:
        """A cache that holds every request's prompt, and the logits after it, [B, V]."""
        unique = list(dict.fromkeys(request.prompt for request in wave))
        like = next(self._model.parameters())
        num_slots = max(len(prompt) for prompt in unique)
        cache = DenseCache(facts_of(self._model), num_rows=len(unique), num_slots=num_slots, like=like)
        parts: list[Tensor] = []
        computed: dict[tuple[int, ...], np.ndarray] = {}
        first = 0
        while first < len(unique):
            last, size = first, 0
            while last < len(unique) and (
                last == first or size + len(unique[last]) <= self._max_prefill_tokens
            ):
                size += len(unique[last])
                last += 1
            logit_NV, experts = self._prefill_rows(cache, unique[first:last], first)
            parts.append(logit_NV)
            computed |= dict(zip(unique[first:last], experts, strict=False))
            first = last
        for request in wave:
            request.experts += [computed[request.prompt]] if computed else []
        row = {prompt: index for index, prompt in enumerate(unique)}
        row_B = torch.tensor([row[request.prompt] for request in wave], device=self._device)
        cache.take(row_B, max(len(request.prompt) + request.params.max_tokens for request in wave))
        return cache, torch.cat(parts)[row_B]

    def _prefill_rows(
        self, cache: DenseCache, prompts: list[tuple[int, ...]], first_row: int
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Logits after some prompts, and where each one's tokens were sent, if that is recorded."""
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        token_T = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        row_T = torch.repeat_interleave(torch.arange(first_row, first_row + len(prompts)), length_B).to(
            self._device
        )
        slot_T = torch.cat([torch.arange(n) for n in length_B.tolist()]).to(self._device)
        context = Prefill(Packed(Segments.of(length_B).to(self._device)), cache, row_T, slot_T)
        hidden_TD, expert_TLK = self._forward(token_T, slot_T, context)
        logit_BV = output_head(self._model).logits(hidden_TD[(length_B.cumsum(0) - 1).to(self._device)])
        return logit_BV, [] if expert_TLK is None else np.split(expert_TLK, length_B.cumsum(0)[:-1])

    def _forward(
        self, token_T: Tensor, position_T: Tensor, context: Context
    ) -> tuple[Tensor, np.ndarray | None]:
        """Final hidden states [T, D], and the experts that each token was sent to, if they are recorded."""
        if self._routers is None:
            return hidden_states(self._model, token_T, position_T, context), None
        with self._routers.record() as record:
            hidden_TD = hidden_states(self._model, token_T, position_T, context)
        return hidden_TD, record.expert_TLK.cpu().numpy().astype(np.int16)

    def _score_prompt(self, request: _Request) -> np.ndarray:
        """Log-probability of each prompt token after those before it, float32 [prompt tokens - 1]."""
        token_T = torch.tensor(request.prompt, device=self._device)
        position_T = torch.arange(len(token_T), device=self._device)
        context = Packed(Segments.of(torch.tensor([len(token_T)])).to(self._device))
        hidden_TD = hidden_states(self._model, token_T, position_T, context)
        temperature = 1.0 if request.params.logprobs == "raw" else request.params.temperature or 1.0
        head = output_head(self._model)
        logprob_N, _ = token_logprob(hidden_TD[:-1], head, token_T[1:], temperature=temperature)
        return logprob_N.float().cpu().numpy()

    def _append(self, requests: list[_Request], drawn: SampledTokens) -> None:
        """Give each unfinished request its token, and end those that are done."""
        for n, request in enumerate(requests):
            if request.finish_reason is not None:
                continue
            if not drawn.finite_N[n]:
                request.finish_reason, request.reason = "error", "its logits are not finite"
                continue
            token = int(drawn.token_N[n])
            request.tokens.append(token)
            request.logprobs.append(float(drawn.logprob_N[n]))
            support = drawn.support[n] if drawn.support is not None else None
            if support is not None:
                request.supports.append((support, float(drawn.within_N[n])))
            params = request.params
            if token in params.stop_token_ids:
                request.finish_reason = "stop"
            elif params.stop and len(request.tokens) >= params.min_tokens:
                text = self._decode(request.tokens)
                cut = first_stop(text, params.stop)
                if cut is not None:
                    request.finish_reason, request.text = "stop", text[:cut]
            if request.finish_reason is None and len(request.tokens) >= params.max_tokens:
                request.finish_reason = "length"

    def _completion(self, request: _Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            token_ids=tuple(request.tokens),
            logprobs=np.array(request.logprobs, dtype=np.float32),
            versions=np.full(len(request.tokens), self.version, dtype=np.int32),
            finish_reason=request.finish_reason,
            text=self._decode(request.tokens) if request.text is None else request.text,
            support=joined(request.supports),
            prompt_logprobs=request.prompt_logprobs,
            experts=self._experts(request),
        )

    def _experts(self, request: _Request) -> np.ndarray | None:
        """Of every token; the last one drawn was not computed."""
        if self._routers is None:
            return None
        missing = len(request.prompt) + len(request.tokens) - sum(map(len, request.experts))
        size = (missing, self._routers.num_layers, self._routers.num_choices)
        return np.concatenate([*request.experts, np.full(size, -1, np.int16)])


def _history(requests: Sequence[_Request], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and drawn tokens of a request, for its penalties."""
    prompt, drawn = requests[n].prompt, requests[n].tokens
    return np.array(prompt, dtype=np.int64), np.array(drawn, dtype=np.int64)
