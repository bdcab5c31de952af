"""Environment x Engine -> Trajectory, in a plain loop: the slow twin of `rollout.manager`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.protocols import Engine
from millrace.types import Completion, Group, Prompt, SamplingParams, Trajectory, Turn


class TokenEpisode(Protocol):
    """One episode in tokens: the first observation, then one for each completion, None at the end."""

    def observe(self) -> tuple[int, ...]: ...

    def step(self, completion: Completion) -> tuple[int, ...] | None: ...


def rollout(
    prompts: Sequence[Prompt],
    environment: Callable[[Prompt], TokenEpisode],
    engine: Engine,
    params: Callable[[int, int, int], SamplingParams],
    *,
    num_samples: int,
) -> list[Group]:
    """Play `num_samples` episodes of each prompt to their end.

    The context of a turn is exactly the tokens given and drawn so far: nothing is decoded and encoded again.

    Args:
        prompts: one group each.
        environment: makes a fresh episode of a prompt.
        engine: the sampler.
        params: (prompt index, sample index, turn index) to sampling parameters, the seed among them.
        num_samples: episodes of each prompt.

    Returns:
        groups in the order of `prompts`, not yet scored.
    """
    keys = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
    episodes = [environment(prompts[p]) for p, _ in keys]
    observations: list[tuple[int, ...] | None] = [episode.observe() for episode in episodes]
    turns: list[list[Turn]] = [[] for _ in keys]
    contexts: list[tuple[int, ...]] = [() for _ in keys]
    turn = 0
    while going := [i for i, observation in enumerate(observations) if observation is not None]:
        for i in going:
            contexts[i] += observations[i] or ()
        wanted = [params(*keys[i], turn) for i in going]
        for i, completion in zip(going, engine.generate([contexts[i] for i in going], wanted), strict=True):
            turns[i].append(Turn(observations[i] or (), completion))
            contexts[i] += completion.token_ids
            observations[i] = episodes[i].step(completion)
        turn += 1
    trajectories = [Trajectory(tuple(taken)) for taken in turns]
    return [
        Group(prompt, tuple(trajectories[p * num_samples : (p + 1) * num_samples]))
        for p, prompt in enumerate(prompts)
    ]
