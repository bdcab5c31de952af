"""From an environment's reply to the tokens that the policy reads next. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from millrace.data.conversation import Conversation, Ended, PlainConversation
from millrace.data.rows import DataError
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.types import Prompt, Reply

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Turns the reply to a step into tokens.
ReplyEncoder = Callable[[StepEnvironment, Reply], EnvironmentReply]
# A tokenizer makes at least one token of so many characters in practice; longer texts end the episode anyway.
CHARACTERS_PER_TOKEN = 32
MAX_STATE = 200


class ReplyTokens:
    """Encodes replies as the user's messages of a conversation; what the policy sampled is kept as it is."""

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, is_chat: Callable[[Prompt], bool]) -> None:
        """Take the tokenizer and the most tokens of an episode.

        `is_chat` returns whether a prompt was written by the chat template; replies then are, too.
        """
        self._tokenizer, self._max_tokens, self._is_chat = tokenizer, max_tokens, is_chat
        self._chat: Conversation | None = None
        self._plain = PlainConversation(tokenizer)
        # Without a template, a text has the same tokens in every episode.
        self._plain_tokens = lru_cache(maxsize=10_000)(self._encoded_plainly)

    def __call__(self, step: StepEnvironment, reply: Reply) -> EnvironmentReply:
        """Return the reply in tokens, at most one more than an episode may have."""
        try:
            token_ids = self._encoded(step, reply)[: self._max_tokens + 1]
        except DataError as error:
            return EnvironmentReply(step.id, failure=f"replied with a text that cannot be encoded: {error}")
        if not token_ids and not step.actions:
            return EnvironmentReply(step.id, failure="began with an empty prompt")
        state = _unicode(reply.state[:MAX_STATE])
        return EnvironmentReply(step.id, token_ids, reply.reward, state, reply.done, reply.score)

    def _encoded(self, step: StepEnvironment, reply: Reply) -> tuple[int, ...]:
        if reply.done:
            return ()
        if reply.text is None and not step.actions:
            return step.prompt.token_ids
        text = _unicode((reply.text or "")[: self._max_tokens * CHARACTERS_PER_TOKEN])
        if not self._is_chat(step.prompt):
            return self._plain_tokens(text, opens=not step.actions)
        messages = [{"role": "user", "content": text}]
        conversation = self._chat = self._chat or Conversation(self._tokenizer)
        if not step.actions:
            return conversation.open(messages)
        last = step.actions[-1]
        ended: Ended = "length" if last.finish_reason == "length" else "stop"
        return conversation.bridge(last.token_ids, ended, messages)

    def _encoded_plainly(self, text: str, *, opens: bool) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return self._plain.open(messages) if opens else self._plain.bridge((), "stop", messages)


def _unicode(text: str) -> str:
    """Replace halves of characters, which no file could be written with."""
    return text.encode("utf-8", "replace").decode("utf-8")
