"""Batches as a recipe has them sampled: refilled, with greedy baselines, without what is withheld."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from millrace.data.prompts import PromptStream
from millrace.distributed.ranks import Ranks
from millrace.engines.in_process import InProcessBackend
from millrace.eventlog.log import EventLog, read_events
from millrace.observability.metrics import Spans
from millrace.replay.recorded_log import RecordedLog, RunSegment
from millrace.rollout.batches import LocalBatchSource, as_sampled, rollouts_of, staleness_policy
from millrace.rollout.engine_pool import Engines
from millrace.rollout.manager import RolloutBatch
from millrace.rollout.sampled_batch import SampledBatch, completion_seed
from millrace.rollout.staleness import TakenBatch
from millrace.run.build_algorithm import build_method
from millrace.types import Outcome, Prompt
from tests.close import close_fp64
from tests.rollout.manual import Manual, serving
from tests.run.pieces import parts, recipe, scored
from tests.training.pieces import completion


class Echo:
    """Says its own seed and how it was drawn, so that a reward can tell samples and rounds apart."""

    version = 0

    def __init__(self):
        self.asked = []

    def load(self, version):
        self.version = version

    def generate(self, prompts, params):
        self.asked.append(
            [(prompt[0], wanted.temperature) for prompt, wanted in zip(prompts, params, strict=True)]
        )
        return [
            replace(
                completion(*([7] * (2 if wanted.temperature else 3)), version=self.version),
                text=f"{wanted.temperature} {wanted.seed}",
            )
            for wanted in params
        ]


class Table:
    """The n-th sample of a prompt in a call earns the n-th reward of its row; None fails."""

    def __init__(self, rows, greedy=None):
        self.rows, self.greedy = rows, greedy or {}

    def score(self, prompts, completions, episodes=()):
        seen: dict[str, int] = {}
        outcomes = []
        for prompt, text in zip(prompts, completions, strict=True):
            number = seen[prompt.id] = seen.get(prompt.id, -1) + 1
            is_greedy = text.startswith("0.0 ")
            value = self.greedy[prompt.id] if is_greedy else self.rows[prompt.id][number]
            outcomes.append(Outcome.failure("it hung") if value is None else Outcome("score", value))
        return outcomes


def values(config) -> dict:
    """The values of a recipe that a batch source needs, besides its sampling."""
    return {"seed": config.seed, "num_batches": config.steps, "phase_s": config.timeouts.phase_s}


def prompts(num: int) -> list[Prompt]:
    return [Prompt(f"p{n}", (n + 1,), f"prompt {n}") for n in range(num)]


def sampled(rows: dict, *, rounds: int = 0, greedy=None, num_batches: int = 1, **sections):
    """The last of so many batches of three prompts with two samples each, out of eight prompts in order."""
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 2, "dynamic_sampling_rounds": rounds}
    config = recipe(rollout=rollout, seed=11, **sections)
    engine, stream = Echo(), PromptStream(prompts(8), seed=0, shuffle=False)
    given = parts(method=build_method(config), train_prompts=prompts(8))
    backend = InProcessBackend(engine, Table(rows, greedy), engine.load)
    numbers = {"seed": config.seed, "num_batches": num_batches, "limit_s": 60.0}
    rollouts = rollouts_of(config.rollout, given, stream, backend, **numbers)
    rollouts.begin(0)
    for version in range(1, num_batches):
        rollouts.next_batch(60.0)
        rollouts.update_weights(version)
        rollouts.wait_for_weights(60.0)
    batch = as_sampled(rollouts.next_batch(60.0))
    following = stream.next(1)[0].id
    return batch, engine, following


DIFFERENT, EQUAL, FAILED, LONE = [1.0, 0.0], [2.0, 2.0], [None, None], [3.0, None]


def seeds_of(batch) -> dict[str, list[int]]:
    return {group.prompt.id: [int(t.text.split()[1]) for t in group.trajectories] for group in batch.groups}


def test_without_refilling_every_group_is_kept_whatever_its_rewards():
    batch, engine, following = sampled({"p0": EQUAL, "p1": DIFFERENT, "p2": FAILED})
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2"]
    assert (batch.left_out, batch.num_rounds, batch.baselines) == (frozenset(), 0, None)
    assert batch.num_greedy_tokens == SampledBatch([]).num_rounds == 0
    assert (len(engine.asked), following) == (1, "p3")
    # Written down, because a resumed run of another version must draw the same tokens.
    assert seeds_of(batch)["p1"] == [completion_seed(11, 1, 0, 0), completion_seed(11, 1, 1, 0)]


def test_new_prompts_replace_groups_of_equal_reward_and_of_one_reward_and_of_none():
    rows = {"p0": EQUAL, "p1": DIFFERENT, "p2": FAILED, "p3": LONE, "p4": DIFFERENT, "p5": DIFFERENT}
    batch, engine, following = sampled(rows, rounds=5)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert sorted(batch.left_out) == [0, 2, 3]
    # Three prompts, two for the two that taught nothing, one for the one of those that did not either.
    assert [len(asked) for asked in engine.asked] == [6, 4, 2]
    assert (batch.num_rounds, following) == (2, "p6")


def test_every_group_has_seeds_of_its_own_whatever_its_round_or_batch():
    equal = {f"p{n}": EQUAL for n in range(8)}
    batch, _, _ = sampled(equal, rounds=1)
    found = seeds_of(batch)
    assert found["p0"] == [completion_seed(11, 0, 0, 0), completion_seed(11, 0, 1, 0)]
    assert found["p3"] == [completion_seed(11, 3, 0, 0), completion_seed(11, 3, 1, 0)]
    assert len({seed for pair in found.values() for seed in pair}) == 12
    other, _, _ = sampled(equal, num_batches=2)
    assert [group.prompt.id for group in other.groups] == ["p3", "p4", "p5"]
    assert seeds_of(other)["p3"] == found["p3"]


def test_nothing_is_refilled_where_nothing_is_missing():
    batch, engine, following = sampled({"p0": DIFFERENT, "p1": DIFFERENT, "p2": DIFFERENT}, rounds=5)
    assert (batch.left_out, batch.num_rounds, len(engine.asked), following) == (frozenset(), 0, 1, "p3")


@pytest.mark.parametrize("rounds", [1, 2])
def test_when_its_rounds_are_done_a_batch_is_smaller(rounds):
    rows = {f"p{n}": EQUAL for n in range(8)} | {"p1": DIFFERENT}
    batch, engine, following = sampled(rows, rounds=rounds)
    assert len(batch.groups) == 3 + 2 * rounds
    assert set(range(3 + 2 * rounds)) - batch.left_out == {1}
    assert (batch.num_rounds, len(engine.asked), following) == (rounds, 1 + rounds, f"p{3 + 2 * rounds}")


def test_where_no_group_teaches_every_one_is_left_out():
    batch, _, following = sampled({f"p{n}": EQUAL for n in range(8)}, rounds=1)
    assert (batch.left_out, following) == (frozenset(range(6)), "p6")


REMAX = {"advantage": {"kind": "greedy_baseline"}}


def test_greedy_answers_are_sampled_and_scored_once_for_each_prompt():
    rows = {"p0": DIFFERENT, "p1": EQUAL, "p2": DIFFERENT}
    greedy_rows = {"p0": 0.25, "p1": None, "p2": -1.0}
    batch, engine, _ = sampled(rows, greedy=greedy_rows, **REMAX)
    assert batch.baselines[0] == 0.25 and math.isnan(batch.baselines[1]) and batch.baselines[2] == -1.0
    assert engine.asked == [[(n, t) for n in (1, 2, 3) for t in (1.0, 1.0, 0.0)]]
    assert [len(group.trajectories) for group in batch.groups] == [2, 2, 2]
    # Three tokens each, as the engine of this test says them.
    assert batch.num_greedy_tokens == 9
    assert batch.left_out == frozenset()


def test_baselines_belong_to_the_groups_of_every_round():
    rows = {"p0": EQUAL, "p1": DIFFERENT, "p2": DIFFERENT, "p3": DIFFERENT}
    batch, engine, _ = sampled(rows, rounds=3, greedy={"p0": 1.0, "p1": 2.0, "p2": 3.0, "p3": 4.0}, **REMAX)
    assert batch.baselines == [1.0, 2.0, 3.0, 4.0]
    assert sorted(batch.left_out) == [0]


def test_what_is_withheld_is_not_trained_on():
    groups = scored([1.0, 0.0, 2.0], [3.0, 4.0, 5.0])
    taken = TakenBatch(0, (4, 7), (1, 2), frozenset({1}), {7: (0, 2)}, 1, ())
    batch = as_sampled(RolloutBatch(taken, groups, [(), ()], []))
    rewards = [[t.outcome.value for t in group.trajectories] for group in batch.groups]
    assert rewards == [[1.0, 0.0, 2.0], [4.0]]
    assert (batch.left_out, batch.num_rounds, batch.baselines) == (frozenset({1}), 1, None)


def test_what_is_dropped_is_compared_with_what_is_trained_on(tmp_path):
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "oversample_groups": 1}
    config = recipe(steps=1, rollout={**rollout, "batch_order": "completion"})
    engine, rows = Echo(), {"p0": DIFFERENT, "p1": DIFFERENT, "p2": [0.0, 0.0]}
    source = LocalBatchSource(
        config.rollout,
        parts(method=build_method(config), train_prompts=prompts(8)),
        PromptStream(prompts(8), seed=0, shuffle=False),
        **values(config),
        backend=InProcessBackend(engine, Table(rows), engine.load),
        log=EventLog(tmp_path / "events.log", lambda: 0.0),
        ranks=Ranks(),
        spans=Spans(),
        watchdog=None,
    )
    with source:
        source.begin(None, 0)
        batch, told = source.next_batch()
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1"]
    # Of rewards 1, 0, 1, 0, 0, 0 the last two are dropped, and of difficulties 1/2, 1/2 and 1 the last.
    means = {"selection_bias/dropped_fraction": 1 / 3, "selection_bias/reward": (1 / 6) / (2 / 9) ** 0.5}
    means["selection_bias/difficulty"] = (-1 / 6) / (1 / 18) ** 0.5
    assert sorted(told) == sorted(means)
    for name, expected in means.items():
        close_fp64(told[name], expected)


class Long(Echo):
    """Says more to later prompts."""

    def generate(self, prompts, params):
        answers = super().generate(prompts, params)
        lengths = [prompt[0] for prompt in prompts]
        return [
            replace(completion(*([7] * num), version=self.version), text=answer.text)
            for num, answer in zip(lengths, answers, strict=True)
        ]


def told_of(folder, rows, **sections):
    """What two batches of two prompts record, where nothing is dropped for being slow, and the warning."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2}
    config, engine = recipe(steps=2, rollout=rollout, **sections), Long()
    source = LocalBatchSource(
        config.rollout,
        parts(method=build_method(config), train_prompts=prompts(8)),
        PromptStream(prompts(8), seed=0, shuffle=False),
        **values(config),
        backend=InProcessBackend(engine, Table(rows, dict.fromkeys(rows, 0.5) | {"p3": None}), engine.load),
        log=EventLog(folder / "events.log", lambda: 0.0),
        ranks=Ranks(),
        spans=Spans(),
        watchdog=None,
    )
    with source:
        source.begin(None, 0)
        _, first = source.next_batch()
        source.update_weights(1)
        _, second = source.next_batch()
    return first, second, next(iter(source.warnings()), None)


def test_what_has_no_reward_is_not_trained_on_and_compared_with_the_rest(tmp_path):
    rows = {"p0": DIFFERENT, "p1": DIFFERENT, "p2": DIFFERENT, "p3": LONE}
    first, second, warning = told_of(tmp_path, rows)
    assert first == {} and warning is None
    # Of lengths 1 to 4, each twice, the last is left out, of which the reward is not known.
    expected = {"dropped_fraction": 1 / 8, "length": (16 / 7 - 2.5) / 1.25**0.5, "reward": 0, "difficulty": 0}
    assert sorted(second) == sorted(f"selection_bias/{name}" for name in expected)
    for name, value in expected.items():
        close_fp64(second[f"selection_bias/{name}"], value)


def test_a_group_whose_greedy_answer_has_no_reward_is_not_trained_on(tmp_path):
    rows = dict.fromkeys(("p0", "p1", "p2", "p3"), DIFFERENT)
    first, second, _ = told_of(tmp_path, rows, **REMAX)
    assert first == {}
    close_fp64(second["selection_bias/dropped_fraction"], 2 / 8)
    close_fp64(second["selection_bias/length"], (2 - 2.5) / 1.25**0.5)


class Ending(RecordedLog):
    """The last of it happens while the trainer waits for its turn."""

    ended = False

    def reached(self, kind: str) -> bool:
        """It is always his turn."""
        self.ended = True
        return True


@pytest.mark.world
def test_where_a_replay_ends_engines_keep_what_they_draw(tmp_path):
    """In the run they were asked for something else next, or for nothing."""
    backend, config = Manual("a", sleeps=True), recipe(steps=4, rollout={"max_staleness": 1})
    log = Ending(tmp_path / "events.log", lambda: 0.0, RunSegment([], 1, 2))
    source = LocalBatchSource(
        config.rollout,
        parts(backend=backend, method=build_method(config), train_prompts=prompts(8)),
        PromptStream(prompts(8), seed=0, shuffle=False),
        **values(config),
        backend=backend,
        log=log,
        ranks=Ranks(),
        spans=Spans(),
        watchdog=SimpleNamespace(reporting=lambda fields: nullcontext()),
    )
    with source:
        source.begin(None, 0)
        backend.events = serving("a")
        while not backend.taken("submit"):
            time.sleep(0.001)
        source.save(tmp_path)
    assert backend.taken("abort") == []
    kinds = [event["kind"] for event in read_events(tmp_path / "events.log")]
    assert kinds[-1] == "save" and "abort_in_flight" not in kinds
    assert json.loads((tmp_path / "rollouts.json").read_text())["rollouts"]


def test_the_rules_of_a_recipe():
    ahead = {"max_staleness": 2, "batch_order": "completion", "stale_policy": "drop"}
    rollout = {**ahead, "prompts_per_step": 5, "dynamic_sampling_rounds": 3}
    rules = staleness_policy(recipe(rollout=rollout).rollout)
    assert (rules.groups_per_step, rules.staleness, rules.order, rules.stale) == (5, 2, "completion", "drop")
    assert (rules.dynamic_sampling_rounds, rules.oversample_groups) == (3, 0)


def test_a_status_names_no_scale_request_whose_target_it_lacks():
    """The id comes with the target, so it does not matter that the next request has been read meanwhile."""
    requests = SimpleNamespace(last_request="after")
    source = SimpleNamespace(_scale_requests=requests, _num_engines=0)
    background = SimpleNamespace(engines=lambda: Engines(1, {}, last_request="before"))
    found = LocalBatchSource._status(source, background)
    assert (found["target"], found["last_request"]) == (1, "before")
