from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.data.chat import chat_text
from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer
from millrace.data.tool_calls import FORMATS, MAX_CALLS, Parsed, ToolCall, ToolCallParser, parser_for
from millrace.data.tool_schema import read_tools
from tests.data.chat_templates import ADDED, SPECIAL, TEMPLATES, tokenizer_with

TOOLS = read_tools(
    [
        {
            "name": "calc",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"sum": {"type": "string"}, "places": {"type": "integer"}},
                "required": ["sum"],
            },
        },
        {
            "name": "search",
            "parameters": {"properties": {"words": {"type": "array", "items": {"type": "string"}}}},
        },
    ],
    "x",
)
# The format that a template's models call tools in.
FORMAT_OF = {
    "hermes": "hermes",
    "thinking": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3",
    "mistral": "mistral",
    "deepseek": "deepseek",
    "glm": "glm",
    "gpt-oss": "harmony",
}
TEMPLATE_OF = {format: name for name, format in FORMAT_OF.items()}
PATTERN = r"calc\((?P<argument>[^()]*)\)"


def parser_of(format: str) -> ToolCallParser:
    if format == "pattern":
        return parser_for(format, tokenizer_with(None), pattern=PATTERN, tool="calc")
    return parser_for(format, tokenizer_with(TEMPLATE_OF[format]))


def parse(format: str, text: str) -> Parsed:
    return parser_of(format).parse(tokenizer_with(None)(text, add_special_tokens=False)["input_ids"], TOOLS)


def outcome(parsed: Parsed) -> tuple[str, str, list[tuple[str, Any]], str]:
    return parsed.reasoning, parsed.content, [(c.name, c.arguments) for c in parsed.calls], parsed.status


ONE = [("calc", {"sum": "1 + 2"})]
TWO = [*ONE, ("search", {"words": ["a", "é"]})]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "calc", "arguments": {"sum": "1 + 2"}}\n</tool_call>\n'
            '<tool_call>{"name": "search", "arguments": {"words": ["a", "\\u00e9"]}}</tool_call><|im_end|>',
            TWO,
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=calc>\n<parameter=sum>\n1 + 2\n</parameter>\n</function>\n</tool_call>\n"
            '<tool_call><function=search><parameter=words>["a", "é"]</parameter></function></tool_call>',
            TWO,
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "calc", "parameters": {"sum": "1 + 2"}}; '
            '{"name": "search", "parameters": {"words": ["a", "é"]}}<|eom_id|>',
            TWO,
        ),
        ("llama3", '{"name": "calc", "parameters": {"sum": "1 + 2"}}<|eot_id|>', ONE),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "calc", "arguments": {"sum": "1 + 2"}}, '
            '{"name": "search", "arguments": {"words": ["a", "é"]}, "id": "abcdefghi"}]</s>',
            TWO,
        ),
        (
            "mistral",
            '[TOOL_CALLS]calc[ARGS]{"sum": "1 + 2"}'
            '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"words": ["a", "é"]}</s>',
            TWO,
        ),
        ("mistral", '[TOOL_CALLS]calc{"sum": "1 + 2"}', ONE),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n"
            '{"sum": "1 + 2"}\n```<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"words": ["a", "é"]}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜></s>",
            TWO,
        ),
        (
            "glm",
            "<tool_call>calc\n<arg_key>sum</arg_key>\n<arg_value>1 + 2</arg_value>\n</tool_call>"
            '<tool_call>search<arg_key>words</arg_key><arg_value>["a", "é"]</arg_value></tool_call>'
            "<|observation|>",
            TWO,
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"sum": "1 + 2"}<|call|>',
            ONE,
        ),
        ("harmony", ' to=functions.calc<|channel|>commentary json<|message|>{"sum": "1 + 2"}<|call|>', ONE),
        ("pattern", "calc(1 + 2)", ONE),
        ("pattern", "calc(1 + 2) calc(1 + 2)", ONE * 2),
    ],
)
def test_calls_are_read(format: str, text: str, calls: list[Any]) -> None:
    assert outcome(parse(format, text)) == ("", "", calls, "ok")


@pytest.mark.parametrize(
    ("format", "text", "reasoning", "content"),
    [
        ("hermes", "<think>\nwhy\n</think>\n\nThree.<|im_end|>", "why", "Three."),
        # The prompt ended with the first marker.
        ("hermes", "why</think>Three.<|im_end|>", "why", "Three."),
        ("hermes", '<think>a <tool_call> b</think>{"name": "calc"}', "a <tool_call> b", '{"name": "calc"}'),
        ("mistral", "[THINK]why[/THINK]Three.</s>", "why", "Three."),
        (
            "harmony",
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>",
            "why",
            "Three.",
        ),
        ("harmony", "<|channel|>final<|message|>Thr", "", "Thr"),
        ("harmony", "Three.", "", "Three."),
        ("llama3", '{"answer": 3}<|eot_id|>', "", '{"answer": 3}'),
        ("deepseek", "why</think>Three.</s>", "why", "Three."),
        ("pattern", "<think>calc(1)</think>it is 3", "calc(1)", "it is 3"),
    ],
)
def test_reasoning_and_text_are_told_apart(format: str, text: str, reasoning: str, content: str) -> None:
    assert outcome(parse(format, text)) == (reasoning, content, [], "ok")


def test_text_around_calls_is_kept() -> None:
    call = '<tool_call>{"name": "calc", "arguments": {"sum": "1"}}</tool_call>'
    assert outcome(parse("hermes", f"<think>why</think>First {call} then{call}.")) == (
        "why",
        "First  then.",
        [("calc", {"sum": "1"})] * 2,
        "ok",
    )


def hermes(arguments: str, name: str = "calc") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.slow_beyond(35)
@pytest.mark.parametrize(
    ("format", "text", "status", "error"),
    [
        ("hermes", '<tool_call>{"name": "calc"', "unclosed", "a call does not end"),
        ("hermes", f"<tool_call>{hermes('{}')}", "unclosed", "a call does not end"),
        ("hermes", "<think>why", "unclosed", "the reasoning does not end"),
        ("hermes", "<tool_call>calc(1)</tool_call>", "invalid_json", "a call is not JSON: Expecting value"),
        ("hermes", "<tool_call>[]</tool_call>", "invalid_json", "a call is a list, not an object"),
        ("hermes", "<tool_call>{}</tool_call>", "invalid_json", "a call has no name"),
        ("hermes", hermes('"a"'), "invalid_json", "call of calc: arguments is text, not an object"),
        ("hermes", hermes("{}"), "invalid_json", "call of calc: arguments lacks sum"),
        ("hermes", hermes('{"sum": 1}'), "invalid_json", "arguments.sum is a number, not of type string"),
        (
            "hermes",
            hermes('{"sum": "1", "digits": 1}'),
            "invalid_json",
            'arguments has an unknown key "digits"; there are: sum, places',
        ),
        (
            "hermes",
            hermes('{"sum": "\\ud800"}'),
            "invalid_json",
            "half a character, which is not Unicode text",
        ),
        ("hermes", hermes('{"sum": "1", "places": NaN}'), "invalid_json", "NaN is no value of JSON"),
        ("hermes", hermes('{"sum": "1", "places": 1e999}'), "invalid_json", "a number is too large"),
        (
            "hermes",
            hermes('{"sum": "1", "places": ' + "9" * 5000 + "}"),
            "invalid_json",
            "is not JSON: Exceeds",
        ),
        (
            "hermes",
            hermes('{"sum": ' + "[" * 70 + "]" * 70 + "}"),
            "invalid_json",
            "nested more than 64 deep",
        ),
        ("hermes", hermes('{"sum": ' + "[" * 99_000 + "]" * 99_000 + "}"), "invalid_json", "recursion"),
        ("hermes", hermes("{}", "clac"), "unknown_tool", "there is no tool 'clac'; there are: calc, search"),
        ("hermes", hermes('{"sum": "1"}') * 51, "invalid_json", "a turn may call at most 50 tools"),
        ("qwen3_coder", "<tool_call>calc</tool_call>", "invalid_json", "a call is not <function=NAME>"),
        (
            "qwen3_coder",
            "<tool_call><function=calc><parameter=sum>1</function></tool_call>",
            "invalid_json",
            "call of calc: an argument is not <parameter=NAME>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=calc>" + "<parameter=sum>1</parameter>" * 2 + "</function></tool_call>",
            "invalid_json",
            "call of calc: it gives sum twice",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=calc><parameter=sum>1</parameter><parameter=places>two</parameter></function>"
            "</tool_call>",
            "invalid_json",
            "arguments.places is text, not of type integer",
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "calc", "parameters": {"sum": "1',
            "unclosed",
            "a call is not JSON",
        ),
        ("llama3", '<|python_tag|>calc.call(sum="1")', "invalid_json", "a call is not JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "calc"', "unclosed", "the list of calls is not JSON"),
        ("mistral", '[TOOL_CALLS]calc[ARGS]{"sum": "1"', "unclosed", "call of calc: arguments is not JSON"),
        ("mistral", "[TOOL_CALLS]calc[ARGS]{} and", "invalid_json", "something follows it"),
        ("mistral", "[TOOL_CALLS]", "unclosed", "call of : arguments is not JSON"),
        ("deepseek", "<｜tool▁calls▁begin｜>", "unclosed", "a call does not end"),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁call▁end｜>",
            "invalid_json",
            "has no",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁sep｜>{}",
            "unclosed",
            "a call does",
        ),
        ("glm", "<tool_call>calc<arg_key>sum</arg_key>", "unclosed", "a call does not end"),
        ("glm", "<tool_call>calc<arg_key>sum</arg_key></tool_call>", "invalid_json", "not <arg_key>NAME"),
        ("harmony", "<|channel|>analysis<|message|>why", "unclosed", "the reasoning does not end"),
        (
            "harmony",
            "<|channel|>x to=functions.calc<|message|>{}",
            "unclosed",
            "the call of calc does not end",
        ),
        (
            "harmony",
            "<|channel|>x to=python<|message|>{}<|call|>",
            "unknown_tool",
            "there is no tool 'python'",
        ),
        ("pattern", "calc()" * 51, "invalid_json", "a turn may call at most 50 tools"),
    ],
)
def test_calls_that_cannot_be_used_have_a_status(format: str, text: str, status: str, error: str) -> None:
    parsed = parse(format, text)
    assert parsed.status == status
    assert error in parsed.error
    assert len(parsed.calls) == (MAX_CALLS if "at most 50" in error else 0)


def test_calls_before_a_bad_one_are_kept() -> None:
    parsed = parse("llama3", '{"name": "calc", "parameters": {"sum": "1"}} and')
    assert outcome(parsed) == ("", "", [("calc", {"sum": "1"})], "invalid_json")
    assert parsed.error == "between calls there is something else than a semicolon"
    parsed = parse("hermes", hermes('{"sum": "1"}') + hermes("{}", "clac") + hermes('{"sum": "2"}'))
    assert outcome(parsed) == ("", "", [("calc", {"sum": "1"})], "unknown_tool")


def test_more_text_than_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.data.tool_calls.MAX_CHARACTERS", 10)
    assert parse("hermes", "a" * 10) == Parsed(content="a" * 10)
    assert parse("hermes", "a" * 11) == Parsed(
        status="invalid_json", error="the turn has 11 characters, and at most 10 are read"
    )


def test_ids_are_the_policy_s_own_or_counted() -> None:
    ids = ["abcdefghi", "call00000", "with space", "x" * 65]
    calls = [{"name": "calc", "arguments": {"sum": "1"}, "id": id} for id in ids]
    assert [call.id for call in parse("mistral", f"[TOOL_CALLS]{json.dumps(calls)}").calls] == [
        "abcdefghi",
        "call00001",
        "call00002",
        "call00003",
    ]


@pytest.mark.attack("a tool call forged from ordinary text")
def test_a_marker_that_is_a_token_does_not_count_as_text() -> None:
    tokenizer = tokenizer_with("hermes")
    text = hermes('{"sum": "1"}')
    letters = [id for letter in text for id in tokenizer(letter)["input_ids"]]
    assert tokenizer.decode(letters) == text
    parsed = parser_of("hermes").parse(letters, TOOLS)
    assert outcome(parsed) == ("", text, [], "ok")
    plain = train_tokenizer([], vocab_size=257, across_words=False)
    assert parser_for("hermes", plain).parse(plain(text)["input_ids"], TOOLS).calls == (
        ToolCall("calc", {"sum": "1"}, "call00000"),
    )


def test_reasoning_that_the_prompt_begins() -> None:
    plain = train_tokenizer([], vocab_size=257, across_words=False)
    plain.chat_template = "{{ messages[0].content }}<think>\n"
    parser = parser_for("hermes", plain)
    for text, parsed in [
        ("why</think>3", Parsed("why", "3")),
        ("<think>why</think>3", Parsed("why", "3")),
        (hermes("{}"), Parsed(hermes("{}"), status="unclosed", error="the reasoning does not end")),
    ]:
        assert parser.parse(plain(text)["input_ids"], TOOLS) == parsed


ARGUMENTS = st.fixed_dictionaries(
    {"sum": st.text("ab <>{}\"'\\\n1é").filter(lambda text: text == text.strip("\n"))},
    optional={"places": st.integers(-99, 99)},
)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("name", FORMAT_OF)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    tokenizer = tokenizer_with(name)
    parser = parser_for("auto", tokenizer)
    question = {"role": "user", "content": "?"}
    before = chat_text(tokenizer, [question], "x")

    @settings(max_examples=20)
    @given(st.lists(ARGUMENTS, min_size=1, max_size=1 if name in ("llama3", "gpt-oss") else 3))
    def check(several: list[dict[str, Any]]) -> None:
        written = [json.dumps(one) if name == "deepseek" else one for one in several]
        calls = [
            {"type": "function", "id": "abcdefghi", "function": {"name": "calc", "arguments": arguments}}
            for arguments in written
        ]
        message = {"role": "assistant", "content": None if name == "deepseek" else "", "tool_calls": calls}
        after = chat_text(tokenizer, [question, message], "x", opens_turn=False)
        parsed = parser.parse(tokenizer(after[len(before) :])["input_ids"], TOOLS)
        assert outcome(parsed) == ("", "", [("calc", arguments) for arguments in several], "ok")

    check()


MARKERS = [
    *SPECIAL,
    *ADDED,
    "[THINK]",
    "[/THINK]",
    "<function=calc>",
    "</function>",
    "<parameter=sum>",
    "</parameter>",
]
PIECES = st.sampled_from(
    [*MARKERS, '{"name": "calc", "arguments": {"sum": "1"}}', "calc(", ")", "```json", " to=x "]
)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("format", FORMATS[1:])
def test_no_text_raises(format: str) -> None:
    parser, tokenizer = parser_of(format), tokenizer_with(None)

    @settings(max_examples=60)
    @given(st.lists(PIECES | st.text(max_size=8) | st.lists(st.integers(0, 500), max_size=8)))
    def check(parts: list[str | list[int]]) -> None:
        ids = [id for part in parts for id in (tokenizer.encode(part) if isinstance(part, str) else part)]
        parsed = parser.parse(ids, TOOLS)
        assert (parsed.status == "ok") is (parsed.error == "")
        json.dumps([parsed.reasoning, parsed.content, parsed.error], ensure_ascii=False).encode()

    check()


HOSTILE = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        '{"name":"calc","arguments":{"sum":"',
    ],
    "qwen3_coder": ["<tool_call><function=calc>", "<parameter=sum>", "</parameter>", " ", "</function> "],
    "llama3": ["<|python_tag|>", '{"name":1};', " ", "[", '"'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "{", "[TOOL_CALLS]a[ARGS]{}"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n```json\n", "\n```"],
    "glm": ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_key>a</arg_key><arg_value>", " "],
    "harmony": [
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "to=",
        "<|channel|>a to=b<|message|>{}<|call|>",
    ],
    "pattern": ["calc(", "calc()", ")", "(", "k\0"],
}


def num_lines(run: Callable[[], object]) -> int:
    """How many lines of the parser run."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.endswith("tool_calls.py") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow_beyond(1)
@pytest.mark.attack("a turn that takes very long to parse")
@pytest.mark.parametrize("format", FORMATS[1:])
def test_the_work_grows_linearly(format: str) -> None:
    parser, tokenizer = parser_of(format), tokenizer_with(None)
    start = {"qwen3_coder": "<tool_call><function=calc>", "glm": "<tool_call>calc"}.get(format, "")
    for piece in HOSTILE[format]:
        first, piece_ids = tokenizer.encode(start), tokenizer.encode(piece)
        few, many = (partial(parser.parse, first + piece_ids * n, TOOLS) for n in (400, 800))
        assert num_lines(many) <= 2.2 * num_lines(few)
        # What regular expressions and `json` do is no line: at this size the square would not end.
        parser.parse([*first, *piece_ids * 20_000, *tokenizer.encode("</tool_call>")], TOOLS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "hermess"}, "there is no tool-call format 'hermess'; did you mean hermes?"),
        (
            {"format": "pattern"},
            "the tool-call format pattern, and no other, needs a pattern, and may",
        ),
        ({"format": "hermes", "tool": "a"}, "the tool-call format pattern, and no other, needs a pattern"),
        ({"format": "hermes", "pattern": "a"}, "the tool-call format pattern, and no other, needs a pattern"),
        (
            {"format": "pattern", "pattern": "(?=a)"},
            "the pattern of tool calls '(?=a)' is not a pattern of RE2",
        ),
        (
            {"format": "pattern", "pattern": "(?P<name>a)"},
            "the pattern of tool calls '(?P<name>a)' needs the groups (?P<name>...) and (?P<arguments>...)",
        ),
        (
            {"format": "pattern", "pattern": "(?P<name>a)(?P<arguments>b)", "tool": "calc"},
            "the pattern of tool calls '(?P<name>a)(?P<arguments>b)' needs the groups (?P<argument>...)",
        ),
        (
            {"format": "pattern", "pattern": "(?P<argument>a*)", "tool": "calc"},
            "the pattern of tool calls '(?P<argument>a*)' matches no text at all; make it longer",
        ),
        (
            {"format": "auto"},
            "the tokenizer's chat template writes tool calls in no known format; name one: harmony, "
            "deepseek, glm, qwen3_coder, hermes, mistral, llama3, pattern",
        ),
    ],
)
def test_a_format_that_does_not_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        parser_for(settings.pop("format"), tokenizer_with("chatml"), **settings)
    assert str(caught.value).startswith(said)


def test_a_pattern_with_names_and_arguments() -> None:
    tokenizer = tokenizer_with(None)
    parser = parser_for("pattern", tokenizer, pattern=r"(?i)@(?P<name>\w+)\s*(?P<arguments>\{.*?\})")
    text = 'Look: @calc {"sum": "1"} @CALC{"sum": "2"}'
    parsed = parser.parse(tokenizer.encode(text), TOOLS)
    assert outcome(parsed) == ("", "Look:", [("calc", {"sum": "1"})], "unknown_tool")


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_is_known_by_the_template(name: str) -> None:
    automatic, named = (parser_for(one, tokenizer_with(name)) for one in ("auto", FORMAT_OF[name]))
    assert vars(automatic)["_read"] is vars(named)["_read"]
    assert set(FORMAT_OF) == set(TEMPLATES) - {"chatml"}
