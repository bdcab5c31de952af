"""What a policy said, read from its tokens: reasoning, text, and calls of tools in the formats of models.

A marker such as `<tool_call>` that is one token of the tokenizer counts only as that token: the same
characters from other tokens are text. Without such a token the characters count. Nothing here raises on what
a policy sampled, and the time grows linearly with its length.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from millrace.config.inputs import AUTO
from millrace.data.chat import chat_text
from millrace.data.rows import DataError, json_kind
from millrace.data.tool_schema import named_tools, schema_error, types_of
from millrace.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Status = Literal["ok", "invalid_json", "unclosed", "unknown_tool"]
MAX_CHARACTERS = 10_000_000
MAX_CALLS = 50
MAX_DEPTH = 64
THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"
CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MISTRAL_THINK, MISTRAL_THINK_END = "[THINK]", "[/THINK]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, HARMONY_CALL = "<|end|>", "<|return|>", "<|call|>"
HARMONY = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, HARMONY_CALL)
# Each of these is linear: nothing that repeats can be split in two ways.
_HALF = re.compile("[\ud800-\udfff]")
_OWN_ID = re.compile(r"(?!call\d{5}$)[A-Za-z0-9_-]{1,64}")
_FUNCTION = re.compile(r"\s*<function=([^>]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>(.*?)</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FENCED = re.compile(r"([^\n]*)\n```(?:json)?\n(.*)\n```\s*", re.DOTALL)
_LLAMA_CALL = re.compile(r"\s*\{\s*\"name\"\s*:")
_SPACE = re.compile(r"\s*")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool whose arguments fit its schema. `id` is the policy's own, or `call00000` and so on."""

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn of the assistant.

    `status` is that of the first part which cannot be used, and `error` is why, for the policy to read:
    `invalid_json` (no JSON, arguments that do not fit the schema, or more than is read), `unclosed` (a call
    or the reasoning does not end) or `unknown_tool`. `calls` are those before it; after it nothing is read.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    status: Status = "ok"
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Said:
    """A part of a turn that is text."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class _Called:
    """A part of a turn that is a call.

    With `is_text` each argument is text that its schema may read as JSON; with `is_first` there is one, which
    is the tool's first parameter whatever it is called here.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    is_text: bool = False
    is_first: bool = False


class _FaultError(Exception):
    """A call cannot be used."""

    def __init__(self, status: Status, error: str) -> None:
        super().__init__(error)
        self.status = status


class _Pieces:
    """A turn as texts and markers, read once from front to back."""

    def __init__(self, pieces: Sequence[tuple[bool, str]]) -> None:
        self._pieces = pieces
        self._next = 0

    def until(self, *markers: str) -> tuple[str, str]:
        """The text up to the next of some markers, and that marker, empty at the end. Others are text."""
        texts: list[str] = []
        while self._next < len(self._pieces):
            is_marker, text = self._pieces[self._next]
            self._next += 1
            if is_marker and text in markers:
                return "".join(texts), text
            texts.append(text)
        return "".join(texts), ""

    def first_marker(self) -> str:
        """The first marker of all; empty if there is none."""
        return next((text for is_marker, text in self._pieces if is_marker), "")


_Reader = Callable[[_Pieces], Iterator[_Said | _Called]]
# The text before the first match with no groups; then the groups of each match, and the text after it.
_Find = Callable[[str], Iterator[tuple[str, dict[str, str]]]]


class ToolCallParser:
    """Reads turns of one format; made by `parser_for`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        read: _Reader,
        markers: Sequence[str],
        *,
        opening: str = "",
    ) -> None:
        added = tokenizer.added_tokens_encoder
        self._tokenizer = tokenizer
        self._read = read
        self._marker_of = {added[marker]: marker for marker in markers if marker in added}
        spelled = [re.escape(marker) for marker in markers if marker not in added]
        self._spelled = re.compile(f"({'|'.join(spelled)})") if spelled else None
        # A marker that the prompt ends with already.
        self._opening = opening

    def parse(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """Read a turn; `tools` are those of `read_tools`. It never raises, whatever was sampled."""
        pieces = list(self._split(token_ids))
        size = sum(len(text) for _, text in pieces)
        if size > MAX_CHARACTERS:
            error = f"the turn has {size} characters, and at most {MAX_CHARACTERS} are read"
            return Parsed(status="invalid_json", error=error)
        if self._opening and _Pieces(pieces).first_marker() != self._opening:
            pieces.insert(0, (True, self._opening))
        schemas = named_tools(tools)
        said: list[_Said] = []
        calls: list[ToolCall] = []
        status: Status = "ok"
        error = ""
        try:
            for part in self._read(_Pieces(pieces)):
                if isinstance(part, _Said):
                    said.append(part)
                elif len(calls) == MAX_CALLS:
                    raise _FaultError("invalid_json", f"a turn may call at most {MAX_CALLS} tools")
                else:
                    calls.append(_checked(part, schemas, f"call{len(calls):05d}"))
        except _FaultError as fault:
            status, error = fault.status, str(fault)
        reasoning = "".join(part.text for part in said if part.is_reasoning).strip()
        content = "".join(part.text for part in said if not part.is_reasoning).strip()
        return Parsed(reasoning, content, tuple(calls), status, error)

    def _split(self, token_ids: Sequence[int]) -> Iterator[tuple[bool, str]]:
        """Texts and markers; special tokens that are no markers are left out."""
        start = 0
        places = [index for index, token in enumerate(token_ids) if token in self._marker_of]
        for place in [*places, len(token_ids)]:
            if place > start:
                text = self._tokenizer.decode(
                    list(token_ids[start:place]), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                # The odd ones of the parts are markers.
                parts = [text] if self._spelled is None else self._spelled.split(text)
                yield from ((index % 2 == 1, part) for index, part in enumerate(parts) if part)
            if place < len(token_ids):
                yield True, self._marker_of[token_ids[place]]
            start = place + 1


def _checked(called: _Called, schemas: Mapping[str, Any], number: str) -> ToolCall:
    name = _cut(called.name)
    if called.name not in schemas:
        there = ", ".join(schemas) or "none"
        raise _FaultError("unknown_tool", f"there is no tool {name!r}; there are: {there}")
    schema = schemas[called.name]
    arguments = called.arguments
    if called.is_text:
        properties = schema.get("properties") or {}
        if called.is_first:
            arguments = dict(zip(properties, arguments.values(), strict=False)) or arguments
        arguments = {key: _typed(text, properties.get(key)) for key, text in arguments.items()}
    error = _size_error(arguments) or schema_error(schema, arguments, "arguments")
    if error:
        raise _FaultError("invalid_json", f"call of {name}: {error}")
    return ToolCall(called.name, arguments, called.id if _OWN_ID.fullmatch(called.id) else number)


def _typed(text: str, schema: Any) -> Any:
    """The value of an argument that was written without quotes: JSON, unless its schema wants text."""
    types = types_of(schema)
    if "string" in types:
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _size_error(value: Any) -> str:
    """Why a value read by `json` is refused whatever the schema: it is too deep, or no Unicode text."""
    below = [(value, 1)]
    while below:
        value, depth = below.pop()
        if depth > MAX_DEPTH:
            return f"the arguments are nested more than {MAX_DEPTH} deep"
        if isinstance(value, dict):
            below += [(entry, depth + 1) for entry in (*value, *value.values())]
        elif isinstance(value, list):
            below += [(entry, depth + 1) for entry in value]
        elif isinstance(value, str) and _HALF.search(value):
            return "the arguments hold half a character, which is not Unicode text"
    return ""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


# Refuses with ValueError what is not JSON, NaN and numbers beyond a float included.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _json_at(text: str, start: int, what: str) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends; one that the text cuts off is `unclosed`."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text) or error.msg.startswith("Unterminated string")
        status: Status = "unclosed" if is_cut else "invalid_json"
        raise _FaultError(status, f"{what} is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise _FaultError("invalid_json", f"{what} is not JSON: {error}") from None


def _whole_json(text: str, what: str) -> Any:
    """The one JSON value that a text with no closing marker is."""
    value, end = _json_at(text, _past_space(text, 0), what)
    if text[end:].strip():
        raise _FaultError("invalid_json", f"{what}: something follows it")
    return value


def _past_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


def _json(text: str, what: str) -> Any:
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise _FaultError("invalid_json", f"{what} is not JSON: {error}") from None


def _json_object(text: str, name: str) -> dict[str, Any]:
    value = _json(text, f"call of {_cut(name)}: the text of its arguments")
    return _object(value, f"call of {_cut(name)}: its arguments")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _FaultError("invalid_json", f"{what} is {json_kind(value)}, not an object")
    return value


def _arguments(text: str, name: str) -> dict[str, Any]:
    what = f"call of {_cut(name)}: arguments"
    return _object(_whole_json(text, what), what)


def _named(value: Any, what: str) -> _Called:
    """A call written as `{"name": ..., "arguments": {...}}`; Llama says `parameters`."""
    call = _object(value, what)
    name = call.get("name")
    if not isinstance(name, str):
        raise _FaultError("invalid_json", f"{what} has no name")
    given = next((call[key] for key in ("arguments", "parameters") if key in call), None)
    number = call.get("id")
    arguments = _object(given, f"call of {_cut(name)}: arguments")
    return _Called(name, arguments, number if isinstance(number, str) else "")


def _cut(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:100]}..."


def _unclosed(what: str) -> _FaultError:
    return _FaultError("unclosed", f"{what} does not end")


def _reasoning(pieces: _Pieces, start: str = THINK, end: str = THINK_END) -> Iterator[_Said]:
    """The reasoning in front of all else; all before a last marker without a first one is reasoning."""
    first = pieces.first_marker()
    if first == start:
        yield _Said(pieces.until(start)[0])
    if first in (start, end):
        text, marker = pieces.until(end)
        yield _Said(text, is_reasoning=True)
        if not marker:
            raise _unclosed("the reasoning")


def _blocks(pieces: _Pieces) -> Iterator[_Said | str]:
    """Text, and as bare strings what is between the markers of calls."""
    yield from _reasoning(pieces)
    text, marker = pieces.until(CALL)
    while True:
        yield _Said(text)
        if not marker:
            return
        text, marker = pieces.until(CALL, CALL_END)
        if marker != CALL_END:
            raise _unclosed("a call")
        yield text
        text, marker = pieces.until(CALL)


def _read_hermes(pieces: _Pieces) -> Iterator[_Said | _Called]:
    for block in _blocks(pieces):
        yield block if isinstance(block, _Said) else _named(_json(block, "a call"), "a call")


def _read_qwen3_coder(pieces: _Pieces) -> Iterator[_Said | _Called]:
    for block in _blocks(pieces):
        if isinstance(block, _Said):
            yield block
            continue
        function = _FUNCTION.fullmatch(block)
        if not function:
            raise _FaultError("invalid_json", "a call is not <function=NAME> ... </function>")
        name, start = function[1].strip(), function.start(2)
        arguments: dict[str, str] = {}
        while parameter := _PARAMETER.match(block, start, function.end(2)):
            _add(arguments, parameter[1].strip(), parameter[2].removeprefix("\n").removesuffix("\n"), name)
            start = parameter.end()
        if block[start : function.end(2)].strip():
            error = f"call of {_cut(name)}: an argument is not <parameter=NAME> ... </parameter>"
            raise _FaultError("invalid_json", error)
        yield _Called(name, arguments, is_text=True)


def _add(arguments: dict[str, str], key: str, value: str, name: str) -> None:
    if key in arguments:
        raise _FaultError("invalid_json", f"call of {_cut(name)}: it gives {_cut(key)} twice")
    arguments[key] = value


def _read_glm(pieces: _Pieces) -> Iterator[_Said | _Called]:
    for block in _blocks(pieces):
        if isinstance(block, _Said):
            yield block
            continue
        name = block.partition("<arg_key>")[0]
        start, arguments = len(name), dict[str, str]()
        name = name.strip()
        while argument := _ARGUMENT.match(block, start):
            _add(arguments, argument[1].strip(), argument[2], name)
            start = argument.end()
        if block[start:].strip():
            error = f"call of {_cut(name)}: an argument is not <arg_key>NAME</arg_key> <arg_value>..."
            raise _FaultError("invalid_json", error)
        yield _Called(name, arguments, is_text=True)


def _read_llama3(pieces: _Pieces) -> Iterator[_Said | _Called]:
    text, marker = pieces.until(PYTHON)
    if marker or not _LLAMA_CALL.match(text):
        yield _Said(text)
        if not marker:
            return
        text = pieces.until()[0]
    calls = text.rstrip()
    start = _past_space(calls, 0)
    while True:
        call, start = _json_at(calls, start, "a call")
        yield _named(call, "a call")
        start = _past_space(calls, start)
        if start == len(calls):
            return
        if calls[start] != ";":
            raise _FaultError("invalid_json", "between calls there is something else than a semicolon")
        start = _past_space(calls, start + 1)


def _read_mistral(pieces: _Pieces) -> Iterator[_Said | _Called]:
    yield from _reasoning(pieces, MISTRAL_THINK, MISTRAL_THINK_END)
    text, marker = pieces.until(CALLS)
    yield _Said(text)
    while marker:
        text, marker = pieces.until(CALLS, ARGS, CALL_ID)
        if marker in ("", CALLS):
            # Older models write a list of calls, or the name and the arguments side by side.
            name, brace, rest = text.partition("{")
            if text.lstrip().startswith("["):
                calls = _whole_json(text, "the list of calls")
                yield from (_named(call, "a call") for call in calls)
            else:
                yield _Called(name.strip(), _arguments(brace + rest, name.strip()))
            continue
        name, number = text.strip(), ""
        if marker == CALL_ID:
            number, marker = pieces.until(ARGS)
        text, marker = pieces.until(CALLS)
        yield _Called(name, _arguments(text, name), number.strip())


def _read_deepseek(pieces: _Pieces) -> Iterator[_Said | _Called]:
    yield from _reasoning(pieces)
    text, marker = pieces.until(DEEPSEEK_CALLS)
    yield _Said(text)
    if not marker:
        return
    while True:
        _, marker = pieces.until(DEEPSEEK_CALL, DEEPSEEK_CALLS_END)
        if marker == DEEPSEEK_CALLS_END:
            yield _Said(pieces.until()[0])
            return
        name, separator = pieces.until(DEEPSEEK_SEP, DEEPSEEK_CALL_END)
        if separator == DEEPSEEK_CALL_END:
            raise _FaultError("invalid_json", f"a call has no {DEEPSEEK_SEP}")
        text, ending = pieces.until(DEEPSEEK_CALL_END)
        if not (marker and separator and ending):
            raise _unclosed("a call")
        fenced = _FENCED.fullmatch(text)
        if fenced and name.strip() == "function":
            # Up to version 3 the name follows, and the arguments are in a block of code.
            name, text = fenced[1], fenced[2]
        yield _Called(name.strip(), _json_object(text, name.strip()))


def _read_harmony(pieces: _Pieces) -> Iterator[_Said | _Called]:
    headers: list[str] = []
    while True:
        text, marker = pieces.until(*HARMONY)
        if not marker:
            # Without a header it is text, as of a policy that does not know the format.
            yield _Said("" if headers else text)
            return
        headers += [text, marker]
        if marker in (END, RETURN, HARMONY_CALL):
            headers = []
        if marker != MESSAGE:
            continue
        header, headers = " ".join(headers), []
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        body, marker = pieces.until(END, RETURN, HARMONY_CALL, START)
        if recipient:
            name = recipient[1].removeprefix("functions.")
            if marker != HARMONY_CALL:
                raise _unclosed(f"the call of {_cut(name)}")
            yield _Called(name, _json_object(body, name))
            continue
        is_reasoning = channel is not None and channel[1] == "analysis"
        yield _Said(body, is_reasoning)
        if is_reasoning and not marker:
            raise _unclosed("the reasoning")


def _read_pattern(pieces: _Pieces, find: _Find, tool: str | None) -> Iterator[_Said | _Called]:
    yield from _reasoning(pieces)
    parts = find(pieces.until()[0])
    yield _Said(next(parts)[0])
    for between, groups in parts:
        if tool is not None:
            yield _Called(tool, groups, is_text=True, is_first=True)
        else:
            yield _Called(groups["name"].strip(), _json_object(groups["arguments"], groups["name"].strip()))
        yield _Said(between)


def _finder(pattern: str, tool: str | None) -> _Find:
    """A function that splits a text at the matches of a pattern, in linear time: RE2, which pyarrow has."""
    import pyarrow
    import pyarrow.compute

    try:
        matches = pyarrow.compute.extract_regex(pyarrow.array([""]), pattern=pattern)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"the pattern of tool calls {pattern!r} is not a pattern of RE2: {error}") from None
    names = [matches.type.field(index).name for index in range(matches.type.num_fields)]
    wanted = ["name", "arguments"] if tool is None else ["argument"]
    if sorted(names) != sorted(wanted):
        need = " and ".join(f"(?P<{name}>...)" for name in wanted)
        raise DataError(f"the pattern of tool calls {pattern!r} needs the groups {need} and no others")
    if matches[0].is_valid:
        raise DataError(f"the pattern of tool calls {pattern!r} matches no text at all; make it longer")

    def find(text: str) -> Iterator[tuple[str, dict[str, str]]]:
        mark = f"\0{_word_outside(text)}\0"
        replacement = mark + mark.join(rf"\{number}" for number in range(1, len(names) + 1)) + mark
        replaced = pyarrow.compute.replace_substring_regex(
            pyarrow.array([text], pyarrow.large_string()),
            pattern=pattern,
            replacement=replacement,
            max_replacements=MAX_CALLS + 1,
        )
        before, *parts = replaced[0].as_py().split(mark)
        yield before, {}
        step = len(names) + 1
        for start in range(0, len(parts), step):
            yield parts[start + step - 1], dict(zip(names, parts[start : start + step - 1], strict=True))

    return find


def _word_outside(text: str) -> str:
    """A word that does not occur in a text."""
    return "m" + "k" * (max(map(len, re.findall("k+", text)), default=0) + 1)


# Of each format: how it is read, its markers, and what the chat templates of its models have in them.
_THINKS = (THINK, THINK_END)
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = (DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END)
_FORMATS: Mapping[str, tuple[_Reader, tuple[str, ...], tuple[str, ...]]] = {
    "harmony": (_read_harmony, HARMONY, (CHANNEL,)),
    "deepseek": (_read_deepseek, (*_THINKS, *_DEEPSEEK), (DEEPSEEK_CALLS,)),
    "glm": (_read_glm, (*_THINKS, CALL, CALL_END, *_ARGUMENTS), _ARGUMENTS),
    "qwen3_coder": (_read_qwen3_coder, (*_THINKS, CALL, CALL_END), ("<function=",)),
    "hermes": (_read_hermes, (*_THINKS, CALL, CALL_END), (CALL,)),
    "mistral": (_read_mistral, (MISTRAL_THINK, MISTRAL_THINK_END, CALLS, ARGS, CALL_ID), (CALLS,)),
    "llama3": (_read_llama3, (PYTHON,), (PYTHON, "<|start_header_id|>")),
}
PATTERN = "pattern"
FORMATS = (AUTO, *_FORMATS, PATTERN)


def parser_for(
    format: str, tokenizer: PreTrainedTokenizerBase, *, pattern: str | None = None, tool: str | None = None
) -> ToolCallParser:
    """The parser of a format: one of FORMATS, where `auto` is what the tokenizer's chat template writes.

    The format `pattern` takes a regular expression (RE2) for a call, with the groups `name` and `arguments`
    (a JSON object), or, if a `tool` is given, the group `argument`: its text is that tool's first parameter.
    DataError for another format or pattern, and for a chat template of no known format.
    """
    if (format == PATTERN) is (pattern is None) or (tool is not None and pattern is None):
        raise DataError("the tool-call format pattern, and no other, needs a pattern, and may have a tool")
    if format == AUTO:
        format = _format_of(tokenizer)
    opening = _opening(tokenizer)
    if pattern is not None:
        read = partial(_read_pattern, find=_finder(pattern, tool), tool=tool)
        return ToolCallParser(tokenizer, read, _THINKS, opening=opening if opening in _THINKS else "")
    if format not in _FORMATS:
        raise DataError(f"there is no tool-call format {format!r}; {did_you_mean(format, FORMATS)}")
    reader, markers, _ = _FORMATS[format]
    return ToolCallParser(tokenizer, reader, markers, opening=opening if opening in markers else "")


def _format_of(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else " ".join(template.values())
    for format, (_, _, traces) in _FORMATS.items():
        if any(trace in text for trace in traces):
            return format
    raise DataError(
        "the tokenizer's chat template writes tool calls in no known format; name one: "
        + ", ".join(FORMATS[1:])
    )


def _opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """The marker of reasoning that the chat template ends a prompt with; empty if it does not."""
    if not tokenizer.chat_template:
        return ""
    text = chat_text(tokenizer, [{"role": "user", "content": "question"}], "a question").rstrip()
    return next((marker for marker in (THINK, MISTRAL_THINK) if text.endswith(marker)), "")
