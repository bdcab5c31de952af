"""The HTTP interface of SGLang, to generate with it in a run (SGLang 0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.engines.external_dialect import (
    ExternalDialect,
    check_same_logprobs,
    checked_logprobs,
    truncates,
)
from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.millrace_dialect import check_decoded, check_length
from millrace.engines.server_dialect import (
    check_end,
    cut_text,
    field,
    joined,
    numbers,
    progress,
    tokens,
    versions_of,
)
from millrace.engines.sglang_checksums import held_checksums, unchanged
from millrace.engines.sglang_command import DETERMINISTIC, METRICS, ORIGINAL_LOGPROB, SPARE
from millrace.engines.weight_files import safetensors_folder
from millrace.transport.shared_memory import WeightManifest
from millrace.types import Completion, SamplingParams, Support

if TYPE_CHECKING:
    from millrace.inference.request import FinishReason

TESTED = "0.5.23"
SEEDS = 1 << 63
# All tokens are about equally likely at this temperature, even one with this bias.
HOT, BIAS = 1000.0, 500.0
PROBE_TOKENS = 4
_FULL = "The request queue is full."


class SglangDialect(ExternalDialect):
    """See `Dialect`.

    SGLang's log-probabilities are those after the temperature and before top-k and top-p, as millrace's are.
    With one of these, the candidates of each token are requested too, so that the completion has its support.
    """

    path = "/generate"
    # Checksums of the server's own tensors; None where it computes none.
    _held: dict[str, tuple[str, ...]] | None = None

    async def probe(self, token_ids: Sequence[int], text: str | None) -> None:
        """See `Dialect`."""
        client, timeout_s = self.client, self._timeout_s
        try:
            about = await client.get("/model_info", timeout_s=timeout_s)
        except RequestRefused as error:
            if error.status != 404:
                raise
            about = None
        if not isinstance(about, dict) or "weight_version" not in about:
            raise ServerError(f"{client.url} is no SGLang server; correct engine.kind or engine.urls")
        models = field(await client.get("/v1/models", timeout_s=timeout_s), "data", list, client.url)
        check_length(models, self._longest, client.url, "--context-length", SPARE)
        # Of a trainer that was killed during an update.
        await self._control("/continue_generation", {"torch_empty_cache": False}, timeout_s)
        if text is not None:
            body = {"tokens": list(token_ids), "skip_special_tokens": False}
            reply = await client.post("/detokenize", body, timeout_s=self._load_s)
            check_decoded(token_ids, field(reply, "text", str, f"{client.url}/detokenize"), text, client.url)
        await self._check_sampling(token_ids)
        try:
            await progress(client, timeout_s)
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise ServerError(
                f"{client.url} has no /metrics, which show that it works; start it with {METRICS}"
            ) from None
        self._held = await held_checksums(client, self._load_s)

    async def _check_sampling(self, token_ids: Sequence[int]) -> None:
        """Check that log-probabilities are those after the temperature, and that seeds repeat."""
        token = token_ids[-1]
        params = _sampling(SamplingParams(max_tokens=PROBE_TOKENS, temperature=HOT, seed=1))
        params["logit_bias"] = {str(token): BIAS}
        bodies = [self._body(next(self._probes), [token], params) for _ in range(2)]
        replies = [await self._post(body, self._load_s) for body in bodies]
        (sampled, logprobs), (again, _) = (self._sampled(reply) for reply in replies)
        if not all(-BIAS / 4 < value < -0.1 for value in logprobs.tolist()):
            raise ServerError(
                f"{self.client.url} returns log-probabilities of another distribution than it samples from "
                f"at temperature {HOT:g}; start it without {ORIGINAL_LOGPROB}"
            )
        if sampled != again:
            raise ServerError(
                f"{self.client.url} samples other tokens with the same seed; start it with {DETERMINISTIC}"
            )

    async def generate(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """See `Dialect`; ValueError for parameters that mean something else in SGLang."""
        check_params(params)
        whole, is_over = await self._part(id, prompt, params)
        while not is_over:
            # A stop token of the model that is none of the request's; SGLang ignores all of them or none.
            count = len(whole.token_ids)
            rest = replace(params, max_tokens=params.max_tokens - count)
            part, is_over = await self._part(id, (*prompt, *whole.token_ids), rest)
            whole = joined(whole, part, params.stop, self._decode)
            is_over = is_over or len(whole.token_ids) < count + len(part.token_ids)
        return check_end(whole, params, self._place)

    async def _part(self, id: str, prompt: Sequence[int], params: SamplingParams) -> tuple[Completion, bool]:
        """Return what the server sends for one request, and whether the completion is over with it."""
        wants_support = truncates(params)
        body = self._body(id, prompt, _sampling(params), return_sampling_mask=wants_support)
        try:
            reply = await self._post(body, None)
        except RequestRefused as error:
            if error.status == 400:
                raise ValueError(error.reason) from None
            if error.status == 503 and _FULL in error.reason:
                raise RequestRefused(self._place, 429, error.reason) from None
            raise
        token_ids, logprobs = self._sampled(reply)
        meta = reply["meta_info"]
        reason, is_over = _finish(meta, token_ids, params, self._place)
        completion = Completion(
            token_ids,
            logprobs,
            versions_of(meta.get("weight_versions"), len(token_ids), self._place),
            reason,
            cut_text(self._decode(token_ids), params.stop),
            support=_support(meta, token_ids, self._place) if wants_support else None,
        )
        return completion, is_over

    def _sampled(self, reply: Any) -> tuple[tuple[int, ...], np.ndarray]:
        """Return the tokens of a reply and their log-probabilities; ServerError if one is missing."""
        meta = field(reply, "meta_info", dict, self._place)
        token_ids = tokens(reply.get("output_ids"), self._place)
        pairs = _pairs(meta.get("output_token_logprobs"))
        return token_ids, checked_logprobs(pairs, token_ids, self._place)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Dialect`."""
        for id in ids:
            await self._control("/abort_request", {"rid": _rid(id)}, self._timeout_s)

    def weights_at(
        self, weights: int, manifest: WeightManifest, folder: str
    ) -> AbstractAsyncContextManager[str]:
        """See `Dialect`; the weights that the file holds are verified with the trainer's checksums."""
        return safetensors_folder(weights, manifest, folder)

    async def update_weights(self, path: str, manifest: WeightManifest) -> None:
        """See `Dialect`. SGLang takes an update with a weight left out, which its checksums show."""
        version, recomputes = manifest["version"], self._kv == "recompute"
        self._check_names(manifest)
        mode = {"mode": "retract" if recomputes else "in_place"}
        await self._control("/pause_generation", mode, self._load_s)
        body = {
            "model_path": path,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": recomputes,
            "abort_all_requests": False,
        }
        reply = await self._control("/update_weights_from_disk", body, self._load_s)
        if reply.get("success") is not True:
            reason = reply.get("message", "it gives no reason")
            raise ServerError(f"{self.client.url} did not load version {version}: {reason}")
        await self._check_held(manifest["fingerprint"], version)
        await self._control("/continue_generation", {"torch_empty_cache": False}, self._timeout_s)
        self._updated(manifest)

    async def _check_held(self, sent: Mapping[str, str], version: int) -> None:
        """Compare the server's checksums with those before the update."""
        if self._held is None:
            return
        held = await held_checksums(self.client, self._load_s, optional=False)
        assert held is not None
        if self._sent and (stale := unchanged(self._held, held, self._sent, sent)):
            raise ServerError(
                f"{self.client.url} holds older weights after version {version} was loaded, the first being "
                f"{stale[0]} ({len(stale)} in all)"
            )
        self._held = held

    async def version(self) -> int:
        """See `Dialect`."""
        reply = await self.client.get("/model_info", timeout_s=self._timeout_s)
        text = field(reply, "weight_version", str, f"{self.client.url}/model_info")
        return int(text) if text.isdecimal() else -1

    async def _scores(self, prompt: Sequence[int]) -> list[float]:
        """See `ExternalDialect`; SGLang uses no cache for log-probabilities of the prompt."""
        params = _sampling(SamplingParams(max_tokens=1))
        body = self._body(next(self._probes), prompt, params, logprob_start_len=0)
        reply = await self._post(body, self._load_s)
        found = field(field(reply, "meta_info", dict, self._place), "input_token_logprobs", list, self._place)
        if len(found) != len(prompt):
            raise ServerError(f"{self._place} scored {len(found)} of {len(prompt)} tokens of a prompt")
        return [float(value) for value in checked_logprobs(_pairs(found[1:]), prompt[1:], self._place)]

    async def _greedy(self, prompt: Sequence[int]) -> tuple[int, float, int]:
        params = _sampling(SamplingParams(max_tokens=1, temperature=0.0))
        # No other request of this version may have filled the cache: one that goes on may already have.
        body = self._body(next(self._probes), prompt, params, cache_salt=f"{self._salt}-probe")
        reply = await self._post(body, self._load_s)
        (token,), (logprob,) = self._sampled(reply)
        return token, float(logprob), field(reply["meta_info"], "cached_tokens", int, self._place)

    async def _control(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Post to a control endpoint, and return what it replies."""
        try:
            reply = await self.client.post(path, body, timeout_s=timeout_s)
        except RequestRefused as error:
            if error.status in (404, 405):
                raise ServerError(f"{self.client.url} has no {path}; it needs SGLang {TESTED}") from None
            raise
        return reply if isinstance(reply, dict) else {}

    async def _post(self, body: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        reply = await self.client.post(self.path, body, timeout_s=timeout_s)
        if not isinstance(reply, dict):
            raise ServerError(f"{self._place} sent no completion")
        return reply

    def _body(self, id: str, prompt: Sequence[int], params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "rid": _rid(id),
            "input_ids": list(prompt),
            "sampling_params": dict(params),
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "cache_salt": self._salt,
            **more,
        }


def check_params(params: SamplingParams) -> None:
    """Raise ValueError for sampling parameters that have another meaning in SGLang than in millrace."""
    check_same_logprobs(params, "sglang")
    if not truncates(params):
        return
    if params.min_p:
        raise ValueError("min_p is not supported with engine.kind sglang, which has no seeds with it")
    if params.top_k and params.top_p < 1:
        raise ValueError(
            "top_k and top_p together mean something else with engine.kind sglang, where top_p is a fraction "
            "of the whole vocabulary's probability; remove one of them"
        )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return SGLang's `sampling_params`."""
    truncating = {"top_k": params.top_k or -1, "top_p": params.top_p}
    return {
        **(truncating if truncates(params) else {}),
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "sampling_seed": params.seed % SEEDS,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        # It ignores the tokens of the request, too.
        "ignore_eos": not params.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def _rid(id: str) -> str:
    """Return the name of a request; none is the beginning of another, whose abort would be that of both."""
    return f"{len(id)}:{id}"


def _pairs(entries: Any) -> list[tuple[Any, Any]]:
    """Return token and log-probability from triples that have them the other way round."""
    found = entries if isinstance(entries, list) else []
    return [(one[1], one[0]) if isinstance(one, list) and len(one) > 1 else (None, None) for one in found]


def _finish(
    meta: Mapping[str, Any], token_ids: Sequence[int], params: SamplingParams, place: str
) -> tuple[FinishReason, bool]:
    """Return how a completion ended; False if it has not, for the request."""
    found = field(meta, "finish_reason", dict, place)
    kind, matched = found.get("type"), found.get("matched")
    if kind == "length":
        return "length", True
    if kind == "abort":
        return "abort", True
    if kind == "stop" and isinstance(matched, str) and matched in params.stop:
        return "stop", True
    if kind == "stop" and isinstance(matched, int):
        if not token_ids or token_ids[-1] != matched:
            raise ServerError(f"{place} ended a completion with a stop token that it does not hold")
        if matched in params.stop_token_ids:
            return "stop", True
        is_over = len(token_ids) >= params.max_tokens
        return "length" if is_over else "stop", is_over
    raise ServerError(f"{place} sent the finish reason {found!r}, which is unknown")


def _support(meta: Mapping[str, Any], token_ids: Sequence[int], place: str) -> Support:
    """Return the candidates of each token; ServerError if they do not have the token itself."""
    if not token_ids:
        nothing = np.empty(0, np.int32)
        return Support(nothing, nothing, np.empty(0, np.float32))
    masks = field(meta, "output_token_sampling_mask", list, place)
    if len(masks) != len(token_ids):
        raise ServerError(f"{place} sent {len(token_ids)} tokens and the candidates of {len(masks)}")
    rows = [sorted(tokens(row, place)) for row in masks]
    if any(token not in row for token, row in zip(token_ids, rows, strict=True)):
        raise ServerError(f"{place} sent a token that is none of its own candidates")
    scores = numbers(
        meta.get("output_token_sampling_logprobs"), len(token_ids), "log-probabilities of candidates", place
    )
    flat = np.array([token for row in rows for token in row], np.int32)
    return Support(flat, np.array([len(row) for row in rows], np.int32), scores)
