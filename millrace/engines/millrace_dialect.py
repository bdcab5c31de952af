"""The HTTP interface of `millrace serve`, to generate with it in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.engines.http_client import HttpClient, RequestRefused, ServerError
from millrace.engines.server_dialect import check_end, field, finish_reason, numbers, tokens
from millrace.engines.weight_files import raw_file
from millrace.transport.shared_memory import WeightManifest
from millrace.transport.weight_update import WeightSyncError, check_fingerprint
from millrace.types import Completion, SamplingParams, Support, TopTokens

if TYPE_CHECKING:
    from millrace.inference.engine import KvPolicy

_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
SEEDS = 1 << 64


class MillraceDialect:
    """See `Dialect`; `kv` is that of `PagedEngine.update_weights`, `longest` the tokens of a sequence."""

    def __init__(
        self, client: HttpClient, *, timeout_s: float, load_s: float, kv: KvPolicy, longest: int
    ) -> None:
        self.client, self._timeout_s, self._load_s = client, timeout_s, load_s
        self._kv, self._longest = kv, longest
        self._place = f"POST {client.url}/generate"

    async def probe(self, token_ids: Sequence[int], text: str | None) -> None:
        """See `Dialect`."""
        client = self.client
        found = await client.get("/version", timeout_s=self._timeout_s)
        if not isinstance(found, dict) or "millrace" not in found:
            raise ServerError(f"{client.url} is no millrace server; correct engine.kind or engine.urls")
        models = field(await client.get("/v1/models", timeout_s=self._timeout_s), "data", list, client.url)
        check_length(models, self._longest, client.url, "--cache-tokens")
        if text is not None:
            await check_tokenizer(client, token_ids, text, self._load_s)
        # Whether the token is the admin token; no request has this id.
        await self.abort(["probe"])

    async def generate(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """See `Dialect`."""
        body = {"prompt_token_ids": list(prompt), "request_id": id, "ignore_eos": True, **_body(params)}
        try:
            reply = await self.client.post("/generate", body)
        except RequestRefused as error:
            if error.status == 400:
                raise ValueError(error.reason) from None
            if error.code == "request_failed":
                return _failed(error.reason)
            raise
        (one,) = field(reply, "completions", list, self._place)
        token_ids, count = tokens(one.get("token_ids"), self._place), len(one["token_ids"])
        scores = one.get("prompt_logprobs")
        completion = Completion(
            token_ids,
            numbers(one.get("logprobs"), count, "log-probabilities", self._place),
            numbers(one.get("versions"), count, "policy versions", self._place).astype(np.int32),
            finish_reason(one, self._place),
            field(one, "text", str, self._place),
            support=_support(one.get("support")),
            prompt_logprobs=None
            if scores is None
            else numbers(scores, len(prompt) - 1, "log-probabilities of the prompt", self._place),
            prompt_top=_top_tokens(one.get("prompt_top")),
            reason=field(one, "reason", str, self._place),
        )
        return check_end(completion, params, self._place)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Dialect`."""
        for id in ids:
            try:
                await self.client.post("/abort", {"id": id}, timeout_s=self._timeout_s)
            except RequestRefused as error:
                if error.status != 404:
                    raise

    def weights_at(
        self, weights: int, manifest: WeightManifest, folder: str
    ) -> AbstractAsyncContextManager[str]:
        """See `Dialect`."""
        return raw_file(weights, manifest, folder)

    async def update_weights(self, path: str, manifest: WeightManifest) -> None:
        """See `Dialect`; the server refuses an update whole, and its checksums are read back."""
        body = {
            "path": path,
            "version": manifest["version"],
            "kv": self._kv,
            "tensors": manifest["tensors"],
            "fingerprint": manifest["fingerprint"],
        }
        await self.client.post("/update_weights", body, timeout_s=self._load_s)
        found = await self.client.get("/fingerprint", timeout_s=self._load_s)
        held = field(found, "fingerprint", dict, self.client.url)
        try:
            check_fingerprint(manifest["fingerprint"], held, manifest["version"])
        except WeightSyncError as error:
            raise ServerError(f"{self.client.url}: {error}") from None

    async def version(self) -> int:
        """See `Dialect`."""
        return field(await self.client.get("/version", timeout_s=self._timeout_s), "version", int, "/version")

    async def verify(self, token_ids: Sequence[int]) -> list[float]:
        """See `Dialect`. The server salts its prefix cache with the version itself."""
        body = {"prompt_token_ids": list(token_ids), "max_tokens": 1, "prompt_logprobs": True}
        reply = await self.client.post("/generate", body, timeout_s=self._load_s)
        (one,) = field(reply, "completions", list, self._place)
        scores = numbers(
            one.get("prompt_logprobs"), len(token_ids) - 1, "log-probabilities of the prompt", self._place
        )
        return [float(value) for value in scores]


def check_length(models: Sequence[Any], longest: int, url: str, option: str, spare: int = 0) -> None:
    """Check that the longest sequence of the run fits; ServerError otherwise.

    The server keeps `spare` tokens of its longest sequence for itself.
    """
    most = field(models[0] if models else None, "max_model_len", int, f"{url}/v1/models") - spare
    if most < longest:
        raise ServerError(
            f"{url} takes sequences of {most} tokens, and the recipe's have up to {longest}; start it with a "
            f"larger {option}, or lower rollout.max_tokens or data.max_prompt_tokens"
        )


async def check_tokenizer(client: HttpClient, token_ids: Sequence[int], text: str, timeout_s: float) -> None:
    """Check that the server decodes tokens as the policy's tokenizer does; ServerError otherwise."""
    reply = await client.post("/detokenize", {"tokens": list(token_ids)}, timeout_s=timeout_s)
    check_decoded(token_ids, field(reply, "prompt", str, f"{client.url}/detokenize"), text, client.url)


def check_decoded(token_ids: Sequence[int], found: str, text: str, url: str) -> None:
    """Compare the text that a server decodes tokens to with the policy's; ServerError if it differs."""
    if found != text:
        raise ServerError(
            f"{url} has another tokenizer than the policy: it decodes {list(token_ids)} to "
            f"{found!r} instead of {text!r}; start it with the policy's model folder"
        )


def _body(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of `/generate` that differ from their defaults."""
    body: dict[str, Any] = {
        name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default
    }
    bias: Mapping[int, float] = dict(params.logit_bias)
    if bias:
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
    return body | {"max_tokens": params.max_tokens, "seed": params.seed % SEEDS}


def _support(found: Any) -> Support | None:
    if found is None:
        return None
    try:
        ids, counts = np.array(found["token_ids"], np.int32), np.array(found["counts"], np.int32)
        return Support(ids, counts, np.array(found["logprobs"], np.float32))
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"a completion has a support that cannot be read: {error}") from None


def _top_tokens(found: Any) -> TopTokens | None:
    if found is None:
        return None
    try:
        return TopTokens(np.array(found["token_ids"], np.int32), np.array(found["logprobs"], np.float32))
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"a completion has top tokens that cannot be read: {error}") from None


def _failed(reason: str) -> Completion:
    nothing = np.empty(0, np.float32)
    return Completion((), nothing, np.empty(0, np.int32), "error", "", reason=reason)
