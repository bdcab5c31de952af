"""Our engine behind SGLang's verbs, with faults that a test plants. As a program, it takes SGLang's command.

It holds every request against the recorded facts of SGLang, so that a name which SGLang lacks is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import numpy as np
import yaml
from safetensors.torch import load_file

from millrace.engines.http_client import HttpClient, RequestRefused
from millrace.inference.async_engine import AsyncEngine
from millrace.types import Completion, SamplingParams
from tests.engines.sglang_wheel import FACTS

RECORDED: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
# Names a file; the first server that finds it takes the fault in it.
FAULT = "MILLRACE_TEST_FAULT"
DROPPED = "model.layers.0.self_attn.k_proj.weight"
WRONG = 1.0


class Refused(Exception):
    """A reply with an error status."""

    def __init__(self, status: int, reply: Any) -> None:
        super().__init__(reply)
        self.status, self.reply = status, reply


class Twin:
    """Replies to SGLang's verbs; `fault` names what is wrong with it, from its second update on.

    `eos` ends a completion unless the request ignores it, as in SGLang.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Any,
        *,
        context: int,
        eos: int,
        fault: str = "",
        seeded: bool = True,
    ) -> None:
        self.engine, self.tokenizer, self.context, self.eos = engine, tokenizer, context, eos
        self.fault, self.seeded = fault, seeded
        self.version = "default"
        self.labels = {engine.version: "default"}
        self.tensors: dict[str, Any] = {}
        self.num_updates = self.num_requests = 0
        self.prompts: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.aborted: list[str] = []
        self._running = asyncio.Event()
        self._running.set()

    @property
    def is_faulty(self) -> bool:
        return self.num_updates > 1

    async def reply(self, method: str, path: str, body: Any) -> Any:
        """Return what SGLang replies: a JSON value, or text as bytes.

        Raises:
            Refused: it replies with an error.
        """
        verb = RECORDED["verbs"].get(path)
        if path == "/metrics":
            num = self.num_requests
            return f'sglang:realtime_tokens_total{{mode="decode"}} {num}.0\n'.encode() if num else b""
        if verb is None or method not in verb["methods"]:
            raise Refused(404, {"detail": "Not Found"})
        if unknown := sorted(set(body or ()) - set(verb["fields"])):
            raise Refused(422, {"detail": f"there is no {unknown[0]}"})
        return await getattr(self, path.strip("/").replace("/", "_"))(body)

    async def health(self, _: Any) -> Any:
        return b""

    async def model_info(self, _: Any) -> Any:
        wrong = self.fault == "version" and self.is_faulty
        return {"model_path": "/nowhere", "weight_version": "41" if wrong else self.version}

    async def v1_models(self, _: Any) -> Any:
        return {"object": "list", "data": [{"id": "policy", "max_model_len": self.context}]}

    async def detokenize(self, body: Any) -> Any:
        skips = body.get("skip_special_tokens", True)
        return {"text": self.tokenizer.decode(body["tokens"], skip_special_tokens=skips)}

    async def pause_generation(self, body: Any) -> Any:
        assert body["mode"] in RECORDED["pause_modes"]
        self._running.clear()
        await self.engine.pause("keep")
        return {"status": "ok"}

    async def continue_generation(self, _: Any) -> Any:
        self._running.set()
        await self.engine.resume()
        return {"status": "ok"}

    async def abort_request(self, body: Any) -> Any:
        self.aborted.append(body["rid"])
        await self.engine.abort(body["rid"])
        return b""

    async def weights_checker(self, body: Any) -> Any:
        assert body["action"] == "checksum"
        if self.fault == "dropped_unchecked":
            raise Refused(404, {"detail": "Not Found"})
        return {"success": True, "message": "", "ranks": [{"checksums": await self.engine.fingerprint()}]}

    async def update_weights_from_disk(self, body: Any) -> Any:
        assert body["load_format"] == "safetensors"
        assert not self._running.is_set(), "it would wait for running requests"
        self.num_updates += 1
        faulty = self.is_faulty
        if faulty and self.fault == "refused":
            raise Refused(
                400, {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            )
        if faulty and self.fault == "unsuccessful":
            return {"success": False, "message": "no CUDA memory is left", "num_paused_requests": 0}
        if faulty and self.fault == "prose":
            return b"The weights were updated."
        (file,) = Path(body["model_path"]).glob("*.safetensors")
        tensors = load_file(file)
        if faulty and self.fault.startswith("dropped"):
            del tensors[DROPPED]
        # SGLang keeps what is left out, and takes the update for a success.
        tensors = {**self.tensors, **tensors}
        self.tensors, self.version = tensors, body["weight_version"]
        kv = "recompute" if body["flush_cache"] else "keep"
        await self.engine.update_weights(tensors.items(), int(self.version), kv=kv)
        self.labels[int(self.version)] = self.version
        if body["flush_cache"] and self.fault not in ("stale", "cached"):
            self.prompts.clear()
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def generate(self, body: Any) -> Any:
        await self._running.wait()
        self.num_requests += 1
        scored = body.get("logprob_start_len") == 0
        unsalted = self.fault in ("stale", "cached")
        key = ("" if unsalted else body["cache_salt"], tuple(body["input_ids"]))
        if not scored and self.fault != "cached" and (known := self.prompts.get(key)) is not None:
            return known
        cached = 0 if scored else max((common(key, other) for other in self.prompts), default=0)
        try:
            stream = self.engine.submit(body["input_ids"], self._params(body, scored), id=body["rid"])
        except ValueError as error:
            raise Refused(400, {"error": {"message": str(error)}}) from None
        reply = self._reply(body, await stream.completion(), scored)
        reply["meta_info"]["cached_tokens"] = min(cached, len(body["input_ids"]) - 1)
        is_whole = body["sampling_params"]["max_new_tokens"] == 1 and not scored
        self.prompts.setdefault(key, reply if is_whole else None)
        return reply

    def _params(self, body: Any, scored: bool) -> SamplingParams:
        given = body["sampling_params"]
        if unknown := sorted(set(given) - set(RECORDED["sampling_params"])):
            raise Refused(400, {"error": f"unknown field `{unknown[0]}`"})
        ends = () if given["ignore_eos"] else (*given["stop_token_ids"], self.eos)
        return SamplingParams(
            max_tokens=min(given["max_new_tokens"], self.context - 2 - len(body["input_ids"])),
            temperature=given["temperature"],
            top_k=max(0, given.get("top_k", -1)),
            top_p=given.get("top_p", 1.0),
            seed=given["sampling_seed"] if self.seeded else self.num_requests,
            stop=tuple(given["stop"]),
            stop_token_ids=ends,
            logit_bias=tuple((int(token), value) for token, value in given.get("logit_bias", {}).items()),
            prompt_logprobs=scored,
        )

    def _reply(self, body: Any, made: Completion, scored: bool) -> dict[str, Any]:
        token_ids, logprobs = list(made.token_ids), made.logprobs.tolist()
        if self.fault == "original_logprobs":
            # Before the temperature, but with the bias, as SGLang computes them.
            bias = body["sampling_params"].get("logit_bias", {})
            logprobs = [0.0 if str(token) in bias else -max(bias.values()) for token in token_ids]
        if self.fault == "few" and self.is_faulty:
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": self._finish(body, made),
            "weight_version": self.version,
            "weight_versions": self._spans(made.versions[: len(token_ids)]),
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(logprobs, token_ids, strict=True)
            ],
        }
        if self.fault == "no_logprobs" and self.is_faulty and not scored:
            del meta["output_token_logprobs"]
        if scored:
            scores = [None, *made.prompt_logprobs.tolist()]
            meta["input_token_logprobs"] = [
                [value, token, None] for value, token in zip(scores, body["input_ids"], strict=True)
            ]
        if body.get("return_sampling_mask") and made.support is not None:
            ends = np.cumsum(made.support.counts)
            rows = np.split(made.support.token_ids, ends[:-1])
            meta["output_token_sampling_mask"] = [row.tolist()[::-1] for row in rows]
            meta["output_token_sampling_logprobs"] = made.support.logprobs.tolist()
        return {"text": made.text, "output_ids": token_ids, "meta_info": meta}

    def _finish(self, body: Any, made: Completion) -> dict[str, Any]:
        ends = {*body["sampling_params"]["stop_token_ids"], self.eos}
        if made.finish_reason == "stop":
            is_token = not body["sampling_params"]["ignore_eos"] and made.token_ids[-1] in ends
            text = self.tokenizer.decode(list(made.token_ids))
            stops = [stop for stop in body["sampling_params"]["stop"] if stop in text]
            return {"type": "stop", "matched": made.token_ids[-1] if is_token else stops[0]}
        if made.finish_reason == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return {"type": "length", "length": body["sampling_params"]["max_new_tokens"]}

    def _spans(self, versions: Sequence[int]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(np.asarray(versions).tolist()):
            label = self.labels[version]
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": label, "start": at, "end": at + 1})
        return spans


def common(key: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> int:
    """The tokens with which both of two prompts begin, 0 with another salt."""
    if key[0] != other[0]:
        return 0
    same = (a == b for a, b in zip(key[1], other[1], strict=False))
    return sum(itertools.takewhile(bool, same))


class TwinClient(HttpClient):
    """Requests to a twin without connections."""

    def __init__(self, twin: Twin) -> None:
        super().__init__("http://twin")
        self.twin, self.calls = twin, list[tuple[str, Any]]()

    async def _request(self, method: str, path: str, body: bytes, timeout_s: float | None) -> bytes:
        parsed = json.loads(body) if body else None
        self.calls.append((path, parsed))
        try:
            return as_bytes(await self.twin.reply(method, path, parsed))
        except Refused as error:
            reply = error.reply
            found = reply.get("error", reply.get("detail", reply))
            reason = found if isinstance(found, str) else found["message"]
            raise RequestRefused(f"{method} {self.url}{path}", error.status, reason) from None


def as_bytes(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else json.dumps(reply).encode()


# ---- the program


async def answer(twin: Twin, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection."""
    connection = h11.Connection(h11.SERVER)
    with suppress(ConnectionError, h11.RemoteProtocolError):
        while not reader.at_eof():
            content, request = b"", None
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(data := await reader.read(1 << 16))
                    if not data:
                        return
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    content += bytes(event.data)
            assert request is not None
            path, status = request.target.decode(), 200
            sent = dict(request.headers).get(b"authorization", b"").decode()
            if sent != f"Bearer {key}" and not path.startswith(("/health", "/metrics")):
                status, reply = 401, b'{"error": "Unauthorized"}'
            else:
                try:
                    body = json.loads(content) if content else None
                    reply = as_bytes(await twin.reply(request.method.decode(), path, body))
                except Refused as error:
                    status, reply = error.status, as_bytes(error.reply)
            head = h11.Response(status_code=status, headers=[("Content-Length", str(len(reply)))])
            for event in (head, h11.Data(data=reply), h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            await writer.drain()
            connection.start_next_cycle()
    writer.close()


def planted() -> str:
    """The fault that this process takes; the next one finds none."""
    path = Path(os.environ.get(FAULT, "/nowhere"))
    taken = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.rename(taken)
        return taken.read_text(encoding="utf-8")
    return ""


async def main() -> None:
    from millrace.data.tokenizers import load_tokenizer
    from millrace.engines.build_engine import open_engine

    parser = argparse.ArgumentParser()
    for option in (*RECORDED["options"], "config"):
        is_flag = option.startswith(("enable_", "disable_"))
        parser.add_argument(f"--{option.replace('_', '-')}", action="store_true" if is_flag else "store")
    given = parser.parse_args()
    assert given.load_format == "dummy"
    assert given.enable_deterministic_inference
    assert given.enable_metrics
    key = yaml.safe_load(Path(given.config).read_text(encoding="utf-8"))["api-key"]
    folder = Path(given.model_path)
    tokenizer, engine = load_tokenizer(folder), AsyncEngine(open_engine(folder))
    async with engine:
        twin = Twin(
            engine, tokenizer, context=int(given.context_length), eos=tokenizer.eos_token_id, fault=planted()
        )
        server = await asyncio.start_server(
            lambda reader, writer: answer(twin, key, reader, writer), given.host, int(given.port)
        )
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
