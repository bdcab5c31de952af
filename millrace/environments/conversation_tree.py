"""The requests of a program as a tree of turns: what a request continues, and what it adds. No torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.environments.agent_protocol import AgentError, ChatRequest, comparable
from millrace.environments.completions_api import TextRequest
from millrace.types import ROOT, Action, Reply

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """All that was read and written up to the end of a turn."""

    turn: int
    whole: str | tuple[int, ...]
    is_cut: bool


class ConversationTree:
    """The turns of an episode, by what a program knows of them; turns are numbered as they are answered.

    A request continues the longest history that it begins with and that ends in a turn of the policy; of
    equal ones, the newest. Texts, tokens and messages continue only their own kind, and messages only those
    with the same tools.

    Attributes:
        num_refused: requests that were refused since `take_refused`.
    """

    def __init__(self, max_branches: int) -> None:
        """Take the number of branches that an episode may have."""
        self._max_branches, self._num_branches = max_branches, 0
        self.num_refused = 0
        self._num_followers: Counter[int] = Counter()
        self._histories: dict[bytes, int] = {}
        self._texts: list[_Text] = []

    def place(self, request: ChatRequest | TextRequest) -> Reply:
        """Return what a request adds, and behind which turn.

        Raises:
            AgentError: it opens one branch too many; the tree stays as it was.
        """
        reply = self._text(request) if isinstance(request, TextRequest) else self._messages(request)
        assert reply.after is not None
        opens = reply.after == ROOT or self._num_followers[reply.after] > 0
        if opens and self._num_branches >= self._max_branches:
            self.num_refused += 1
            raise AgentError(
                400,
                f"the request opens branch {self._num_branches + 1} of this episode, and it may have "
                f"{self._max_branches}, by environment.max_branches; a request with a conversation as it is, "
                "the policy's last turn and new messages opens none",
                code="too_many_branches",
            )
        self._num_branches += opens
        self._num_followers[reply.after] += 1
        return reply

    def withdraw(self, reply: Reply) -> None:
        """Take back a reply of `place`: its request is refused, and opens no branch."""
        assert reply.after is not None
        self._num_followers[reply.after] -= 1
        self._num_branches -= reply.after == ROOT or self._num_followers[reply.after] > 0
        self.num_refused += 1 + reply.refused

    def take_refused(self) -> int:
        """Return the number of requests that were refused since the last call."""
        found, self.num_refused = self.num_refused, 0
        return found

    def add(self, turn: int, request: ChatRequest | TextRequest, message: Json, action: Action) -> None:
        """Add a turn that answers a request; `message` is its `policy_message`."""
        if isinstance(request, ChatRequest):
            *_, whole = _digests(request.tools, [*request.messages, message])
            self._histories[whole] = turn
            return
        is_cut, prompt = action.finish_reason == "length", request.prompt
        text = prompt + action.text if isinstance(prompt, str) else prompt + action.token_ids
        self._texts.append(_Text(turn, text, is_cut))

    def _messages(self, request: ChatRequest) -> Reply:
        messages, after, known = request.messages, ROOT, 0
        for number, digest in enumerate(_digests(request.tools, messages)):
            # Behind a turn of the policy, a template writes no other one.
            is_before = number < len(messages) and messages[number]["role"] != "assistant"
            if is_before and digest in self._histories:
                after, known = self._histories[digest], number
        return Reply(messages=messages[known:], tools=request.tools, after=after)

    def _text(self, request: TextRequest) -> Reply:
        prompt, after, known = request.prompt, ROOT, 0
        for one in self._texts:
            size = len(one.whole)
            # A turn that ended by itself is sampled again by the prompt that it answered.
            is_longer = len(prompt) > size or (len(prompt) == size and one.is_cut)
            if size >= known and is_longer and type(one.whole) is type(prompt) and prompt[:size] == one.whole:
                after, known = one.turn, size
        if isinstance(prompt, str):
            return Reply(text=prompt[known:], verbatim=True, after=after)
        return Reply(token_ids=prompt[known:], after=after)


def _digests(tools: Sequence[Json], messages: Sequence[Json]) -> Iterator[bytes]:
    """Digests of no message, of the first, of the first two and so on."""
    digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode())
    yield digest.digest()
    for message in messages:
        written = comparable(message).encode()
        digest.update(len(written).to_bytes(8, "little") + written)
        yield digest.digest()
