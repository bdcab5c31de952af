"""The chat template of a tokenizer: another file, and options such as `enable_thinking`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.inputs import TEMPLATE_FILE
from millrace.data.rows import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Option = bool | int | float | str


def set_chat_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Option]) -> None:
    """Give a tokenizer the template in the file that the option `file` names, and set the other options.

    Options become variables at the beginning of the template, so every program that loads the saved tokenizer
    writes the same text. Setting the same options again changes nothing.

    Raises:
        DataError: the file cannot be read, there is no template, or it does not use an option.
    """
    variables = {name: value for name, value in options.items() if name != TEMPLATE_FILE}
    if TEMPLATE_FILE in options:
        tokenizer.chat_template = _read(Path(str(options[TEMPLATE_FILE])))
    if not variables:
        return
    template = tokenizer.chat_template
    if not template:
        raise DataError(
            f"tokenizer.chat_template sets {', '.join(variables)} and the tokenizer has no chat template; "
            f"name its file in tokenizer.chat_template.{TEMPLATE_FILE}"
        )
    # A tokenizer may have several templates by name, of which messages and tools choose one.
    if isinstance(template, dict):
        tokenizer.chat_template = {name: _with_variables(text, variables) for name, text in template.items()}
    else:
        tokenizer.chat_template = _with_variables(template, variables)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"tokenizer.chat_template.{TEMPLATE_FILE} {file} cannot be read as text: {reason}"
        ) from None


def _with_variables(template: str, variables: Mapping[str, Option]) -> str:
    # Jinja writes these values as JSON does.
    opening = "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in variables.items())
    if template.startswith(opening):
        return template
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise DataError(
                f"tokenizer.chat_template sets {name}, which the tokenizer's chat template does not use; "
                "remove it, or correct its name"
            )
    # Jinja drops one line break after a block.
    return f"{opening}\n{template}" if template.startswith("\n") else opening + template
