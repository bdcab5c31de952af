"""Variables and files of chat templates: what is written, what saved tokenizers keep, what is refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from millrace.data.chat import chat_text
from millrace.data.chat_template import set_chat_template
from millrace.data.rows import DataError
from millrace.data.tokenizers import load_tokenizer
from tests.data.chat_templates import tokenizer_with

MESSAGES = [{"role": "user", "content": "1 + 2?"}]
# As Qwen3's: on unless the variable is false; in a macro, as some models have it.
TEMPLATE = (
    "{% macro begin() %}<{% if enable_thinking is defined and enable_thinking is false %}no {% endif %}"
    "thinking>{% endmacro %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ begin() }}{{ note | default('') }}{% endif %}"
)


def templated(template: Any = TEMPLATE) -> Any:
    made = deepcopy(tokenizer_with("chatml"))
    made.chat_template = template
    return made


def written(tokenizer: Any) -> str:
    return chat_text(tokenizer, MESSAGES, "here")


def test_a_variable_is_set_for_every_text_also_in_macros_and_after_saving(tmp_path: Path) -> None:
    tokenizer = templated()
    assert written(tokenizer) == "1 + 2?<thinking>"
    for _ in range(2):  # the second time changes nothing
        set_chat_template(tokenizer, {"enable_thinking": False})
        assert written(tokenizer) == "1 + 2?<no thinking>"
    tokenizer.save_pretrained(tmp_path)
    assert written(load_tokenizer(tmp_path)) == "1 + 2?<no thinking>"
    set_chat_template(tokenizer, {})
    assert written(tokenizer) == "1 + 2?<no thinking>"


@pytest.mark.parametrize("value", ["%}\"'\\ \n{{ x }} é 日", "", 7, 0.5, True])
def test_values_arrive_as_they_are(value: Any) -> None:
    tokenizer = templated("{{ note }}|{{ messages[0].content }}")
    set_chat_template(tokenizer, {"note": value})
    assert written(tokenizer) == f"{value}|1 + 2?"


def test_a_line_break_at_the_beginning_of_a_template_stays() -> None:
    tokenizer = templated("\n\n{{ note }}")
    before = written(tokenizer)
    set_chat_template(tokenizer, {"note": "x"})
    assert written(tokenizer) == f"{before}x" == "\n\nx"


def test_a_file_replaces_the_template_and_takes_variables(tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text("é{{ note }}: {{ messages[0].content }}", encoding="utf-8")
    tokenizer = templated(None)
    set_chat_template(tokenizer, {"file": str(file), "note": "n"})
    assert written(tokenizer) == "én: 1 + 2?"
    set_chat_template(tokenizer, {"file": str(file), "note": "m"})
    assert written(tokenizer) == "ém: 1 + 2?"


def test_each_of_several_templates_gets_the_variables() -> None:
    tokenizer = templated({"default": TEMPLATE, "tool_use": TEMPLATE})
    set_chat_template(tokenizer, {"enable_thinking": False})
    assert written(tokenizer) == "1 + 2?<no thinking>"


def test_what_would_have_no_effect_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    cases = [
        (
            TEMPLATE,
            {"enable_thinkin": False},
            "sets enable_thinkin, which the tokenizer's chat template does not",
        ),
        (
            None,
            {"enable_thinking": False},
            "sets enable_thinking and the tokenizer has no chat template; name",
        ),
        (TEMPLATE, {"file": "gone.jinja"}, "file gone.jinja cannot be read as text: No such file"),
        (TEMPLATE, {"file": str(tmp_path / "bad.jinja")}, "bad.jinja cannot be read as text: 'utf-8' codec"),
    ]
    for template, options, message in cases:
        tokenizer = templated(template)
        with pytest.raises(DataError, match=message):
            set_chat_template(tokenizer, options)
