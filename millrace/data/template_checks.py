"""Checks of a chat template: whether it opens the answer's turn, and ends it with the stop token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from millrace.data.chat import chat_text
from millrace.data.conversation import Conversation
from millrace.data.rows import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "question"}
ANSWER = "answermark"


def template_problems(tokenizer: PreTrainedTokenizerBase, *, has_turns: bool) -> list[str]:
    """Return one sentence for each problem of a tokenizer's chat template; none without a template.

    Args:
        tokenizer: with the template.
        has_turns: whether prompts have earlier answers of the assistant, which a template may write anew.
    """
    if not tokenizer.chat_template:
        return []
    try:
        return list(_problems(tokenizer, has_turns=has_turns))
    except DataError as error:
        return [str(error)]


def _problems(tokenizer: PreTrainedTokenizerBase, *, has_turns: bool) -> Iterator[str]:
    plain = chat_text(tokenizer, [QUESTION], "a question", opens_turn=False)
    opened = chat_text(tokenizer, [QUESTION], "a question")
    said = {"role": "assistant", "content": ANSWER}
    whole = chat_text(tokenizer, [QUESTION, said], "an answer", opens_turn=False)
    before, found, behind = whole.partition(ANSWER)
    if not found:
        yield (
            "the chat template leaves out what the assistant says; name another one in "
            "tokenizer.chat_template.file"
        )
        return
    header = before.removeprefix(plain)
    if opened == plain and header.strip():
        yield (
            f"the chat template has no generation prompt: before an answer it writes {header!r}, and prompts "
            "end before that; let it write that for add_generation_prompt, or name another one in "
            "tokenizer.chat_template.file"
        )
    yield from _stop_problems(tokenizer, behind)
    if has_turns and (difference := Conversation(tokenizer).divergence()):
        yield difference


def _stop_problems(tokenizer: PreTrainedTokenizerBase, behind: str) -> Iterator[str]:
    end = str(tokenizer.eos_token)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    written = sorted((behind.find(token), token) for token in special if token in behind)
    if not written:
        yield (
            f"the chat template writes no stop token behind an answer; demonstrations end with {end!r}, so "
            "write that behind the assistant's content, or name another one in tokenizer.chat_template.file"
        )
    elif end not in behind:
        yield (
            f"the chat template ends an answer with {written[0][1]!r}, and demonstrations and samples end "
            f"with {end!r}, the tokenizer's eos_token; set that of tokenizer_config.json to the template's"
        )
