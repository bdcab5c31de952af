"""Episodes that fail on purpose: as many as asked for, each at one reply, the same in every run."""

from __future__ import annotations

from collections import Counter

import pytest

from millrace.environments.fault_injection import FAULT, FaultInjection
from millrace.types import Reply
from tests.environments.steps import ENCODE, TASK, step

NUM_TURNS, NUM_EPISODES = 3, 4000


def failures(fraction: float, seed: int = 0) -> list[int]:
    """The reply at which each episode fails, -1 where none does; the last one ends it."""
    encode, found = FaultInjection(ENCODE, fraction, seed), []
    for number in range(NUM_EPISODES):
        texts = ["a"] * NUM_TURNS
        steps = [step(*texts[:turn], episode=f"{number}.0.0") for turn in range(NUM_TURNS + 1)]
        given = [Reply(), *[Reply("b")] * (NUM_TURNS - 1), Reply(done=True)]
        replies = [encode(one, reply, ()) for one, reply in zip(steps, given, strict=True)]
        failed = [turn for turn, reply in enumerate(replies) if reply.failure]
        assert {replies[turn].failure for turn in failed} <= {FAULT}
        found.append(failed[0] if failed else -1)
    return found


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_the_fraction_fails_at_any_reply(fraction):
    counts = Counter(failures(fraction))
    num_failed = NUM_EPISODES - counts[-1]
    assert abs(num_failed - fraction * NUM_EPISODES) <= 4 * (fraction * NUM_EPISODES) ** 0.5
    if fraction:
        # Those whose place is after the end fail at the end.
        assert TASK.max_turns + 1 == 9 and all(counts[turn] for turn in range(NUM_TURNS + 1))
        assert counts[NUM_TURNS] > 3 * counts[1]


@pytest.mark.slow
def test_the_seed_and_the_episode_decide():
    assert failures(0.5) == failures(0.5)
    assert failures(0.5) != failures(0.5, seed=1)


def test_otherwise_the_reply_is_that_of_the_environment():
    encode = FaultInjection(ENCODE, 0.0, 0)
    assert encode(step("a"), Reply("b", reward=0.5), ()) == ENCODE(step("a"), Reply("b", reward=0.5), ())
    assert encode.reads_calls is ENCODE.reads_calls
