"""Conversations of several turns as tokens: what was sampled is kept and never encoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from millrace.data.chat import CHAT, Message, chat_text, read_messages, refuse_unknown, render
from millrace.data.rows import DataError
from millrace.data.tool_schema import read_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ended = Literal["stop", "length"]
ANSWERS = "the messages that answer the model"
# A call's id where the messages have none: nine letters and digits, which Mistral's templates demand.
CALL_ID = "call{:05d}"
QUESTION: Message = {"role": "user", "content": "question"}


class ConversationFormat(Protocol):
    """How messages become tokens around what a policy samples. Instances hold no state of a conversation."""

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the first messages, up to where the assistant's turn begins."""
        ...

    def bridge(self, sampled: Sequence[int], ended: Ended, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens to append behind the last sampled turn so that the policy answers `messages` next.

        They close the turn as far as `sampled` does not, which a turn that ended by `length` never does.
        """
        ...


class PlainConversation:
    """A conversation without a template: the contents of messages, joined, and nothing else."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the contents, as those of a prompt. DataError for what is not messages of text."""
        return render(
            self._tokenizer, "{prompt}", _contents(messages, "the first messages"), "a conversation"
        )[1]

    def bridge(self, sampled: Sequence[int], ended: Ended, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the contents; special tokens written in them stay text. DataError as in `open`."""
        text = _contents(messages, ANSWERS)
        token_ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        refuse_unknown(self._tokenizer, text, token_ids, ANSWERS)
        return tuple(token_ids)


def _contents(messages: Sequence[Message], where: str) -> str:
    return "".join(message["content"] or "" for message in read_messages(messages, where))


class Conversation:
    """A conversation in the tokenizer's chat template.

    The template is rendered with the new messages behind a stand-in for the policy's turn; the text that
    follows the stand-in is encoded and appended. So `open(...) + sampled + bridge(...)` is what the policy
    sees, also where the template itself would write earlier turns anew (without their reasoning, say):
    `divergence` reports that. Special tokens written in the content of new messages stay text, so that a
    tool's output cannot end its message.

    `tools` are as `read_tools` takes them. DataError if there is no chat template, or none of its renderings
    shows where a turn of the assistant ends.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = read_tools(list(tools), "the tools of a conversation")
        self._special = {
            token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._closing = self._behind("answer", [QUESTION, _answered("answer")], opens_turn=False)
        if self._tools:
            self._tail([_tool_message(0)])

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the first messages, up to the assistant's turn; DataError as in `render`."""
        where = "the first messages"
        return render(self._tokenizer, CHAT, list(messages), where, tools=self._tools)[1]

    def bridge(self, sampled: Sequence[int], ended: Ended, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens to append behind the sampled ones so that the policy answers `messages` next.

        Messages of tools answer calls of the policy; where they have no `tool_call_id` and `name`, a stand-in
        is used. DataError for malformed messages and those that the template refuses.
        """
        read, written = self._masked(read_messages(messages, ANSWERS))
        tail, closing = self._tail(read)
        token_ids = self._encode(tail, written)
        refuse_unknown(self._tokenizer, tail, token_ids, ANSWERS)
        if ended == "length":
            return token_ids
        return token_ids[self._num_closed(sampled, token_ids, self._encode(closing)) :]

    def divergence(self) -> str | None:
        """Where the template's rendering of a conversation is not what the policy saw, as one sentence.

        None if, for a few conversations with reasoning and calls of the tools, the rendering of the whole has
        the same tokens as `open`, `sampled` and `bridge` in a row: the template then only appends.
        """
        for opening, rounds in _trial_conversations(self._tools):
            try:
                difference = self._trial(opening, rounds)
            except DataError:
                # The template refuses such a conversation, two calls in one turn for example.
                continue
            if difference:
                return difference
        return None

    def _trial(
        self, opening: Sequence[Message], rounds: Sequence[tuple[Message, Sequence[Message]]]
    ) -> str | None:
        history = list(opening)
        seen = self.open(history)
        for said, answers in rounds:
            before = self._text(history, opens_turn=True)
            after = self._text([*history, said], opens_turn=False)
            if not after.startswith(before):
                return "the chat template opens the assistant's turn otherwise than it writes it afterwards"
            sampled = self._encode(after[len(before) :])
            closing = self._encode(_closing_of(after, self._closing, self._special))
            # A policy samples the first of the tokens that close its turn.
            sampled = sampled[: len(sampled) - len(closing) + 1] if closing else sampled
            seen = (*seen, *sampled, *self.bridge(sampled, "stop", answers))
            history += [said, *answers]
            whole = self._encode(self._text(history, opens_turn=True))
            if whole != seen:
                return self._difference(whole, seen)
        return None

    def _difference(self, whole: Sequence[int], seen: Sequence[int]) -> str:
        pairs = enumerate(zip(whole, seen, strict=False))
        first = next((n for n, (one, other) in pairs if one != other), min(len(whole), len(seen)))
        shown = [self._tokenizer.decode(ids[first : first + 8]) for ids in (seen, whole)]
        return (
            f"the chat template writes earlier turns anew: where the policy saw {shown[0]!r}, it writes "
            f"{shown[1]!r}; the policy keeps seeing, and is trained on, what it saw"
        )

    def _text(self, messages: Sequence[Message], *, opens_turn: bool) -> str:
        return chat_text(self._tokenizer, messages, ANSWERS, tools=self._tools, opens_turn=opens_turn)

    def _num_closed(self, sampled: Sequence[int], token_ids: Sequence[int], closing: Sequence[int]) -> int:
        """How many of the tokens to append the sampled ones end with already."""
        special = self._special.values()
        for count in range(min(len(closing), len(sampled)), 0, -1):
            if tuple(sampled[-count:]) == tuple(token_ids[:count]):
                return count
        if not sampled or sampled[-1] not in special or token_ids[0] not in special:
            return 0
        # The model ended its turn with another token than the template does. One without such a token (GLM's)
        # begins with the role that answers, which the model may have sampled.
        return int(bool(closing) or sampled[-1] == token_ids[0])

    def _tail(self, messages: Sequence[Message]) -> tuple[str, str]:
        """What the template writes behind the assistant's own text, and how it closes a turn."""
        mark = _mark(messages)
        if messages[0]["role"] != "tool":
            frame = [QUESTION, _answered(mark)]
            return self._behind(mark, [*frame, *messages], opens_turn=True), self._closing
        closing, frame = self._call_frame(messages, mark)
        before = self._behind(mark, frame, opens_turn=False)
        after = self._behind(mark, [*frame, *messages], opens_turn=True)
        call = before.removesuffix(closing)
        if not after.startswith(call):
            raise DataError(
                "the tokenizer's chat template writes a call otherwise once it is answered, so that no "
                "tokens can be appended to it; take a model with another template"
            )
        return after[len(call) :], closing

    def _call_frame(self, messages: Sequence[Message], mark: str) -> tuple[str, list[Message]]:
        """The first form of calls that the template writes, and how it closes them."""
        refusal = None
        for said in _calling(messages, mark):
            frame = [QUESTION, said]
            try:
                before = self._behind(mark, frame, opens_turn=False)
            except DataError as error:
                refusal = refusal or error
                continue
            return _closing_of(before, self._closing, self._special), frame
        raise DataError(f"{ANSWERS}: no form of a tool call suits the chat template: {refusal}") from refusal

    def _behind(self, mark: str, messages: Sequence[Message], *, opens_turn: bool) -> str:
        before, found, behind = self._text(messages, opens_turn=opens_turn).rpartition(mark)
        if not found:
            raise DataError("the tokenizer's chat template leaves out what the assistant says")
        return behind

    def _masked(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Messages with stand-ins for the special tokens written in them, and what each replaces."""
        there = " ".join(message["content"] or "" for message in messages)
        found = sorted((text for text in self._special if text in there), key=len, reverse=True)
        if not found:
            return list(messages), {}
        mark = _mark(messages)
        stand_ins = {text: f"{mark}n{number}n" for number, text in enumerate(found)}
        pattern = re.compile("|".join(map(re.escape, found)))
        masked: list[Message] = [
            {
                key: pattern.sub(lambda match: stand_ins[match[0]], value)
                if key == "content" and value
                else value
                for key, value in message.items()
            }
            for message in messages
        ]
        return masked, {stand_in: text for text, stand_in in stand_ins.items()}

    def _encode(self, text: str, written: Mapping[str, str] | None = None) -> tuple[int, ...]:
        """The tokens of a text; of its special tokens, those that `written` stands in for stay text."""
        if not written:
            return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        stand_in = re.compile("|".join(map(re.escape, written)))
        special = re.compile(
            "(" + "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) + ")"
        )
        token_ids: list[int] = []
        for piece in special.split(text):
            if piece in self._special:
                token_ids.append(self._special[piece])
            elif piece:
                piece = stand_in.sub(lambda match: written[match[0]], piece)
                token_ids += self._tokenizer(
                    piece, add_special_tokens=False, split_special_tokens=True, verbose=False
                )["input_ids"]
        return tuple(token_ids)


def _answered(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _mark(messages: Sequence[Message]) -> str:
    """A word that occurs in none of the messages and that templates leave as it is."""
    there = json.dumps(messages, ensure_ascii=False, default=str)
    longest = max(map(len, re.findall("k+", there)), default=0)
    return "mar" + "k" * (longest + 1)


def _closing_of(text: str, closing: str, special: Mapping[str, int]) -> str:
    """How a turn with a call is closed: as one without, else by its last special token."""
    if text.endswith(closing):
        return closing
    body = text.rstrip()
    last = max((token for token in special if body.endswith(token)), key=len, default="")
    return text[len(body) - len(last) :] if last else ""


def _calling(messages: Sequence[Message], mark: str) -> Iterator[Message]:
    """The assistant's message that the leading messages of tools answer, in the forms that templates want."""
    answers = []
    for message in messages:
        if message["role"] != "tool":
            break
        answers.append(message)
    calls = [
        (message.get("name") or "tool", message.get("tool_call_id") or CALL_ID.format(number))
        for number, message in enumerate(answers)
    ]
    for chosen in dict.fromkeys((tuple(calls), tuple(calls[-1:]))):
        # Some templates write the content of a call and not its arguments.
        for content in ("", None, mark):
            for as_text in (False, True):
                entries = []
                for name, number in chosen:
                    value: Any = {"value": mark}
                    function = {"name": name, "arguments": json.dumps(value) if as_text else value}
                    entries.append({"type": "function", "id": number, "function": function})
                yield {"role": "assistant", "content": content, "tool_calls": entries}


def _tool_message(number: int, name: str = "tool") -> Message:
    return {
        "role": "tool",
        "name": name,
        "tool_call_id": CALL_ID.format(number),
        "content": f"{number} found",
    }


def _trial_conversations(
    tools: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Sequence[Message], Sequence[tuple[Message, Sequence[Message]]]]]:
    """First messages, then turns of the assistant with what answers them."""
    more = {"role": "user", "content": "And then?\n"}
    thinks = _answered("<think>\nIt is three.\n</think>\n\nThree.")
    turn = (_answered("Two."), [more])
    yield [QUESTION], [turn, (thinks, [more]), turn]
    if tools:
        name = tools[0]["function"]["name"]
        function = {"name": name, "arguments": {"value": "x"}}
        calls = [
            {"type": "function", "id": CALL_ID.format(number), "function": function} for number in range(2)
        ]
        once, twice = ({"role": "assistant", "content": "", "tool_calls": calls[:n]} for n in (1, 2))
        results = [_tool_message(number, name) for number in range(2)]
        yield [QUESTION], [(once, results[:1]), turn, (once, results[:1])]
        yield [QUESTION], [(twice, results), (thinks, [more])]
