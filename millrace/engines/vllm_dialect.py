"""The HTTP interface of vLLM, to generate with it in a run (vLLM 0.32)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np

from millrace.engines.external_dialect import (
    LEAST_LOGPROB,
    ExternalDialect,
    check_same_logprobs,
    checked_logprobs,
    truncates,
)
from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.millrace_dialect import check_length, check_tokenizer
from millrace.engines.server_dialect import (
    check_end,
    cut_text,
    field,
    finish_reason,
    tokens,
    versions_of,
)
from millrace.engines.vllm_command import BACKEND, DEV_MODE, LOGPROBS, SCALE_OUT
from millrace.engines.weight_files import raw_file
from millrace.inference.server.placed_weights import read_placed
from millrace.transport.fingerprint import raw_bytes
from millrace.transport.shared_memory import WeightManifest
from millrace.transport.weight_update import WeightSyncError
from millrace.types import Completion, SamplingParams, Support

# With this bias a token is certain; raw log-probabilities do not include it.
BIAS = 50.0
CERTAIN = -1e-3
SEEDS = 1 << 63
_DEV = ", ".join(f"{name}={value}" for name, value in DEV_MODE.items())


class VllmDialect(ExternalDialect):
    """See `Dialect`.

    vLLM's `processed` log-probabilities are those after top-k, top-p and min-p. With one of them, the
    candidates of each token are requested too, so that the completion has its support; `top_k` bounds them.
    """

    path = "/inference/v1/generate"

    async def probe(self, token_ids: Sequence[int], text: str | None) -> None:
        """See `Dialect`."""
        client, timeout_s = self.client, self._timeout_s
        models = field(await client.get("/v1/models", timeout_s=timeout_s), "data", list, client.url)
        check_length(models, self._longest, client.url, "--max-model-len")
        if text is not None:
            await check_tokenizer(client, token_ids, text, self._load_s)
        await self._needs("/is_paused", f"the environment variable {_DEV}")
        # Of a trainer that was killed during an update.
        await client.post("/resume", timeout_s=timeout_s)
        try:
            await client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=timeout_s)
        except RequestRefused as error:
            raise ServerError(
                f"{client.url} takes no weights from a trainer ({error.reason}); start it with "
                f"--weight-transfer-config '{BACKEND}' and the folder in PYTHONPATH that python -m "
                "millrace.engines.vllm_command FOLDER writes"
            ) from None
        await self._check_logprobs(token_ids)

    async def _needs(self, path: str, option: str) -> None:
        try:
            await self.client.get(path, timeout_s=self._timeout_s)
        except RequestRefused as error:
            if error.status in (403, 404, 405):
                raise ServerError(
                    f"{self.client.url} has no {path}; is it vLLM? Start it with {option}"
                ) from None
            raise

    async def _check_logprobs(self, token_ids: Sequence[int]) -> None:
        """Check that log-probabilities are those of the distribution that is sampled from."""
        for token in {token_ids[0], token_ids[-1]}:
            params = {"max_tokens": 1, "temperature": 0.7, "logprobs": 0, "ignore_eos": True, "seed": 1}
            body = self._body(next(self._probes), [token], {**params, "logit_bias": {str(token): BIAS}})
            try:
                choice = await self._choice(body, self._load_s)
            except RequestRefused as error:
                if error.status in (403, 404, 405):
                    raise ServerError(f"{self._place} is off; start the server with {SCALE_OUT}") from None
                raise
            _, (logprob,) = self._sampled(choice)
            if not CERTAIN <= logprob <= -CERTAIN:
                raise ServerError(
                    f"{self.client.url} returns log-probabilities of another distribution than it samples "
                    f"from at temperature 0.7; start it with --logprobs-mode {LOGPROBS}"
                )

    async def generate(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """See `Dialect`; ValueError for parameters that change log-probabilities as the trainer's do not."""
        check_params(params)
        candidates = params.top_k if truncates(params) else 0
        body = self._body(id, prompt, _sampling(params, candidates))
        try:
            choice = await self._choice(body, None)
        except RequestRefused as error:
            if error.status == 400:
                raise ValueError(error.reason) from None
            raise
        token_ids, logprobs = self._sampled(choice)
        completion = Completion(
            token_ids,
            logprobs,
            versions_of(choice.get("weight_versions"), len(token_ids), self._place),
            finish_reason(choice, self._place),
            cut_text(self._decode(token_ids), params.stop),
            support=_support(_entries(choice), logprobs) if candidates else None,
        )
        return check_end(completion, params, self._place)

    def _sampled(self, choice: Mapping[str, Any]) -> tuple[tuple[int, ...], np.ndarray]:
        """Return the tokens of a choice and their log-probabilities; ServerError if one is missing."""
        token_ids = tokens(choice.get("token_ids"), self._place)
        pairs = [(entry.get("token_id"), entry.get("logprob")) for entry in _entries(choice)]
        return token_ids, checked_logprobs(pairs, token_ids, self._place)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Dialect`."""
        body = {"request_ids": [f"generate-tokens-{id}" for id in ids]}
        await self.client.post("/inference/v1/abort_requests", body, timeout_s=self._timeout_s)

    def weights_at(
        self, weights: int, manifest: WeightManifest, folder: str
    ) -> AbstractAsyncContextManager[str]:
        """See `Dialect`."""
        return raw_file(weights, manifest, folder)

    async def update_weights(self, path: str, manifest: WeightManifest) -> None:
        """See `Dialect`. The plugin verifies names and checksums in each worker of the server."""
        self._check_names(manifest)
        info = {"path": path, "tensors": manifest["tensors"], "sha256": await _digests(path, manifest)}
        clear = "true" if self._kv == "recompute" else "false"
        post = self.client.post
        await post(f"/pause?mode=keep&clear_cache={clear}", timeout_s=self._load_s)
        await post("/start_weight_update", timeout_s=self._load_s)
        await post("/update_weights", {"update_info": info}, timeout_s=self._load_s)
        version = {"weight_version": str(manifest["version"])}
        await post("/finish_weight_update", version, timeout_s=self._load_s)
        await post("/resume", timeout_s=self._timeout_s)
        self._updated(manifest)

    async def version(self) -> int:
        """See `Dialect`."""
        reply = await self.client.get("/weight_info", timeout_s=self._timeout_s)
        text = field(reply, "weight_version", str, f"{self.client.url}/weight_info")
        return int(text) if text.isdecimal() else -1

    async def _scores(self, prompt: Sequence[int]) -> list[float]:
        """See `ExternalDialect`; vLLM uses no cache for log-probabilities of the prompt."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True}
        body = self._body(next(self._probes), prompt, params)
        reply = await self.client.post(self.path, body, timeout_s=self._load_s)
        found = field(reply, "prompt_logprobs", list, self._place)
        scores = [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(prompt[1:], found[1:], strict=False)
            if isinstance(entry, dict) and str(token) in entry
        ]
        if len(scores) != len(prompt) - 1:
            raise ServerError(f"{self._place} scored {len(scores) + 1} of {len(prompt)} tokens of a prompt")
        return scores

    async def _greedy(self, prompt: Sequence[int]) -> tuple[int, float, int]:
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        choice = await self._choice(self._body(next(self._probes), prompt, params), self._load_s)
        (token,), (logprob,) = self._sampled(choice)
        return token, float(logprob), 0

    def _body(self, id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "request_id": id,
            "token_ids": list(prompt),
            "sampling_params": dict(params),
            "cache_salt": self._salt,
        }

    async def _choice(self, body: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        reply = await self.client.post(self.path, body, timeout_s=timeout_s)
        choices = field(reply, "choices", list, self._place)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise ServerError(f"{self._place} sent {len(choices)} completions of one request")
        return dict(choices[0])


def check_params(params: SamplingParams) -> None:
    """Raise ValueError for sampling parameters whose log-probabilities vLLM gives otherwise than millrace.

    vLLM's are those after all parameters, millrace's after the temperature alone.
    """
    check_same_logprobs(params, "vllm")
    if truncates(params) and not params.top_k:
        raise ValueError(
            "top_p and min_p need top_k with engine.kind vllm, so that a token has few candidates; set top_k"
        )


def _sampling(params: SamplingParams, candidates: int) -> dict[str, Any]:
    """Return vLLM's `sampling_params`."""
    stop = {"stop": list(params.stop)} if params.stop else {"detokenize": False}
    truncating = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    return {
        **stop,
        **(truncating if truncates(params) else {}),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed % SEEDS,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "logprobs": candidates,
    }


def _entries(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a choice has of each token's log-probability; an empty object where it has none."""
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [one if isinstance(one, dict) else {} for one in entries] if isinstance(entries, list) else []


def _support(entries: Sequence[Mapping[str, Any]], logprobs: np.ndarray) -> Support:
    """Return the candidates of each token: those that a log-probability above the least one is left of."""
    token_ids, counts = [], []
    for entry in entries:
        pairs = {entry["token_id"]: entry["logprob"]}
        pairs |= {one["token_id"]: one["logprob"] for one in entry.get("top_logprobs", [])}
        candidates = sorted(token for token, value in pairs.items() if value > LEAST_LOGPROB)
        token_ids += candidates
        counts.append(len(candidates))
    return Support(np.array(token_ids, np.int32), np.array(counts, np.int32), logprobs)


async def _digests(path: str, manifest: WeightManifest) -> dict[str, str]:
    """Verify the file against the trainer's checksums, and return those that the plugin can compute."""

    def computed() -> dict[str, str]:
        weights = read_placed(path, manifest["tensors"], manifest["fingerprint"], Path("/"))
        return {name: hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest() for name, tensor in weights}

    try:
        return await asyncio.to_thread(computed)
    except WeightSyncError as error:
        raise ServerError(str(error)) from None
