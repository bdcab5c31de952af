"""Completions that repeat their prompt (`echo: true`), with the log-probabilities of its tokens.

Evaluation harnesses score the choices of a question this way: each is a prompt, and nothing is generated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from millrace.inference.server.http_errors import ApiError, Json
from millrace.inference.server.replies import completed
from millrace.inference.server.schemas import CompletionBody
from millrace.inference.server.service import GenerationService, ModelService, new_id, sampling_params
from millrace.inference.server.shapes import TextShape, envelope, usage
from millrace.inference.server.token_endpoint import LEAST_LOGPROB
from millrace.types import Completion

# Prompt tokens of all samples of a request whose log-probabilities are returned: some 5 MB of JSON.
MAX_SCORED_TOKENS = 1 << 16
# OpenAI's names of the columns, one entry a token.
COLUMNS = ("tokens", "token_logprobs", "top_logprobs")


async def echo(
    service: GenerationService,
    body: CompletionBody,
    request: Request,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Response:
    """Answer a request with `echo`: each text begins with its prompt; `max_tokens` 0 adds nothing.

    ApiError if the prompts have too many tokens to return log-probabilities of, or as for any request.
    """
    served, scores = service.served, body.logprobs is not None
    num_prompt_tokens = sum(map(len, prompts))
    if scores and num_prompt_tokens * body.n > MAX_SCORED_TOKENS:
        raise ApiError(
            400,
            f"prompt has {num_prompt_tokens * body.n} tokens in all samples, but log-probabilities of at "
            f"most {MAX_SCORED_TOKENS} are returned; split the request",
            param="prompt",
        )
    params = sampling_params(
        body,
        served,
        len(prompts) * body.n,
        max_tokens=max(1, max_tokens),  # the engine computes a prompt to sample a token after it
        prompt_logprobs=scores,
        prompt_top_tokens=bool(body.logprobs),
    )
    id, created_s = body.request_id or new_id(TextShape.prefix), int(time.time())
    samples = await service.submit(id, prompts, params, priority=body.priority)
    generated = await completed(samples, request)
    texts, pieces = await _texts(service, body.prompt, prompts, with_pieces=scores)
    columns = _Columns(served, pieces, with_top=bool(body.logprobs), max_tokens=max_tokens)
    shape, choices = TextShape(wants_logprobs=scores), []
    for index, completion in enumerate(generated):
        prompt, text = prompts[index // body.n], texts[index // body.n]
        logprobs = columns.of(prompt, completion) if scores else None
        text, reason = (text + completion.text, completion.finish_reason) if max_tokens else (text, "length")
        choices.append(shape.choice(index, text, reason, logprobs))
    num_tokens = sum(min(max_tokens, len(one.token_ids)) for one in generated)
    return Json(
        envelope(id, shape.whole, served.name, created_s, choices, usage(num_prompt_tokens, num_tokens))
    )


async def _texts(
    service: GenerationService,
    given: str | list[str] | list[int] | list[list[int]],
    prompts: Sequence[Sequence[int]],
    *,
    with_pieces: bool,
) -> tuple[list[str], dict[int, str]]:
    """The texts of the prompts, and of each of their tokens `with_pieces`; a text that was given stays."""
    texts = [given] if isinstance(given, str) else [text for text in given if isinstance(text, str)]
    if texts and not with_pieces:
        return texts, {}
    asked = {"prompts": prompts, "texts": not texts, "pieces": with_pieces}
    found = json.loads(await service.texts.ask("echo", asked))
    return texts or found["texts"], {int(token): text for token, text in found["pieces"].items()}


class _Columns:
    """OpenAI's `logprobs` of a prompt and the tokens after it.

    `pieces` has the text of each token of the prompts. Beside the token itself, `top_logprobs` has the most
    likely one; of generated tokens that is the token itself, as only greedy ones are requested with it.
    """

    def __init__(
        self, served: ModelService, pieces: dict[int, str], *, with_top: bool, max_tokens: int
    ) -> None:
        self._served = served
        self._texts = pieces
        self._with_top = with_top
        self._max_tokens = max_tokens

    def of(self, prompt: Sequence[int], completion: Completion) -> dict[str, Any]:
        rows: list[tuple[str, float | None, dict[str, float] | None]] = [(self._text(prompt[0]), None, None)]
        if completion.prompt_logprobs is not None:
            for place, value in enumerate(completion.prompt_logprobs.tolist()):
                text, value = self._text(prompt[place + 1]), max(LEAST_LOGPROB, value)
                rows.append((text, value, self._top(text, value, completion, place)))
        generated = zip(completion.token_ids, completion.logprobs.tolist(), strict=True)
        for token, value in list(generated)[: self._max_tokens]:
            text = self._text(token)
            rows.append((text, value, {text: value} if self._with_top else None))
        columns: dict[str, Any] = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        if not self._with_top:
            columns["top_logprobs"] = None
        return columns | {"text_offset": _offsets(columns["tokens"])}

    def _top(self, text: str, value: float, completion: Completion, place: int) -> dict[str, float] | None:
        top = completion.prompt_top
        if top is None:
            return None
        # Two tokens may have one text, such as parts of characters: the more likely one stays.
        best = max(LEAST_LOGPROB, float(top.logprobs[place]))
        return {text: value, self._text(int(top.token_ids[place])): best}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._served.tokenizer.decode([token]))
        return self._texts[token]


def _offsets(tokens: Sequence[str]) -> list[int]:
    """Letters before each token, where the text is that of the tokens one after another."""
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return offsets
