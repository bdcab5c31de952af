"""Fault schedules on a virtual clock: whatever happens to engines, rewards and trainer, no group is lost.

    python scripts/chaos.py --schedules 24000 --workers 2
    python scripts/chaos.py --first 4711 --schedules 1        # one schedule again

A schedule is a function of its number: rules, engines, durations and faults are sampled from it. Engines
crash, hang, slow down; others are added and drained; messages come late, twice and in another order;
rewards and environments fail; loads break half way or are never verified; the trainer dies between any two
commands or events and goes on from what it saved last. The controller is the real one
(`millrace.rollout.manager`). Before a save, all, some or no engines have returned their partial output.
Afterwards each group that started is trained on once or dropped with a reason, within its staleness bound,
from the tokens of its seeds, and the event log verifies the same; or the run ended with a named error where
the schedule leaves no other end. Exit code 1: a schedule did not, and its number is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from millrace.data.prompts import PromptStream
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.eventlog.log import check_log
from millrace.planner.durations import StepCost, constant, exponential, lognormal, share_of
from millrace.rollout.episodes import EpisodeRules
from millrace.rollout.manager import RolloutBatch, RolloutManager
from millrace.rollout.staleness import StalenessController, StalenessPolicy
from millrace.simulation.simulated_backend import EnginesGone, Faults, SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import ROOT, Group, Prompt, SamplingParams

PROMPTS = {f"p{i}": Prompt(f"p{i}", (100 + i, 3, 4), f"p{i}") for i in range(20)}
RULES = EpisodeRules(
    seed=0,
    max_turns=10,
    max_tokens=100_000,
    ends_at_length=False,
    attempts=2,
    invalid_score=0.0,
    scored=True,
)
# A slow engine with a full queue is far below it.
REQUEST_S, LOAD_S = 90.0, 20.0
# Virtual seconds; more engines than any schedule has may be lost one after the other within it.
DEADLINE_S = 20_000.0


class Died(Exception):
    """The trainer's process is gone."""


class Broken(AssertionError):
    """A schedule showed what must never be."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a schedule's number determines."""

    number: int
    rules: StalenessPolicy
    num_batches: int
    num_samples: int
    num_turns: int
    num_engines: int
    faults: Faults
    costs: Costs
    train_s: float
    save_every: int
    lives: tuple[int, ...]

    @classmethod
    def sampled(cls, number: int) -> Schedule:
        """The schedule of this number."""
        rng = random.Random(number)

        def sometimes(value: Any, otherwise: Any, share: float = 0.3) -> Any:
            return value if rng.random() < share else otherwise

        return cls(
            number=number,
            rules=_rules(rng),
            num_batches=rng.randint(2, 5),
            num_samples=rng.randint(1, 3),
            num_turns=rng.choice((0, 0, 1, 2, 3)),
            num_engines=rng.randint(1, 4),
            faults=Faults(
                crash_every_s=sometimes(rng.uniform(20, 120), math.inf, 0.6),
                hang_every_s=sometimes(rng.uniform(60, 300), math.inf),
                notice_s=sometimes(rng.uniform(0.1, 30), math.inf, 0.5),
                slow=sometimes(0.4, 0.0),
                late=sometimes(rng.uniform(0.0, 0.6), 0.0),
                late_s=exponential(rng.uniform(0.1, 5)),
                twice=sometimes(rng.uniform(0.0, 0.5), 0.0),
                reward=sometimes(0.3, 0.0),
                environment=sometimes(0.1, 0.0),
                load_breaks=sometimes(0.2, 0.0),
                load_hangs=sometimes(0.2, 0.0),
                restart_s=exponential(rng.uniform(0.1, 10)),
                restarts=sometimes(rng.randint(0, 6), 1_000_000, 0.1),
                scale_every_s=sometimes(rng.uniform(5, 60), math.inf, 0.5),
                scale_most=rng.randint(1, 5),
                refused=sometimes(0.3, 0.0),
            ),
            costs=Costs(
                service=StepCost(0.02, 0.002, 1e-4),
                num_tokens=lognormal(rng.uniform(5, 30), 0.8),
                score_s=exponential(rng.uniform(0.01, 2)),
                environment_s=exponential(rng.uniform(0.01, 2)),
                load_s=constant(rng.uniform(0.0, 1.0)),
                message_s=exponential(0.01),
                num_answers=rng.randint(1, 3),
            ),
            train_s=rng.uniform(0.0, 4.0),
            save_every=rng.randint(1, 3),
            # So many commands and waits until the trainer dies, each time.
            lives=tuple(
                int(rng.expovariate(1 / 60)) + 1 for _ in range(sometimes(rng.randint(1, 3), 0, 0.4))
            ),
        )


def _rules(rng: random.Random) -> StalenessPolicy:
    staleness = rng.choice((0, 0, 1, 1, 2, 3))
    in_order = rng.random() < 0.5
    return StalenessPolicy(
        groups_per_step=rng.randint(1, 3),
        staleness=staleness,
        order="submission" if in_order else "completion",
        stale="wait" if in_order or not staleness else rng.choice(("wait", "drop", "keep", "withhold")),
        dynamic_sampling_rounds=rng.choice((0, 0, 1, 2)),
        oversample_groups=0 if in_order or staleness else rng.randint(0, 2),
    )


def seed_of(schedule: int, number: int, sample: int, turn: int) -> int:
    """The seed of one turn, as in a run."""
    return int.from_bytes(
        hashlib.blake2b(repr((schedule, number, sample, turn)).encode(), digest_size=8).digest()
    )


def turns(step: StepEnvironment, *, num_turns: int) -> EnvironmentReply:
    """An environment of some turns: it replies with the turn and the first token of the completion.

    In some groups it opens branches, and it is given what it saved with the reply before.
    """
    turn, number = len(step.actions), int(step.episode.partition(".")[0])
    saved = {"state": turn} if number % 2 else None
    before = {"state": turn - 1} if turn and number % 2 else None
    _demand(step.saved == before, f"it was given {step.saved}, not {before}")
    if turn == 0:
        return EnvironmentReply(step.id, step.prompt.token_ids, saved=saved)
    tokens = (turn, *step.actions[-1].token_ids[:1])
    if turn == num_turns:
        return EnvironmentReply(step.id, tokens, done=True, saved=saved)
    return EnvironmentReply(step.id, tokens, saved=saved, after=branch(number, turn))


def branch(number: int, turn: int) -> int | None:
    """The turn that the reply to a turn follows in a group; None is that turn."""
    return random.Random(f"{number} {turn}").randint(ROOT, turn - 1) if number % 3 == 0 else None


def dying_backend(backend: SimulatedBackend, life: int) -> SimulatedBackend:
    """A runtime whose trainer dies after so many commands and waits."""
    left = [life]

    def dying(command: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return command(*given)

        return call

    for name in ("execute", "wait"):
        setattr(backend, name, dying(getattr(backend, name)))
    return backend


@dataclass(slots=True)
class Known:
    """What the run has in its folder, and what the harness knows of the truth."""

    versions: list[int] = field(default_factory=lambda: [100])
    events: list[dict[str, Any]] = field(default_factory=list)
    trained: dict[int, int] = field(default_factory=dict)
    state: Any = None

    def log_event(self, kind: str, /, **facts: Any) -> None:
        """Keep an event."""
        self.events.append({"kind": kind, **facts})

    def copy(self) -> Known:
        """The same, to go on from."""
        return replace(self, versions=[*self.versions], events=[*self.events], trained={**self.trained})

    def saved(self, rollouts: RolloutManager) -> Known:
        """What a checkpoint taken now keeps."""
        words, columns = rollouts.state()
        self.log_event("save", name=f"step-{len(self.versions) - 1}")
        return replace(self.copy(), state=(json.loads(json.dumps(words)), columns))


class Run:
    """One schedule, with as many lives as it has."""

    def __init__(self, number: int) -> None:
        self.schedule = Schedule.sampled(number)
        self.rng = random.Random(-number - 1)
        self.saved = self.known = Known()

    def run(self) -> str:
        """How it ended: `done`, or the name of the error that the schedule explains."""
        for life in [*self.schedule.lives, sys.maxsize]:
            try:
                self.live(self.saved.copy(), life)
            except Died:
                continue  # the next life goes on from what was saved last
            except EnginesGone:
                if self.schedule.faults.restarts > 1000:
                    raise
                return "EnginesGone"
            return "done"
        raise Broken("the last life ended")

    def live(self, known: Known, life: int) -> None:
        """Train from the last checkpoint to the end, or until the trainer dies."""
        schedule, self.known = self.schedule, known
        rules, costs = schedule.rules, schedule.costs
        if not known.events:
            known.log_event("begin", rules=asdict(rules), num_batches=schedule.num_batches)
        seed = self.rng.getrandbits(32)
        backend = dying_backend(
            SimulatedBackend(
                schedule.num_engines,
                costs,
                schedule.faults,
                seed=seed,
                environment=partial(turns, num_turns=schedule.num_turns),
            ),
            life,
        )
        controller = StalenessController(rules, num_batches=schedule.num_batches, log_event=known.log_event)
        rollouts = RolloutManager(
            controller,
            backend,
            PromptStream(list(PROMPTS.values()), seed=schedule.number, shuffle=True),
            prompts=PROMPTS,
            episode_rules=RULES if schedule.num_turns else None,
            params=self.params,
            num_samples=schedule.num_samples,
            num_baselines=schedule.number % 2,
            request_s=REQUEST_S,
            load_s=LOAD_S,
            log_event=known.log_event,
        )
        if known.state is not None:
            rollouts.load_state(*known.state)
        rollouts.begin(known.versions[-1])
        while controller.num_taken < schedule.num_batches:
            rolled = rollouts.next_batch(DEADLINE_S)
            controller.check()
            self.check(rolled, known)
            end_s = backend.now() + schedule.train_s
            while backend.now() < end_s:
                rollouts.advance(end_s - backend.now())
            known.versions.append(known.versions[-1] + self.rng.choice((0, 1, 1, 2)))
            rollouts.update_weights(known.versions[-1])
            controller.check()
            if self.rng.random() < 0.3:
                rollouts.wait_for_weights(DEADLINE_S)
            if controller.num_taken % schedule.save_every == 0:
                if self.rng.random() < 0.7:
                    self.collect_partial_output(rollouts, backend)
                self.saved = known.saved(rollouts)
                rollouts.resume()
        rollouts.wait_for_weights(DEADLINE_S)
        if left := check_log(known.events):
            raise Broken(f"groups {left} were neither trained on nor dropped")
        if len(known.versions) != schedule.num_batches + 1:
            raise Broken(f"{len(known.versions) - 1} batches were trained on")

    def collect_partial_output(self, rollouts: RolloutManager, backend: SimulatedBackend) -> None:
        """Collect the partial output of the engines that are not too late."""
        rollouts.pause()
        end_s = backend.now() + self.rng.uniform(0, 3)
        while not rollouts.is_idle and backend.now() < end_s:
            rollouts.advance(end_s - backend.now())

    def params(self, number: int, sample: int, turn: int) -> SamplingParams:
        """With the seed of the turn."""
        return SamplingParams(max_tokens=60, seed=seed_of(self.schedule.number, number, sample, turn))

    def check(self, rolled: RolloutBatch, known: Known) -> None:
        """Prove a batch from its tokens alone."""
        taken, batch = rolled.taken, len(known.versions) - 1
        _demand(taken.batch == batch, f"batch {taken.batch} came where {batch} is next")
        _demand(len(taken.numbers) == len(rolled.groups), "numbers and groups differ")
        started = {e["number"]: e["prompt"] for e in known.events if e["kind"] == "start"}
        if self.schedule.rules.order == "submission":
            _demand(max(known.trained, default=-1) < taken.numbers[0], "groups were overtaken")
        for place, number in enumerate(taken.numbers):
            group = rolled.groups[place]
            _demand(number not in known.trained, f"group {number} was trained on twice")
            _demand(group.prompt.id == started[number], f"group {number} has another prompt")
            known.trained[number] = batch
            _demand(len(group.trajectories) == self.schedule.num_samples, "samples are missing")
            withheld = taken.withheld.get(number, ())
            ages = [
                self.check_trajectory(group, number, sample, known)
                for sample in range(self.schedule.num_samples)
            ]
            age = max(age for sample, age in enumerate(ages) if sample not in withheld)
            bound = math.inf if self.schedule.rules.stale == "keep" else self.schedule.rules.staleness
            _demand(
                age <= min(bound, taken.staleness[place]) or place in taken.left_out,
                f"group {number} is {age} old, {taken.staleness[place]} was logged",
            )

    def check_trajectory(self, group: Group, number: int, sample: int, known: Known) -> int:
        """Its tokens are those of its seeds, in order; the staleness of the oldest."""
        trajectory = group.trajectories[sample]
        _demand(trajectory.outcome is not None, "it has no outcome")
        if trajectory.end != "failed":
            num_turns = self.schedule.num_turns or 1
            _demand(len(trajectory.turns) == num_turns, "turns are missing or doubled")
        elif not trajectory.turns:
            return 0
        expected, seen = group.prompt.token_ids, []
        for place, turn in enumerate(trajectory.turns):
            completion, seed = turn.completion, seed_of(self.schedule.number, number, sample, place)
            first, length = seed & 0xFFFF, round(self.schedule.costs.num_tokens(share_of(seed)))
            _demand(turn.observation == expected, f"turn {place} observed {turn.observation}, not {expected}")
            after = branch(number, place) if place else None
            _demand(turn.after == after, f"turn {place} follows {turn.after}, not {after}")
            _demand(
                len(completion.token_ids) == max(1, min(60, length)),
                f"turn {place} is too long or too short",
            )
            _demand(completion.token_ids[0] == first, f"turn {place} holds the tokens of another")
            _demand(completion.finish_reason in ("stop", "length"), f"turn {place} was cut short")
            expected = (place + 1, first)
            seen += completion.versions.tolist()
        _demand(set(seen) <= set(known.versions), "a token is of weights that no update had")
        # Equal versions are equal weights: the newest step counts.
        newest = {version: step for step, version in enumerate(known.versions)}
        return len(known.versions) - 1 - min(newest[version] for version in seen)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def tried(number: int) -> tuple[int, str, str]:
    """A schedule's number, how it ended, and the traceback where it must not end so."""
    try:
        return number, Run(number).run(), ""
    except Exception:
        return number, "broken", traceback.format_exc()


def main() -> None:
    """Run schedules; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    numbers, begun_s = range(given.first, given.first + given.schedules), time.perf_counter()
    ends: Counter[str] = Counter()
    with ProcessPoolExecutor(given.workers) as pool:
        for number, end, why in pool.map(tried, numbers, chunksize=50):
            ends[end] += 1
            if why and ends[end] <= 5:
                print(f"schedule {number} broke:\n{why}", file=sys.stderr)
    print(f"{len(numbers)} schedules in {time.perf_counter() - begun_s:.0f} s: {dict(ends)}")
    sys.exit(1 if ends["broken"] else 0)


if __name__ == "__main__":
    main()
