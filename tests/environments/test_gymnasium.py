"""Environments of gymnasium: the same episodes as in its own loop, and clear errors."""

from __future__ import annotations

import queue
import random
import sys

import gymnasium
import numpy as np
import pytest

from millrace.config.environment_section import (
    GymnasiumEnvironmentConfig,
    TextArenaEnvironmentConfig,
    idle_environment,
)
from millrace.environments.gymnasium_environment import NUM_SEEDS
from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import checked
from millrace.environments.workers import EnvironmentWorkers
from millrace.errors import SetupError
from millrace.run.build_environments import environment_rows
from millrace.types import Action, Task
from tests.environments.steps import ENCODE, letters, step

WORD = "tests.environments.gymnasium_games:Word-v0"
LAKE = {
    "id": "FrozenLake-v1",
    "options": {"render_mode": "ansi"},
    "observation": "render",
    "actions": ("left", "down", "right", "up"),
}


def factory(id=WORD, **given):
    config = GymnasiumEnvironmentConfig(kind="gymnasium", id=id, **given)
    return environment_factory("gymnasium", "gymnasium", config.arguments)


def act(text):
    return Action(text, (1,), "stop")


def begun(make, seed):
    game = make()
    return game, checked(game.begin(Task("", "", {}, seed, 0, 8)), "begin")


def episode(make, seed, texts):
    """Texts, rewards and end through millrace, until the end."""
    game, reply = begun(make, seed)
    found = [(reply.text, reply.reward, reply.done)]
    for text in texts:
        reply = checked(game.step(act(text)), "step")
        found.append((reply.text, reply.reward, reply.done))
        if reply.done:
            break
    game.close()
    return found


def own_loop(env, seed, actions, text_of):
    """The same by gymnasium alone."""
    observation, _ = env.reset(seed=seed)
    found = [(text_of(env, observation), 0.0, False)]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        found.append((None if done else text_of(env, observation), float(reward), done))
        if done:
            break
    env.close()
    return found


def test_a_game_of_gymnasium_is_the_same_as_in_its_own_loop():
    make, ends = factory(**LAKE), set()
    for seed in range(20):
        numbers = random.Random(seed).choices(range(4), k=120)
        names = [LAKE["actions"][number].title() for number in numbers]
        found = episode(make, seed + NUM_SEEDS, names)
        env = gymnasium.make(LAKE["id"], render_mode="ansi")
        assert found == own_loop(env, seed, numbers, lambda env, _: env.render())
        ends.add(found[-1][1:])
    assert ends == {(0.0, True), (1.0, True)}


@pytest.mark.parametrize(
    ("id", "given", "text_of"),
    [
        (WORD, {"options": {"length": 2}}, lambda env, observation: observation),
        (
            WORD.replace("Word", "WordInTime"),
            {"options": {"observe": "field"}, "text_field": "text"},
            lambda env, observation: observation["text"],
        ),
    ],
    ids=["text", "field"],
)
def test_texts_and_an_end_by_truncation_are_those_of_its_own_loop(id, given, text_of):
    for seed in range(5):
        texts = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=40)
        env = gymnasium.make(id, **given["options"])
        assert episode(factory(id, **given), seed, texts) == own_loop(env, seed, texts, text_of)


def test_a_game_is_won_by_rewards():
    game, _ = begun(factory(options={"length": 3}), 7)
    word = game._env.unwrapped.word
    replies = [game.step(act(f" {letter}\n")) for letter in word]
    assert [reply.text for reply in replies] == [f"{word[:1]}__", f"{word[:2]}_", None]
    assert [reply.reward for reply in replies] == [float(np.float32(1 / 3))] * 3 and replies[-1].done


def test_equal_seeds_and_actions_give_equal_replies_also_side_by_side():
    make = factory(pure=True, **LAKE)
    one, two, other = [begun(make, seed)[0] for seed in (3, 3, 4)]
    for name in ["right", "down", "left", "right"]:
        replies = [game.step(act(name)) for game in (one, other, two)]
        assert replies[0] == replies[2]
    assert make().pure and not factory(**LAKE)().pure


def test_what_is_no_action_gets_a_reply_and_then_ends_the_episode():
    game, first = begun(factory(max_invalid_actions=2, instructions="One letter."), 1)
    assert first.text == "One letter.\n___"
    for text in ("", "ab"):
        reply = game.step(act(text))
        assert not reply.done and "Answer with 1 to 1 characters of: abc" in reply.text
    assert game.step(act(game._env.unwrapped.word[0])).reward > 0
    reply = game.step(act("É\x1b"))
    assert reply.done and reply.invalid == "3 completions were no action; the last: É\\x1b"


def test_discrete_actions_are_numbers_unless_they_have_names():
    make = factory(**{**LAKE, "actions": (), "action_pattern": "(?s).*go (?P<action>\\S+)"})
    game, _ = begun(make, 0)
    assert game.step(act("go 7, no: go 1\nnow")).text.startswith("  (Down)\n")
    for text in ("1", "go 4", "go -1", "go 1.0", "go " + "9" * 10_000, "go \u0661", "go \ud800"):
        assert game.step(act(text)).text == "That is not an action. Answer with a number from 0 to 3." or (
            game.step(act(text)).invalid
        )
        game._num_invalid = 0


def test_an_environment_that_raises_fails_its_episode():
    replies = []
    environments = EnvironmentsInThread(factory(options={"how": "step"}), ENCODE, replies.append)
    environments.execute(step())
    environments.execute(step("a"))
    assert replies[0].token_ids == letters("___")
    assert replies[1].failure.startswith("step 1 raised OSError: the dictionary is gone (gymnasium_games.py")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "Frozenlak-v1"}, "cannot be found: Environment 'Frozenlak' doesn't exist."),
        ({"id": "nowhere:Game-v0"}, "cannot be found: No module named 'nowhere'."),
        ({"options": {"size": 2}}, r"made with environment.options \{'size': 2\}: .* argument 'size'"),
        ({"options": {"how": "reset"}}, "Word-v0 cannot be reset: OSError: the dictionary is gone"),
        ({"options": {"observe": "field"}}, "observation of type dict, not text; name its field of text"),
        ({"options": {"observe": "field"}, "text_field": "word"}, "observation without the field word"),
        ({"id": "FrozenLake-v1"}, "observation of type int, not text; .* environment.observation to render"),
        ({"observation": "render"}, "renders no text: .* needs render_mode ansi in environment.options"),
        ({"actions": ("a", "b")}, "takes text as action; remove environment.actions"),
        ({**LAKE, "actions": ("up", "Up", "left", "right")}, "has 4 actions; .* needs 4 different names"),
        ({"id": "Pendulum-v1"}, r"has actions Box\(.*; only Text and Discrete ones"),
        ({"options": {"how": "global"}, "pure": True}, "is not pure: two resets with one seed differ"),
        ({"action_pattern": "("}, "is not a pattern of RE2"),
        ({"action_pattern": "(?P<act>.)"}, r"needs the group \(\?P<action>...\) and no other"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(given, message):
    with pytest.raises(SetupError, match=message):
        factory(**given)


def test_settings_without_an_effect_are_named():
    config = GymnasiumEnvironmentConfig(kind="gymnasium", id=WORD, observation="render", text_field="text")
    assert list(idle_environment(config)) == [
        "environment.text_field has no effect with environment.observation render; remove it"
    ]
    for kind, id in {GymnasiumEnvironmentConfig: WORD, TextArenaEnvironmentConfig: "Nim-v0"}.items():
        name = kind.__name__.removesuffix("EnvironmentConfig").lower()
        (sentence,) = idle_environment(kind(kind=name, id=id, workers=0))
        assert sentence == f"environment kind {name} runs in workers; set environment.workers to 1 or more"
    with pytest.raises(ValueError, match="is not of the form Name-v0, namespace/Name-v0 or module:Name-v0"):
        GymnasiumEnvironmentConfig(kind="gymnasium", id="two words")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SetupError, match=r'pip install "millrace-rl\[gymnasium\]"'):
        factory()


def test_problems_differ_by_their_seed_alone():
    config = GymnasiumEnvironmentConfig(kind="gymnasium", id=WORD)
    rows = list(environment_rows(config, 3, 0))
    assert [row["problem"] for row in rows] == [0, 1, 2] and {row["prompt"] for row in rows} == {WORD}


@pytest.mark.parametrize("pure", [True, False])
def test_an_episode_that_is_not_in_progress_is_repeated_if_it_is_pure(pure):
    replies = []
    environments = EnvironmentsInThread(factory(pure=pure), ENCODE, replies.append)
    environments.execute(step("a", "e"))
    assert ("it is not pure" in replies[0].failure) is not pure
    environments.close()


@pytest.mark.world
def test_an_episode_runs_in_a_worker():
    replies = queue.SimpleQueue()
    deadlines = {"begin_s": 100.0, "step_s": 100.0, "episode_s": 100.0}
    config = GymnasiumEnvironmentConfig(kind="gymnasium", id=WORD, max_invalid_actions=0, **deadlines)
    workers = EnvironmentWorkers(config, ENCODE, replies.put, max_tokens=100)
    try:
        found = []
        for texts in [(), ("a",), ("a", "e?")]:
            workers.execute(step(*texts))
            found.append(replies.get(timeout=100.0))
    finally:
        workers.close()
    assert found[0].token_ids == letters("___") and not found[1].failure and not found[1].done
    assert found[2].done and found[2].invalid == "1 completions were no action; the last: e?"
