"""Classes for TRL's GRPOTrainer: the same episodes as in its own loop, and clear errors."""

from __future__ import annotations

import asyncio
import random
from importlib.util import find_spec

import pytest
from transformers.utils import get_json_schema

from millrace.config.environment_section import TrlEnvironmentConfig
from millrace.config.recipe import load_recipe
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import EnvironmentFailed, RunningEpisodes, call_here, checked
from millrace.errors import SetupError
from millrace.types import Action, Task
from tests.environments import trl_classes

needs_trl = pytest.mark.skipif(
    find_spec("trl") is None or find_spec("accelerate") is None, reason="needs TRL: pip install trl"
)
PROMPT = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "Which number is it?"}]


def factory(name="Secret", *functions, is_scored=False, **given):
    module = "tests.environments.trl_classes"
    names = [f"{module}:{function}" for function in functions]
    config = TrlEnvironmentConfig(kind="trl", factory=f"{module}:{name}", reward_functions=names, **given)
    return environment_factory("trl", "trl", {**config.arguments, "is_scored": is_scored})


def turn(*calls, content=""):
    """A message of the assistant with calls, each a name and its arguments."""
    entries = [{"type": "function", "function": {"name": one, "arguments": given}} for one, given in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": entries} if entries else {})


def action(message):
    with_ids = [one | {"id": f"call{number:05d}"} for number, one in enumerate(message.get("tool_calls", []))]
    return Action("", (1, 2), "stop", message | ({"tool_calls": with_ids} if with_ids else {}))


def played(make, row, turns, max_turns=8):
    """Prompt, the messages that follow it, and the last reply."""

    async def play():
        game = make()
        begun = checked(await game.begin(Task("", "", row, 0, 0, max_turns)), "begin")
        messages = []
        for message in turns:
            reply = checked(await game.step(action(message)), "step")
            messages += [
                message,
                *({k: v for k, v in one.items() if k != "tool_call_id"} for one in reply.messages),
            ]
            if reply.done:
                break
        await game.close()
        return list(begun.messages) or row["prompt"], messages, reply

    return asyncio.run(play())


def some_turns(generator):
    calls = [("guess", {"number": number}) for number in range(1, 9)] + [("give_up", {})]
    counts = generator.choices([1, 1, 1, 2, 3], k=generator.randrange(6))
    return [turn(*generator.choices(calls, k=count)) for count in counts] + [turn(content="done")]


def test_an_episode_is_reset_with_the_row_and_scored_by_its_object():
    row = {"prompt": PROMPT, "number": 6, "answer": "6"}
    calls = ("guess", {"number": 3}), ("guess", {"number": 9, "why": None})
    turns = [
        turn(*calls),
        turn(("guess", {"number": 6})),
        turn(("give_up", {})),
        turn(("guess", {"number": 1})),
    ]
    prompt, messages, reply = played(factory(), row, [*turns, turn(content="6")])
    assert prompt == [PROMPT[0], {"role": "user", "content": "Which number is it? It is below 12."}]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results == ["higher", "lower", "right", "{'number': 6}", "{'error': 'Game over.'}"]
    assert (reply.done, reply.score) == (True, 1.0) and PROMPT[-1]["content"] == "Which number is it?"


def test_the_last_turn_is_scored_without_its_calls():
    row = {"prompt": "Which?", "number": 6, "hint": False}
    make = factory()
    turns = [turn(("guess", {"number": 6})), turn(("guess", {"number": 1}))]
    prompt, messages, reply = played(make, row, turns, max_turns=2)
    assert (prompt, len(messages), reply.done, reply.score) == ("Which?", 3, True, 1.25)


def test_tools_are_described_as_transformers_does():
    make = factory("Waiting")
    begun = asyncio.run(make().begin(Task("", "", {"prompt": PROMPT, "number": 1}, 0, 0, 8)))
    own = trl_classes.Waiting()
    assert list(begun.tools) == [get_json_schema(own.give_up), get_json_schema(own.guess)]


def test_an_object_is_used_again_unless_a_method_of_it_may_still_run():
    make = factory("made")
    row = {"prompt": PROMPT, "number": 6}
    trl_classes.MADE.clear()
    for _ in range(3):
        assert played(make, row, [turn(("guess", {"number": 6})), turn()])[2].score == 1.25
    assert not trl_classes.MADE

    async def abandoned():
        make = factory("Unscored", is_scored=True)
        game, other = make(), make()
        await game.begin(Task("", "", row, 0, 0, 8))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(game.step(action(turn(("add", {"how": "hang"})))), 0.01)
        await game.close()
        await other.begin(Task("", "", row, 0, 0, 8))
        assert other._played is not game._played

    asyncio.run(abandoned())
    trl_classes.RELEASED.set()


def test_reward_functions_get_what_trl_gives_them():
    row = {"prompt": PROMPT, "scale": 2}
    turns = [turn(("add", {"how": ""}), ("add", {"how": ""})), turn(content="two")]
    make = factory("Unscored", "count_reward", "length_reward", "no_reward")
    assert played(make, row, turns)[2].score == 2 * 2 + 4 + 4 / 128


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_reward", "got no reward: None from tests.environments.trl_classes:no_reward"),
        ("text_reward", "got str from tests.environments.trl_classes:text_reward, not a number or None"),
        ("bare_reward", "reward function tests.environments.trl_classes:bare_reward that returned no list"),
    ],
)
def test_what_is_no_reward_fails_the_episode(function, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        played(factory("Unscored", function), {"prompt": PROMPT}, [turn()])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": PROMPT, "how": "raise"}, r"begin raised OSError: the server is gone \(trl_classes.py"),
        ({"prompt": PROMPT, "how": "list"}, "returned list from reset, not text or None"),
        ({"question": "Which?"}, "has a row without the column prompt"),
        ({"prompt": 3}, "cannot read the prompt of its row: row: the prompt is a number"),
    ],
)
def test_an_episode_that_cannot_begin_fails(row, reason):
    episodes = RunningEpisodes(factory("Unscored", is_scored=True), call_here)
    with pytest.raises(EnvironmentFailed, match=reason):
        asyncio.run(episodes.reply("0", Task("", "", row, 0, 0, 8), ()))


@pytest.mark.parametrize(
    ("name", "functions", "message"),
    [
        ("Gone", (), "module tests.environments.trl_classes does not have a function Gone"),
        ("Broken", (), "cannot be made: ConnectionError: nothing listens at the port"),
        ("NoReset", (), r"has no method `def reset\(self, \*\*kwargs\)`"),
        ("NoTypes", (), "guess cannot be a tool: Argument number is missing a type hint"),
        ("Unscored", (), "has no get_reward; add it, or environment.reward_functions, or rewards"),
        ("Secret", ("gone",), "does not have a function gone"),
        ("Secret", ("of_the_trainer",), "of_the_trainer takes trainer_state, which only TRL's trainer has"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused(name, functions, message):
    with pytest.raises(SetupError, match=message):
        factory(name, *functions)


def test_a_recipe_names_the_column_of_the_prompt(tmp_path):
    environment = {"kind": "trl", "factory": "tests.environments.trl_classes:Secret"}
    given = {"environment": environment, "data": {"train": str(tmp_path)}, "rewards": []}
    with pytest.raises(Exception, match="environment kind trl reads the prompt from the column prompt"):
        load_recipe("grpo", given)
    with pytest.raises(Exception, match="set data.template to chat or auto"):
        load_recipe("grpo", {**given, "data.prompt_column": "prompt", "data.template": "Q: {prompt}"})
    with pytest.raises(Exception, match="'Secret' is not of the form module:name"):
        load_recipe("grpo", {**given, "environment.factory": "Secret"})


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["Secret", "Waiting"])
def test_an_episode_is_the_same_as_in_trls_own_loop(name, monkeypatch):
    from tests.environments.trl_loop import own_loop

    make, own, scores = factory(name, "length_own"), getattr(trl_classes, name), set()
    for seed in range(12):
        generator = random.Random(seed)
        row = {"prompt": PROMPT, "number": generator.randrange(1, 9), "hint": seed % 3 > 0}
        turns, max_turns = some_turns(generator), generator.randrange(1, 7)
        expected = own_loop(own, [trl_classes.length_own], row, turns, max_turns, monkeypatch)
        prompt, messages, reply = played(make, row, turns, max_turns)
        assert reply.done and (prompt, messages) == expected[:2]
        assert reply.score == expected[2]
        scores.add(reply.score)
    assert len(scores) > 5
