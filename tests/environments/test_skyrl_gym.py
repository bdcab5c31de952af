"""Environments of SkyRL-gym: the same episodes as in its own loop, and clear errors."""

from __future__ import annotations

import copy
import random
import sys
from importlib.util import find_spec

import pytest

from millrace.config.environment_section import SkyrlGymEnvironmentConfig
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import EnvironmentFailed, checked
from millrace.errors import SetupError
from millrace.types import Action, Task

# Its import binds a port, to find out whether there is IPv6.
pytestmark = pytest.mark.world
needs_skyrl = pytest.mark.skipif(
    find_spec("skyrl_gym") is None, reason="needs SkyRL-gym: pip install 'millrace-rl[skyrl-gym]'"
)
PRODUCT = "tests.environments.skyrl_games:Product"
TEXTS = ["#### 12", "I think 12", "#### 13", "#### 1,2", "13", "", "Answer: 12"]


def factory(id, **given):
    config = SkyrlGymEnvironmentConfig(kind="skyrl_gym", id=id, **given)
    return environment_factory("skyrl_gym", "skyrl_gym", config.arguments)


def row_of(**more):
    truth = {"method": "rule", "ground_truth": "12"}
    prompt = [{"role": "user", "content": "3*4"}]
    return {
        "prompt": prompt,
        "env_class": "any",
        "reward_spec": truth,
        "reward_model": truth,
        "extra_info": {},
        **more,
    }


def played(make, row, texts, max_turns):
    """Messages, rewards and whether it ended."""
    game = make()
    messages, rewards = list(checked(game.begin(Task("", "", row, 0, 0, max_turns)), "begin").messages), []
    for text in texts:
        reply = checked(game.step(Action(text, (1,), "stop")), "step")
        messages += [{"role": "assistant", "content": text}, *reply.messages]
        rewards.append(reply.reward)
        if reply.done:
            break
    game.close()
    return messages, rewards, reply.done


def own_loop(spec, options, row, texts, max_turns):
    """The same as `SkyRLGymGenerator.agent_loop` has it: an environment of skyrl_gym.make, init, and step."""
    import skyrl_gym
    from omegaconf import OmegaConf

    extras = {key: value for key, value in copy.deepcopy(row).items() if key not in ("prompt", "env_class")}
    extras["max_turns"] = max_turns
    env = skyrl_gym.make(spec, env_config=OmegaConf.create(options), extras=extras)
    messages, _ = env.init(copy.deepcopy(row["prompt"]))
    messages, rewards = list(messages), []
    for text in texts:
        output = env.step(text)
        messages += [{"role": "assistant", "content": text}, *(output["observations"] * (not output["done"]))]
        rewards.append(output["reward"])
        if output["done"]:
            break
    env.close()
    return messages, rewards, output["done"]


@needs_skyrl
@pytest.mark.parametrize(
    ("id", "options"),
    [("gsm8k", {}), ("gsm8k_multi_turn", {}), ("aime", {}), (PRODUCT, {"hint": "No"})],
    ids=["gsm8k", "gsm8k_multi_turn", "aime", "own"],
)
def test_an_episode_is_the_same_as_in_skyrls_own_loop(id, options):
    from skyrl_gym.envs.registration import EnvSpec

    spec, ends = (EnvSpec("own", PRODUCT) if ":" in id else id), set()
    make = factory(id, options=options)
    for seed in range(20):
        generator = random.Random(seed)
        texts, max_turns = generator.choices(TEXTS, k=6), generator.randrange(1, 6)
        row = row_of()
        found = played(make, row, texts, max_turns)
        assert found == own_loop(spec, options, row, texts, max_turns) and row == row_of()
        ends.add(found[1][-1])
    assert len(ends) > 1


@needs_skyrl
def test_a_promise_of_equal_replies_is_the_recipes():
    assert factory(PRODUCT, pure=True)().pure and not factory(PRODUCT)().pure


@needs_skyrl
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("init", r"returned list from init, not \(messages, metadata\)"),
        ("changed", r"changed the completion \(postprocessed_action\)"),
        ("reward", "returned a reward of type str, not a number"),
        ("silent", "returned no observation from step, and the episode is not done"),
        ("nothing", "returned no observations, reward and done from step"),
    ],
)
def test_what_cannot_be_played_fails_the_episode(how, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        played(factory(PRODUCT), row_of(how=how), [" 12"], 3)


@needs_skyrl
@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("gsm8", "there is no such environment; did you mean gsm8k"),
        ("chess", "there are aime, gsm8k, .* your own class is module:name"),
        ("lcb", "runs what the policy writes without isolation, so it is refused; take rewards kind code"),
        (
            "tests.environments.skyrl_games:OwnSql",
            "refused; take environment kind tools with a function that",
        ),
        ("tests.environments.skyrl_games:product", "is no class with the base BaseTextEnv"),
        ("tests.environments.skyrl_games:NoStep", "is a class without a method step"),
        ("tests.environments.skyrl_games:Gone", "does not have a function Gone"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(id, message):
    with pytest.raises(SetupError, match=message):
        factory(id)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(SetupError, match=r'pip install "millrace-rl\[skyrl-gym\]"'):
        factory("gsm8k")
