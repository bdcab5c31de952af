"""The first half of a batch: sample and score."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.config.settings import RolloutConfig, RunConfig
from millrace.data.prompts import PromptStream
from millrace.environments.rollout import rollout
from millrace.observability.metrics import Spans
from millrace.orchestration.parts import Parts
from millrace.types import Group, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled for one batch.

    Attributes:
        groups: every group, scored.
        left_out: places of those that are not trained on, because all their rewards are equal.
        baselines: the reward of each group's greedy answer, NaN where it failed; None if not asked for.
        num_greedy_tokens: tokens drawn for the baselines.
        num_rounds: times new prompts replaced groups of equal reward.
    """

    groups: list[Group]
    left_out: frozenset[int] = frozenset()
    baselines: list[float] | None = None
    num_greedy_tokens: int = 0
    num_rounds: int = 0


def sampling(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The recipe's sampling parameters; the seed is set for each completion."""
    return replace(
        greedy(rollout_config, stop_token_ids),
        temperature=rollout_config.temperature,
        top_k=rollout_config.top_k,
        top_p=rollout_config.top_p,
    )


def greedy(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The most likely tokens, as evaluation takes them."""
    return SamplingParams(
        max_tokens=rollout_config.max_tokens,
        temperature=0.0,
        stop_token_ids=stop_token_ids,
        stop=rollout_config.stop,
    )


def completion_seed(*parts: int) -> int:
    """A 64-bit seed from the run's seed and the completion's place: batch, prompt, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def sample_and_score(
    parts: Parts,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_samples: int,
    seed: tuple[int, ...],
    spans: Spans,
) -> list[Group]:
    """Groups of scored trajectories; `seed` is (run seed, batch number) and what tells calls apart."""
    with spans("sample"):
        groups = rollout(
            prompts,
            parts.environment,
            parts.engine,
            lambda *place: replace(params, seed=completion_seed(*seed, *place)),
            num_samples=num_samples,
        )
    with spans("score"):
        # Samples of one prompt often say the same; what is said twice is judged once.
        said = list(dict.fromkeys((p, t.text) for p, g in enumerate(groups) for t in g.trajectories))
        outcomes = parts.reward.score([groups[p].prompt for p, _ in said], [text for _, text in said])
        judged = dict(zip(said, outcomes, strict=True))
        return [
            Group(g.prompt, tuple(t.scored(judged[p, t.text]) for t in g.trajectories))
            for p, g in enumerate(groups)
        ]


def sample_batch(
    parts: Parts, stream: PromptStream, config: RunConfig, *, step: int, spans: Spans
) -> Sampled:
    """The scored groups of a batch, refilled and with greedy baselines where the recipe asks for them."""
    options = config.rollout
    params = sampling(options, parts.stop_token_ids)
    groups: list[Group] = []
    left_out: set[int] = set()
    num_rounds, missing = 0, options.prompts_per_step
    while True:
        groups += sample_and_score(
            parts,
            stream.next(missing),
            params,
            num_samples=options.samples_per_prompt,
            seed=(config.seed, step, num_rounds) if num_rounds else (config.seed, step),
            spans=spans,
        )
        if options.refill_rounds:
            left_out = {place for place, group in enumerate(groups) if is_equal(group)}
            missing = options.prompts_per_step - len(groups) + len(left_out)
        if num_rounds == options.refill_rounds or not missing:
            break
        num_rounds += 1
    if not parts.method.greedy_baseline:
        return Sampled(groups, frozenset(left_out), num_rounds=num_rounds)
    baselines, num_tokens = greedy_baselines(parts, [group.prompt for group in groups], config, spans)
    return Sampled(groups, frozenset(left_out), baselines, num_tokens, num_rounds)


def greedy_baselines(
    parts: Parts, prompts: Sequence[Prompt], config: RunConfig, spans: Spans
) -> tuple[list[float], int]:
    """The reward of each prompt's greedy answer (NaN where it failed), and the tokens drawn for them."""
    params = greedy(config.rollout, parts.stop_token_ids)
    groups = sample_and_score(parts, prompts, params, num_samples=1, seed=(config.seed,), spans=spans)
    rewards = [group_rewards(group) for group in groups]
    num_tokens = sum(trajectory.num_actions for group in groups for trajectory in group.trajectories)
    return [reward[0] if reward else math.nan for reward in rewards], num_tokens


def group_rewards(group: Group) -> list[float]:
    """The rewards of a group that did not fail."""
    outcomes = [trajectory.outcome for trajectory in group.trajectories]
    return [outcome.value for outcome in outcomes if outcome is not None and outcome.kind != "failed"]


def is_equal(group: Group) -> bool:
    """Whether all rewards of a group are equal, so that comparing its samples teaches nothing."""
    return len(set(group_rewards(group))) < 2
