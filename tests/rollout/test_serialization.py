"""Groups that a checkpoint keeps come back bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from millrace.rollout.serialization import pack_groups, unpack_groups
from millrace.types import Completion, Group, Outcome, Prompt, Support, Trajectory, Turn

PROMPTS = {name: Prompt(name, (1, 2), name) for name in ("a", "b")}


def completion(*tokens, seed, support=False):
    rng, count = np.random.default_rng(seed), len(tokens)
    among = Support(
        np.arange(2 * count, dtype=np.int32),
        np.full(count, 2, np.int32),
        rng.random(count).astype(np.float32),
    )
    return Completion(
        token_ids=tokens,
        logprobs=-rng.random(count).astype(np.float32),
        versions=rng.integers(0, 9, count).astype(np.int32),
        finish_reason="length",
        text=f"text {seed} \n🛞",
        support=among if support else None,
    )


def groups():
    """Turns of several lengths, one with support; an outcome that failed and one that is missing."""
    first = Trajectory(
        (Turn((1, 2), completion(4, 5, 6, seed=0)), Turn((), completion(7, seed=1, support=True))),
        Outcome("score", 0.1 + 0.2, parts={"length": 0.3}),
    )
    second = Trajectory((Turn((1, 2, 3), completion(8, 9, seed=2)),), Outcome.failure("it hung"))
    third = Trajectory((Turn((150_000,), completion(150_000, seed=3)),))
    return {7: Group(PROMPTS["b"], (first, second)), 3: Group(PROMPTS["a"], (third,))}


def numbers(drawn):
    held = [drawn.logprobs, drawn.versions]
    if drawn.support is not None:
        held += [drawn.support.token_ids, drawn.support.counts, drawn.support.logprobs]
    return [(column.dtype, column.tobytes()) for column in held]


def test_groups_come_back_bit_for_bit():
    words, columns = pack_groups(groups())
    there = unpack_groups(json.loads(json.dumps(words)), columns, PROMPTS)
    assert list(there) == [7, 3]
    for number, group in groups().items():
        assert there[number].prompt is group.prompt
        for ours, other in zip(there[number].trajectories, group.trajectories, strict=True):
            assert str(ours.outcome) == str(other.outcome)  # NaN is not equal to itself
            for turn, expected in zip(ours.turns, other.turns, strict=True):
                assert turn.observation == expected.observation
                assert turn.completion.token_ids == expected.completion.token_ids
                assert turn.completion.text == expected.completion.text
                assert numbers(turn.completion) == numbers(expected.completion)


def test_no_groups_are_groups_too():
    assert unpack_groups(*pack_groups({}), PROMPTS) == {}


@pytest.mark.parametrize("name", ["observations", "token_ids", "logprobs", "support_counts"])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_columns_that_do_not_fit_are_refused(name, change):
    words, columns = pack_groups(groups())
    column = columns[name]
    columns[name] = np.append(column, column[:1]) if change == "longer" else column[:-1]
    with pytest.raises(ValueError, match=r"holds|three must agree|counts"):
        unpack_groups(words, columns, PROMPTS)
