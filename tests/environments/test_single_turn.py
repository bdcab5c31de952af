"""One prompt, one answer."""

from __future__ import annotations

from millrace.environments.single_turn import SingleTurn
from tests.training.pieces import completion, prompt


def test_it_says_the_prompt_and_is_over_after_one_completion():
    episode = SingleTurn(prompt(4, 5, 6))
    assert episode.observe() == (4, 5, 6)
    assert episode.step(completion(7)) is None
