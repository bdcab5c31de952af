"""From the prompt of a row to the text and tokens the policy sees: a plain template, or the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.config.inputs import AUTO
from millrace.data.rows import DataError, json_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT = "chat"


def template_of(template: str, prompt: Any) -> str:
    """The template that a prompt gets: `auto` is `chat` for messages, and the text itself for text."""
    if template != AUTO:
        return template
    return CHAT if isinstance(prompt, list) else "{prompt}"


def render(
    tokenizer: PreTrainedTokenizerBase, template: str, prompt: Any, where: str
) -> tuple[str, tuple[int, ...]]:
    """The text of a prompt and its tokens.

    A plain template gets the special tokens the tokenizer puts in front (BOS), never an end token behind; a
    chat template writes its own special tokens and opens the assistant's turn. The prompt is text; with
    `chat` and `auto` also a list of `{role, content}` messages. `where` is the row's place, for messages.
    Raises DataError for another or an empty prompt, a character that the tokenizer cannot spell, and a
    tokenizer without a chat template.
    """
    if template_of(template, prompt) == CHAT:
        text = _chat_text(tokenizer, prompt, where)
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        text = plain_text(template, prompt, where)
        token_ids = _without_end(tokenizer, text, tokenizer(text, verbose=False)["input_ids"])
    if not token_ids:
        raise DataError(f"{where}: the prompt is empty")
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in token_ids:
        raise DataError(
            f"{where}: the tokenizer has no token for some character of {text!r}; keep to the characters of "
            "its training data, or train it with tokenizer.alphabet: bytes"
        )
    return text, tuple(token_ids)


def plain_text(template: str, prompt: Any, where: str) -> str:
    """The template with `{prompt}` replaced; other braces, and those in the prompt, stay as they are.

    Raises DataError if the template is `chat`, which a tokenizer must write, or the prompt is not text.
    """
    if template_of(template, prompt) == CHAT:
        what = "data.template chat" if template == CHAT else f"{where}: a prompt that is a list of messages"
        raise DataError(
            f"{what} needs a tokenizer with a chat template, which one trained on the data has not; set "
            "data.template to text around {prompt}, or tokenizer.path to a folder"
        )
    if isinstance(prompt, list):
        raise DataError(f"{where}: the prompt is a list of messages; set data.template to chat")
    return template_of(template, prompt).replace("{prompt}", as_text(prompt, "the prompt", where))


def as_text(value: Any, what: str, where: str) -> str:
    """The value, which must be text that can be written as UTF-8; else DataError names `where` and `what`."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {json_kind(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {what} holds half a character (at {error.start}) that is not Unicode text"
        ) from None
    return value


def _without_end(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: list[int]) -> list[int]:
    """Remove the end token that some tokenizers append, since generation continues after the prompt."""
    if not token_ids or token_ids[-1] != tokenizer.eos_token_id:
        return token_ids
    written = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    is_in_text = bool(written) and written[-1] == tokenizer.eos_token_id
    return token_ids if is_in_text and token_ids[-len(written) :] == written else token_ids[:-1]


def _chat_text(tokenizer: PreTrainedTokenizerBase, prompt: Any, where: str) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set data.template to a plain one, text around {prompt}, "
            "or take a model that was trained to chat"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    _check(messages, where)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error
    return str(text)


def _check(messages: Any, where: str) -> None:
    if not isinstance(messages, list):
        raise DataError(f"{where}: the prompt is {json_kind(messages)}, not text or a list of messages")
    if not messages:
        raise DataError(f"{where}: the prompt is an empty list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: message {number} is not an object with role and content")
        as_text(message["role"], f"the role of message {number}", where)
        as_text(message["content"], f"the content of message {number}", where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's, so there is nothing left for it to answer"
        )
