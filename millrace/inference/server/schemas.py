"""Request bodies. An unknown field is an error that suggests the nearest known name."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_SAMPLES = 128
MAX_STOPS = 64
# Held back text is compared with each beginning of a stop string, at every token.
MAX_STOP_LETTERS = 256
MAX_NAME = 60
# Beyond these, logits of 1e4 are no longer finite numbers somewhere between here and a probability.
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 1e4
MAX_REPETITION_PENALTY = 100.0
MAX_INT = (1 << 31) - 1
Count = Annotated[int, Field(ge=0)]
# One mistake is enough: a list of another kind must not give a million of them.
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Stop = Annotated[str, Field(max_length=MAX_STOP_LETTERS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Share = Annotated[float, Field(le=1.0)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]


class Body(BaseModel):
    """A JSON object that rejects unknown fields; null counts as missing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # OpenAI's options that this server lacks, each with the values that have no effect and are accepted.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # OpenAI's options that change no response: bookkeeping, caching and billing.
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                if value is not None:
                    _check_text(name, value)
                    kept[name] = value
            elif name in cls.ignored:
                continue
            elif name not in cls.unsupported:
                # Printable: bounded in length and without lone surrogates.
                name = ascii(name)[1:-1][:MAX_NAME]
                near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise _field(name, f"there is no field {name}{hint}")
            elif value is not None and not any(value is v or value == v for v in cls.unsupported[name]):
                raise _field(name, f"{name} is not supported by this server; leave it out")
        return kept


def _check_text(name: str, value: Any) -> None:
    """Reject lone surrogates, which are valid in JSON but not in a tokenizer or a path."""
    texts = value if isinstance(value, list) and value and isinstance(value[0], str) else [value]
    for text in texts:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                sentence = f"{name} holds half a character (at {error.start}) that is not Unicode text"
                raise _field(name, sentence) from None


def _field(name: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"sentence": sentence, "param": name})


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class SamplingFields(Body):
    """Sampling parameters; names and meanings as in `SamplingParams`, and as in OpenAI's API where present.

    Attributes:
        n: samples of each prompt.
        seed: sample 0 uses the seed itself, sample i a seed derived from (seed, i); random if None.
        ignore_eos: continue after the model's end-of-text tokens.
    """

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Field(le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Field(le=MAX_INT)] = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = (
        1.0
    )
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    allowed_token_ids: Tokens = []
    forbidden_token_ids: Tokens = []
    logit_bias: dict[str, Penalty] = {}
    stop_token_ids: Tokens = []
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    ignore_eos: bool = False


class Sampling(SamplingFields):
    """A request with its sampling parameters.

    Attributes:
        request_id: id for `/abort`, unique among unfinished requests; generated if None.
        priority: lower runs first.
    """

    stream: bool = False
    request_id: Name | None = None
    priority: int = 0


# Fields that sglang-router adds to each request, with the values that ask for what this server does anyway.
ROUTER_FIELDS: dict[str, tuple[Any, ...]] = {
    "continue_final_message": (False,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),  # no text is taken for reasoning
    "skip_special_tokens": (True,),
    "stream_reasoning": (True, False),
}


class OpenAIBody(Sampling):
    """Common fields of OpenAI's two endpoints."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )

    model: str | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _usage_of_a_stream(self) -> OpenAIBody:
        _check_stream_options(self.stream_options, self.stream)
        return self


def _check_stream_options(options: StreamOptions | None, stream: bool) -> None:
    if options is not None and not stream:
        raise _field("stream_options", "stream_options has no effect without stream: true; leave it out")


class CompletionBody(OpenAIBody):
    """Of `/v1/completions`: texts, or texts as tokens.

    Attributes:
        max_tokens: 0, which generates nothing, needs `echo`.
        echo: begin each text with its prompt, and `logprobs` with those of its tokens.
        logprobs: 0 for the log-probability of each token; with `echo` also 1, which adds the most likely
            token at each place of the prompt.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ROUTER_FIELDS,
        "best_of": (1,),
        "suffix": ("",),
    }

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: Count | None = None

    @model_validator(mode="after")
    def _only_the_sampled(self) -> CompletionBody:
        if self.logprobs and not self.echo:
            raise _no_alternatives("logprobs", self.logprobs, "ask for logprobs: 0")
        if self.logprobs and self.logprobs > 1:
            raise _field(
                "logprobs",
                f"logprobs is {self.logprobs}, but of a prompt only the most likely token at each place is "
                "computed; ask for logprobs: 1",
            )
        if self.logprobs and self.max_tokens != 0 and not self._is_greedy():
            raise _field(
                "logprobs",
                "logprobs is 1, which gives the most likely token of generated ones only if it is sampled; "
                "set temperature: 0 without penalties, biases and rules for tokens, or max_tokens: 0",
            )
        return self

    @model_validator(mode="after")
    def _echo_is_whole(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise _field("max_tokens", "max_tokens is 0, which is for echo: true; ask for at least 1")
        if self.echo and self.stream:
            raise _field("echo", "echo is not supported with stream: true; leave one of them out")
        return self

    def _is_greedy(self) -> bool:
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens
        ruled = self.allowed_token_ids or self.forbidden_token_ids
        return self.temperature == 0 and self.repetition_penalty == 1 and not (changed or ruled)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]
    name: str | None = None


class ChatBody(OpenAIBody):
    """Of `/v1/chat/completions`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ROUTER_FIELDS,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs:
            raise _no_alternatives("top_logprobs", self.top_logprobs, "leave it out")
        two = self.max_tokens, self.max_completion_tokens
        if None not in two and two[0] != two[1]:
            raise _field(
                "max_tokens", f"max_tokens is {two[0]} and max_completion_tokens {two[1]}; give one of them"
            )
        return self


def _no_alternatives(name: str, value: int, way_out: str) -> PydanticCustomError:
    return _field(
        name,
        f"{name} is {value}, but only the log-probability of the sampled token is stored, none of "
        f"alternatives; {way_out}",
    )


class GenerateBody(Sampling):
    """Of `/generate`: tokens in, tokens out.

    Attributes:
        prompt_token_ids: the prompt.
        logprobs: of the distribution after (`processed`) or before (`raw`) temperature and penalties.
        prompt_logprobs: score the prompt's tokens too.
        prompt_top_tokens: with these, the most likely token at each place of the prompt.
    """

    prompt_token_ids: Tokens
    logprobs: Literal["processed", "raw"] = "processed"
    prompt_logprobs: bool = False
    prompt_top_tokens: bool = False


class TokenSampling(SamplingFields):
    """The `sampling_params` of `/inference/v1/generate`, with vLLM's names.

    Attributes:
        top_k: 0 and -1 are off.
        logprobs: 0 or 1 for the log-probability of each sampled token; none if None.
        prompt_logprobs: 0 or 1 for those of the prompt's tokens.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bad_words": ([],),
        "extra_args": ({},),
        "include_stop_str_in_output": (True,),  # in the tokens it is included
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
    }
    # They concern text, which is not returned, or the representation inside vLLM.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"detokenize", "flat_logprobs", "skip_special_tokens", "spaces_between_special_tokens"}
    )

    logprobs: Count | None = None
    prompt_logprobs: Count | None = None

    @model_validator(mode="after")
    def _only_the_sampled(self) -> TokenSampling:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name) or 0) > 1:
                raise _no_alternatives(name, value, f"ask for {name}: 1")
        return self


class TokenBody(Body):
    """Of `/inference/v1/generate`: tokens in, tokens out, in vLLM's form.

    Attributes:
        token_ids: the prompt.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "features": (),
        "kv_transfer_params": (),
    }
    # Cached prefixes are never used across versions of the weights, which is what trainers set a salt for.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_salt", "return_token_ids"})

    token_ids: Tokens
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Name | None = None
    priority: int = 0

    @model_validator(mode="after")
    def _usage_of_a_stream(self) -> TokenBody:
        _check_stream_options(self.stream_options, self.stream)
        return self


class TokenizeBody(Body):
    """Of `/tokenize`: a text, or a conversation as the model would read it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise _field("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """Of `/detokenize`."""

    model: str | None = None
    tokens: Tokens


class PauseBody(Body):
    """Of `/pause`: finish, abort or freeze the running requests."""

    mode: Literal["finish", "abort", "keep"]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0


class AbortBody(Body):
    """Of `/abort`."""

    id: str


class TagsBody(Body):
    """Of `/sleep` and `/wake`: which memory is freed or allocated again."""

    tags: Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1)]


class UpdateWeightsBody(Body):
    """Of `/update_weights`: where the weights are, their version, and what becomes of cached keys.

    Attributes:
        path: a model folder below the weights root; with `tensors`, a file there or shared memory of a
            process of this machine (`/proc/PID/fd/N`).
        tensors: dtype, shape and first byte of each weight in the file.
        fingerprint: checksum of each weight; required with `tensors`.
    """

    path: str
    version: Annotated[int, Field(ge=0, lt=1 << 31)]
    kv: Literal["keep", "recompute"] = "recompute"
    tensors: dict[str, list[str | int | list[Count]]] | None = None
    fingerprint: dict[str, str] | None = None

    @model_validator(mode="after")
    def _verifiable(self) -> UpdateWeightsBody:
        if (self.tensors is None) != (self.fingerprint is None):
            raise _field("fingerprint", "give tensors and fingerprint together, or neither")
        return self
