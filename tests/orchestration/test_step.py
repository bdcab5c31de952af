"""One batch of reinforcement: what is sampled, what is trained on, and what is recorded of it."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from millrace.algorithms.weights import token_mean
from millrace.config.settings import RolloutConfig
from millrace.environments.single_turn import SingleTurn
from millrace.models.logprobs import chosen_logprobs
from millrace.observability.metrics import Spans
from millrace.orchestration import step
from millrace.orchestration.parts import Parts
from millrace.orchestration.step import completion_seed, greedy, sample_and_score, sampling, train_on
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyTrainer, clipped_surrogate, kl_penalty
from millrace.training.scorer import ReferenceScorer
from millrace.types import Group, Outcome, Prompt, SamplingParams
from tests.close import close_fp32, close_fp64
from tests.training.pieces import completion, tiny_model, trajectory


def parts(**given) -> Parts:
    names = {field.name: None for field in fields(Parts)}
    return Parts(**names | {"token_weights": token_mean, "environment": SingleTurn} | given)


def trainer(kl: bool = False) -> PolicyTrainer:
    model = tiny_model()
    penalty = kl_penalty(coefficient=0.5, estimator="k3") if kl else None
    one = PolicyTrainer(
        model,
        clipped_surrogate(low=0.2, high=0.2, dual=None, kl_loss=penalty),
        adamw(model, betas=(0.9, 0.999), weight_decay=0.0),
        learning_rate=lambda number: 0.01,
        temperature=1.0,
        max_tokens=1000,
        max_gradient_norm=1.0,
    )
    one.batches = []
    real = one.forward_backward

    def recording(batch):
        one.batches.append(batch)
        return real(batch)

    one.forward_backward = recording
    return one


def scored(*rewards: list[float | None]) -> list[Group]:
    """Groups with these rewards; sample s of group g answers g + 1 tokens, the first of them 10 g + s + 1."""
    made = []
    for g, values in enumerate(rewards):
        tokens = [(10 * g + s + 1, *([3] * g)) for s in range(len(values))]
        outcomes = [
            Outcome.failure("it hung") if value is None else Outcome("score", value) for value in values
        ]
        drawn = [trajectory((5, 6), answer, logprobs=[-3.0] * len(answer)) for answer in tokens]
        prompt = Prompt(f"train:{g}", (5, 6), "text")
        made.append(Group(prompt, tuple(t.scored(o) for t, o in zip(drawn, outcomes, strict=True))))
    return made


def run(one: PolicyTrainer, groups: list[Group], *, scorer=None, num_parts: int = 1):
    return train_on(one, parts(), scorer, groups, divide_by_std=False, num_parts=num_parts, step=3)


def first_actions(batch) -> list[int]:
    """The first chosen token of each segment."""
    return [
        int(batch.token_T[(batch.segment_T == b) & batch.action_mask_T][0]) for b in range(batch.num_segments)
    ]


def weight_bits(one: PolicyTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in one.model.parameters()])


def test_each_optimizer_step_gets_its_share_of_the_groups_and_the_advantages_of_the_whole_batch():
    groups = scored([1.0, 0.0], [4.0, 0.0])
    one = trainer()
    result = run(one, groups, num_parts=2)
    assert [first_actions(batch) for batch in one.batches] == [[1, 2], [11, 12]]
    assert [row["advantage"] for row in result.rows] == [0.5, -0.5, 2.0, -2.0]
    assert [batch.advantage_T.abs().max() for batch in one.batches] == [0.5, 2.0]
    # Shares add up to one within each optimizer step.
    close_fp32([float(batch.weight_T.sum()) for batch in one.batches], [1.0, 1.0])
    assert (len(result.reports), one.version) == (2, 2)
    assert (result.tokens_sampled, result.tokens_trained) == (6, 6)


def test_one_optimizer_step_takes_all_groups_at_once():
    one = trainer()
    result = run(one, scored([1.0, 0.0], [4.0, 0.0]))
    assert [first_actions(batch) for batch in one.batches] == [[1, 2, 11, 12]]
    assert (len(result.reports), one.version) == (1, 1)


def test_trajectories_without_advantage_are_left_out_and_change_no_weight(monkeypatch):
    groups = scored([1.0, 0.0], [1.0, 1.0], [0.0, 3.0])
    left_out, kept = trainer(), trainer()
    result = run(left_out, groups)
    monkeypatch.setattr(step, "with_gradient", lambda batch: batch)
    run(kept, groups)
    assert [first_actions(batch) for batch in left_out.batches] == [[1, 2, 21, 22]]
    assert [first_actions(batch) for batch in kept.batches] == [[1, 2, 11, 12, 21, 22]]
    close_fp32(weight_bits(left_out), weight_bits(kept))
    assert (result.tokens_sampled, result.tokens_trained) == (12, 8)
    close_fp64(result.record["group/equal_share"], 1 / 3)
    # The shares were fixed before anything was left out.
    close_fp32(float(left_out.batches[0].weight_T.sum()), 8 / 12)


def test_a_batch_of_equal_rewards_still_steps():
    one = trainer()
    result = run(one, scored([1.0, 1.0]))
    assert (one.batches, one.version, result.tokens_trained) == ([], 1, 0)
    assert (result.record["policy/gradient_norm"], result.record["policy/skipped_steps"]) == (0.0, 0)
    assert "mismatch/k1" not in result.record


def test_with_a_reference_every_trajectory_is_trained_on_and_scored():
    one = trainer(kl=True)
    reference = ReferenceScorer(tiny_model(9), temperature=1.0, max_tokens=1000)
    result = run(one, scored([1.0, 1.0], [2.0, 2.0]), scorer=reference)
    (batch,) = one.batches
    assert first_actions(batch) == [1, 2, 11, 12]
    assert torch.equal(batch.reference_logprob_T, reference.logprobs(batch))
    assert result.record["policy/kl_reference"] > 0.01
    assert result.record["policy/gradient_norm"] > 0


def test_failed_trajectories_are_in_the_table_and_nowhere_else():
    one = trainer()
    result = run(one, scored([1.0, None, 0.0], [None, None, None]), num_parts=2)
    assert [first_actions(batch) for batch in one.batches] == [[1, 3]]
    # The second half had nobody to learn from: no optimizer step.
    assert (len(result.reports), one.version) == (1, 1)
    assert [row["outcome"] for row in result.rows] == ["score", "failed", "score", *["failed"] * 3]
    record = result.record
    close_fp64(
        [record["reward/mean"], record["reward/std"], record["reward/failed_share"]], [0.5, 0.5, 4 / 6]
    )


def test_a_batch_whose_rewards_all_failed_moves_nothing():
    one = trainer()
    before = weight_bits(one)
    result = run(one, scored([None, None]))
    assert (result.reports, one.version, result.tokens_trained) == ([], 0, 0)
    assert torch.equal(before, weight_bits(one))
    assert result.record["reward/failed_share"] == 1.0
    assert str(result.record["reward/mean"]) == str(result.record["reward/std"]) == "nan"


def test_a_skipped_step_gives_its_batch_as_evidence():
    one = trainer()
    groups = scored([1.0, 0.0], [float("inf"), 0.0])
    result = run(one, groups, num_parts=2)
    assert [report.skipped for report in result.reports] == [False, True]
    assert [id(batch) for batch in result.skipped] == [id(one.batches[1])]
    assert (one.version, result.record["policy/skipped_steps"]) == (1, 1)
    # Means are over the step that moved.
    close_fp64(result.record["policy/loss"], result.reports[0].metrics["loss"])


def test_the_record_says_how_far_the_trainer_is_from_the_sampler():
    one = trainer()
    groups = scored([1.0, 0.0])
    run_of = run(one, groups)
    logprob_N = chosen_logprobs(tiny_model(), one.batches[0], temperature=1.0)[0].detach()
    close_fp32(run_of.record["mismatch/k1"], float((-3.0 - logprob_N).mean()))
    close_fp32(run_of.record["mismatch/max"], float((-3.0 - logprob_N).abs().max()))


def test_the_record_describes_rewards_and_lengths():
    groups = scored([1.0, 0.0], [4.0, 3.0])
    last = groups[1].trajectories[1].scored(Outcome("invalid", -1.0, "no number"))
    groups[1] = Group(groups[1].prompt, (groups[1].trajectories[0], last))
    record = run(trainer(), groups).record
    close_fp64(
        [record["reward/mean"], record["reward/std"], record["reward/invalid_share"]],
        [1.0, ((0 + 1 + 9 + 4) / 4) ** 0.5, 0.25],
    )
    assert (record["length/mean"], record["length/max"], record["length/truncated_share"]) == (1.5, 2, 0.0)
    assert (record["tokens/sampled"], record["policy/learning_rate"]) == (6, 0.01)


def test_every_completion_has_a_seed_of_its_own_place():
    class Engine:
        version = 0

        def generate(self, prompts, params):
            self.seeds = [wanted.seed for wanted in params]
            return [replace(completion(7), text=f"answer {number}") for number in range(len(prompts))]

    class Reward:
        def score(self, prompts, completions):
            return [Outcome("score", float(number)) for number in range(len(prompts))]

    engine = Engine()
    prompts = [Prompt("train:3", (1,), ""), Prompt("train:9", (2,), "")]

    def seeds(seed: tuple[int, int]) -> list[int]:
        groups = sample_and_score(
            parts(engine=engine, reward=Reward()),
            prompts,
            SamplingParams(max_tokens=5),
            num_samples=2,
            seed=seed,
            spans=Spans(),
        )
        rewards = [t.outcome.value for group in groups for t in group.trajectories]
        assert ([group.prompt.id for group in groups], rewards) == (["train:3", "train:9"], [0, 1, 2, 3])
        return engine.seeds

    first = seeds((7, 0))
    assert first == [completion_seed(7, 0, p, s, 0) for p in (0, 1) for s in (0, 1)]
    assert seeds((7, 0)) == first
    assert len({*first, *seeds((7, 1)), *seeds((8, 0)), *seeds((0, 7))}) == 16


def test_what_is_said_twice_to_one_prompt_is_judged_once():
    said = ["a", "a", "b", "a", "c", "c"]

    class Engine:
        version = 0

        def generate(self, prompts, params):
            return [replace(completion(7), text=text) for text in said]

    class Reward:
        def score(self, prompts, completions):
            self.asked = [(prompt.id, text) for prompt, text in zip(prompts, completions, strict=True)]
            return [Outcome("score", float(number)) for number in range(len(prompts))]

    reward = Reward()
    prompts = [Prompt("train:3", (1,), ""), Prompt("train:9", (2,), "")]
    groups = sample_and_score(
        parts(engine=Engine(), reward=reward),
        prompts,
        SamplingParams(max_tokens=5),
        num_samples=3,
        seed=(0, 0),
        spans=Spans(),
    )
    # The same text to another prompt is another answer.
    assert reward.asked == [("train:3", "a"), ("train:3", "b"), ("train:9", "a"), ("train:9", "c")]
    assert [[t.outcome.value for t in group.trajectories] for group in groups] == [[0, 0, 1], [2, 3, 3]]


def test_a_seed_is_64_bits_of_all_its_parts():
    seeds = {completion_seed(a, b) for a in range(60) for b in range(60)}
    assert len(seeds) == 3600
    assert 2**63 < max(seeds) < 2**64
    assert completion_seed(1, 11) != completion_seed(11, 1)
    # Written down, because a resumed run of another version must draw the same tokens.
    assert completion_seed(0, 0, 0, 0, 0) == 12532686007686991089


def test_evaluation_is_greedy_and_training_samples():
    config = RolloutConfig(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, stop=("\n",))
    assert sampling(config, (0, 2)) == SamplingParams(9, 0.7, 5, 0.9, (0, 2), ("\n",), 0)
    assert greedy(config, (0, 2)) == SamplingParams(9, 0.0, 0, 1.0, (0, 2), ("\n",), 0)
