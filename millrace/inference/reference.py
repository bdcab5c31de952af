"""The reference engine: the trainer's module, a dense cache, no cleverness. The slow twin of every engine.

T = packed tokens, B = rows being decoded, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millrace.inference.sampler import Rows, draw
from millrace.kernels.packed_attention import Segments
from millrace.models.attention import Decode, DenseCache, Packed
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states, output_head
from millrace.transport.fingerprint import fingerprint
from millrace.types import Completion, SamplingParams


@dataclass(slots=True)
class _Request:
    """One completion in the making."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
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
    ) -> None:
        """An engine at version 0 over `model`, which it owns from now on.

        Args:
            model: a model from `models.load`.
            decode: tokens to text, special tokens left out.
            max_cache_tokens: slots of the cache, over all rows of a wave.
            max_prefill_tokens: tokens of one prefill forward.
        """
        self.version = 0
        self._model = model
        self._decode = decode
        self._max_cache_tokens = max_cache_tokens
        self._max_prefill_tokens = max_prefill_tokens
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
        """Draw one completion for each prompt, in order; see `protocols.Engine`."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            self._check(index, prompt, wanted)
        requests = [_Request(tuple(prompt), wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        for wave in self._waves(requests):
            self._run(wave)
        return [self._completion(request) for request in requests]

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight in place; see `protocols.Engine`."""
        parameters = dict(self._model.named_parameters())
        sent: dict[str, Tensor] = {}
        # Everything is checked before anything is written, so that a refused hand-over changes no weight.
        for name, tensor in named_tensors:
            held = parameters.get(name)
            if held is None:
                raise ValueError(f"weight {name} is not one of the engine's")
            if name in sent:
                raise ValueError(f"weight {name} was sent twice")
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                theirs, ours = f"{tuple(tensor.shape)} {tensor.dtype}", f"{tuple(held.shape)} {held.dtype}"
                raise ValueError(f"weight {name} was sent as {theirs}; the engine holds {ours}")
            sent[name] = tensor
        missing = parameters.keys() - sent.keys()
        if missing:
            raise ValueError(f"{len(missing)} weights were not sent, the first being {min(missing)}")
        for name, tensor in sent.items():
            parameters[name].copy_(tensor)
        self.version = version

    def fingerprint(self) -> dict[str, str]:
        """A checksum of each weight as the engine holds it."""
        return fingerprint(self._model.named_parameters())

    def _check(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a completion needs at least one token to follow")
        total = len(prompt) + params.max_tokens
        if total > self._max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and asks for {params.max_tokens} more; "
                f"the model allows {self._max_length} in all"
            )

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
        cache, logit_BV = self._prefill(wave)
        rows = Rows.of([request.params for request in wave], self._device)
        length_B = torch.tensor([len(request.prompt) for request in wave], device=self._device)
        active = list(wave)
        step = 0
        while True:
            # Every row of the batch has drawn `step` tokens, so that is the position of the next one.
            token_B, logprob_B = draw(logit_BV, rows, np.full(len(active), step))
            self._append(active, token_B.tolist(), logprob_B.tolist())
            step += 1
            going = [i for i, request in enumerate(active) if request.finish_reason is None]
            if not going:
                return
            if len(going) <= len(active) // 2:
                keep = torch.tensor(going, device=self._device)
                cache.take(keep, cache.keys[0].shape[2])
                active = [active[i] for i in going]
                rows, length_B, token_B = rows.take(keep), length_B[keep], token_B[keep]
            # A finished row that stays is decoded into its own slots and never read; its slot must exist.
            position_B = (length_B + step - 1).clamp(max=cache.keys[0].shape[2] - 1)
            hidden_BD = hidden_states(self._model, token_B, position_B, Decode(cache, position_B))
            logit_BV = output_head(self._model).logits(hidden_BD)

    def _prefill(self, wave: list[_Request]) -> tuple[DenseCache, Tensor]:
        """A cache that holds every request's prompt, and the logits after it, [B, V]."""
        unique = list(dict.fromkeys(request.prompt for request in wave))
        like = next(self._model.parameters())
        num_slots = max(len(prompt) for prompt in unique)
        cache = DenseCache(self._model.config, num_rows=len(unique), num_slots=num_slots, like=like)
        parts, first = [], 0
        while first < len(unique):
            last, size = first, 0
            while last < len(unique) and (
                last == first or size + len(unique[last]) <= self._max_prefill_tokens
            ):
                size += len(unique[last])
                last += 1
            parts.append(self._prefill_rows(cache, unique[first:last], first))
            first = last
        row = {prompt: index for index, prompt in enumerate(unique)}
        row_B = torch.tensor([row[request.prompt] for request in wave], device=self._device)
        cache.take(row_B, max(len(request.prompt) + request.params.max_tokens for request in wave))
        return cache, torch.cat(parts)[row_B]

    def _prefill_rows(self, cache: DenseCache, prompts: list[tuple[int, ...]], first_row: int) -> Tensor:
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        token_T = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        row_T = torch.repeat_interleave(torch.arange(first_row, first_row + len(prompts)), length_B).to(
            self._device
        )
        slot_T = torch.cat([torch.arange(n) for n in length_B.tolist()]).to(self._device)
        context = Packed(Segments.of(length_B).to(self._device), cache, row_T, slot_T)
        hidden_TD = hidden_states(self._model, token_T, slot_T, context)
        return output_head(self._model).logits(hidden_TD[(length_B.cumsum(0) - 1).to(self._device)])

    def _append(self, requests: list[_Request], tokens: list[int], logprobs: list[float]) -> None:
        """Give each unfinished request its token, and end those that are done."""
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if request.finish_reason is not None:
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            params = request.params
            if token in params.stop_token_ids:
                request.finish_reason = "stop"
            elif params.stop:
                text = self._decode(request.tokens)
                found = [at for at in (text.find(stop) for stop in params.stop) if at >= 0]
                if found:
                    request.finish_reason, request.text = "stop", text[: min(found)]
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
        )
