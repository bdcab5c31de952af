"""From replies of environments to tokens, and from completions to messages. No torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from millrace.data.chat import refuse_unknown, render
from millrace.data.conversation import Conversation, Ended, PlainConversation
from millrace.data.prompts import TOOLS_COLUMN
from millrace.data.rows import DataError
from millrace.data.tool_calls import Parsed, ToolCallParser
from millrace.data.tool_schema import read_tools
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment, bounded
from millrace.environments.tool_messages import ToolMessages
from millrace.types import ROOT, Action, Prompt, Reply

if TYPE_CHECKING:
    from millrace.data.chat import Message
    from millrace.data.tokenizers import Tokenizer

# A tokenizer makes at least one token of so many characters in practice; longer texts end the episode anyway.
CHARACTERS_PER_TOKEN = 32
MAX_STATE = 200
Tools = Sequence[Mapping[str, Any]]


class ReplyEncoder(Protocol):
    """Turns replies into tokens, and completions into messages."""

    @property
    def reads_calls(self) -> bool:
        """Whether actions have messages; a host then keeps the tools that `begin` gave."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the vocabulary."""

    def __call__(self, step: StepEnvironment, reply: Reply, tools: Tools) -> EnvironmentReply:
        """Return the reply to a step in tokens."""

    def read(self, action: Action, prompt: Prompt, tools: Tools) -> Action:
        """Return an action with its message."""


class ReplyTokens:
    """Encodes replies as messages of a conversation; what the policy sampled is kept as it is.

    The tools of an episode are those that its `begin` gave, else those of the row.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        is_chat: Callable[[Prompt], bool],
        parser: ToolCallParser | None = None,
        messages_of: Callable[[Prompt], Sequence[Message]] | None = None,
        tool_messages: ToolMessages | None = None,
        shows_tokens: bool = False,
    ) -> None:
        """Take the tokenizer and the most tokens of an episode.

        `is_chat` returns whether a prompt was written by the chat template; replies then are, too. `parser`
        reads completions as messages. `messages_of` returns the messages of a prompt of the chat template, to
        write it again with the tools that `begin` gave. `tool_messages` shortens messages of tools.
        `shows_tokens` gives actions the texts of their tokens.
        """
        self._tokenizer, self._max_tokens, self._is_chat = tokenizer, max_tokens, is_chat
        self._parser, self._messages_of, self._tool_messages = parser, messages_of, tool_messages
        self._shows_tokens = shows_tokens
        self._plain = PlainConversation(tokenizer)
        self._token_text = lru_cache(maxsize=100_000)(lambda token: str(tokenizer.decode([token])))
        # Without a template, a text has the same tokens in every episode.
        self._plain_tokens = lru_cache(maxsize=10_000)(self._encoded_plainly)
        self._tool_sets = lru_cache(maxsize=256)(self._tool_set)
        self._openings = lru_cache(maxsize=1_000)(self._opened)
        self._row_tools = lru_cache(maxsize=10_000)(self._read_row_tools)

    @property
    def reads_calls(self) -> bool:
        """Whether actions have messages."""
        return self._parser is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the vocabulary."""
        return len(self._tokenizer)

    def __call__(self, step: StepEnvironment, reply: Reply, tools: Tools) -> EnvironmentReply:
        """Return the reply in tokens, at most one more than an episode may have.

        `tools` are those that `begin` gave, or the reply to a branch.
        """
        try:
            token_ids = self._encoded(step, reply, tools)[: self._max_tokens + 1]
        except DataError as error:
            return EnvironmentReply(step.id, failure=f"replied with a text that cannot be encoded: {error}")
        if not token_ids and not reply.done and _opens(step, reply):
            return EnvironmentReply(step.id, failure="began with an empty prompt")
        return EnvironmentReply(
            step.id,
            token_ids,
            reply.reward,
            _unicode(reply.state[:MAX_STATE]),
            reply.done,
            reply.score,
            invalid=_unicode(reply.invalid),
            calls=reply.calls,
            invalid_calls=reply.invalid_calls,
            progress=reply.progress,
            after=reply.after,
            refused=reply.refused,
        )

    def read(self, action: Action, prompt: Prompt, tools: Tools) -> Action:
        """Return the action with its message, unless there is no parser; it never raises."""
        if self._shows_tokens:
            action = replace(action, token_texts=tuple(map(self._token_text, action.token_ids)))
        if self._parser is None:
            return action
        parsed = self._set_of(prompt, tools).parse(action.token_ids)
        return replace(action, message=message_of(parsed), status=parsed.status, error=parsed.error)

    def _encoded(self, step: StepEnvironment, reply: Reply, tools: Tools) -> tuple[int, ...]:
        if reply.done:
            return ()
        is_chat, opens = self._is_chat(step.prompt), _opens(step, reply)
        if reply.token_ids is not None:
            return self._known(reply.token_ids)
        if reply.verbatim:
            return self._encoded_verbatim(_unicode(reply.text or ""), opens=opens)
        messages: Sequence[Message] = reply.messages
        if opens and reply.text is None and not messages:
            if not (is_chat and tools and self._messages_of):
                return step.prompt.token_ids
            return self._openings(step.prompt, json.dumps(tools))
        elif not messages:
            text = _unicode((reply.text or "")[: self._max_tokens * CHARACTERS_PER_TOKEN])
            if not is_chat:
                return self._plain_tokens(text, opens=opens)
            messages = [{"role": "user", "content": text}]
        else:
            messages = bounded(reply, self._max_tokens * CHARACTERS_PER_TOKEN).messages
            if self._tool_messages is not None:
                messages = self._tool_messages.fitted(messages)
        conversation = self._set_of(step.prompt, tools).conversation if is_chat else self._plain
        if opens:
            return conversation.open(messages)
        last = step.actions[-1 if reply.after is None else reply.after]
        ended: Ended = "length" if last.finish_reason == "length" else "stop"
        return conversation.bridge(last.token_ids, ended, messages)

    def _opened(self, prompt: Prompt, tools: str) -> tuple[int, ...]:
        """Return the prompt as the chat template writes it with the tools that `begin` gave."""
        assert self._messages_of is not None
        messages = self._messages_of(prompt)
        token_ids = self._tool_sets(tools).conversation.open(messages)
        if token_ids == self._tool_sets("[]").conversation.open(messages):
            raise DataError(
                "the tokenizer's chat template does not show the tools; take a model that was trained to "
                "call tools, or data.template without the chat template and environment.tool_format pattern"
            )
        return token_ids

    def _known(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if (most := max(token_ids, default=0)) >= self.num_tokens:
            raise DataError(f"token {most} is not one of the {self.num_tokens} of the vocabulary")
        return token_ids

    def _encoded_verbatim(self, text: str, *, opens: bool) -> tuple[int, ...]:
        if opens:
            return render(self._tokenizer, "{prompt}", text, "the prompt")[1]
        token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        refuse_unknown(self._tokenizer, text, token_ids, "the text")
        return tuple(token_ids)

    def _encoded_plainly(self, text: str, *, opens: bool) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return self._plain.open(messages) if opens else self._plain.bridge((), "stop", messages)

    def _set_of(self, prompt: Prompt, tools: Tools) -> _ToolSet:
        return self._tool_sets(json.dumps(tools)) if tools else self._tool_sets(self._row_tools(prompt))

    def _read_row_tools(self, prompt: Prompt) -> str:
        # Without a chat template, a column of this name is data like any other.
        value = prompt.row.get(TOOLS_COLUMN) if self._is_chat(prompt) else None
        return json.dumps(read_tools(value, f"prompt {prompt.id}"))

    def _tool_set(self, tools: str) -> _ToolSet:
        return _ToolSet(self._tokenizer, self._parser, json.loads(tools))


class _ToolSet:
    """What is made once for all episodes with the same tools."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolCallParser | None, tools: Tools) -> None:
        self._tokenizer, self._parser, self._tools = tokenizer, parser, tools
        # Completions are read again at each turn of their episode, and are often equal.
        self.parse = lru_cache(maxsize=2_000)(self._parse)

    @cached_property
    def conversation(self) -> Conversation:
        return Conversation(self._tokenizer, tools=self._tools)

    def _parse(self, token_ids: tuple[int, ...]) -> Parsed:
        assert self._parser is not None
        return self._parser.parse(token_ids, self._tools)


def _opens(step: StepEnvironment, reply: Reply) -> bool:
    """Whether nothing is before a reply."""
    return not step.actions or reply.after == ROOT


def message_of(parsed: Parsed) -> dict[str, Any]:
    """Return a turn of the assistant as a message; the arguments of calls are objects, not text."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                # The parse is kept, and the message is the environment's.
                "function": {"name": call.name, "arguments": copy.deepcopy(dict(call.arguments))},
            }
            for call in parsed.calls
        ]
    return message


def _unicode(text: str) -> str:
    """Replace halves of characters, which no file could be written with."""
    return text.encode("utf-8", "replace").decode("utf-8")
