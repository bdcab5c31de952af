"""A tree of texts: which earlier turn a prompt continues. Messages are in `test_agent_session`."""

from __future__ import annotations

import pytest

from millrace.environments.agent_protocol import AgentError
from millrace.environments.completions_api import TextRequest
from millrace.environments.conversation_tree import ConversationTree
from millrace.types import ROOT, Action

TURN = {"role": "assistant", "content": ""}


def placed(tree, turn, prompt, action):
    reply = tree.place(TextRequest(prompt))
    tree.add(turn, TextRequest(prompt), TURN, action)
    return reply.after, reply.text if reply.token_ids is None else reply.token_ids


def test_a_prompt_continues_the_longest_text_that_it_begins_with():
    tree, action = ConversationTree(16), Action("b", (8, 9), "stop")
    assert placed(tree, 0, "a", action) == (ROOT, "a")
    assert placed(tree, 1, "ab c", action) == (0, " c")
    assert placed(tree, 2, "ab cb d", action) == (1, " d")
    assert placed(tree, 3, "ab x", action) == (0, " x")
    # The same question again is another sample, and a text is no tokens.
    assert placed(tree, 4, "a", action) == (ROOT, "a")
    assert placed(tree, 5, "ab", action) == (ROOT, "ab")
    assert placed(tree, 6, (97,), action) == (ROOT, (97,))
    assert placed(tree, 7, (97, 8, 9, 5), action) == (6, (5,))
    assert placed(tree, 8, (97, 8, 5), action) == (ROOT, (97, 8, 5))


def test_a_turn_that_ran_out_of_tokens_goes_on_without_more():
    tree = ConversationTree(1)
    placed(tree, 0, "a", Action("b", (8,), "length"))
    assert placed(tree, 1, "ab", Action("c", (9,), "stop")) == (0, "")
    with pytest.raises(AgentError, match="opens branch 2 of this episode, and it may have 1"):
        tree.place(TextRequest("abc"))
