"""The environment `skyrl_gym`: a `BaseTextEnv` of SkyRL-gym. No torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from millrace.data.functions import FunctionError, imported
from millrace.environments.row_prompts import PROMPT_COLUMN, row_messages
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError, did_you_mean
from millrace.protocols import Environment
from millrace.types import Action, Reply, Task

# Modules of the package that run what the policy wrote without isolation, and what to take in their place.
_RUNS_CODE = {
    "skyrl_gym.envs.lcb.env": "rewards kind code",
    "skyrl_gym.envs.searchcode.env": "environment kind tools with the tool python",
    "skyrl_gym.envs.sql.env": "environment kind tools with a function that opens the database read-only",
    "skyrl_gym.envs.rlm.env": "environment kind tools with the tool python",
}
# Columns that SkyRL does not give to the environment.
_NOT_EXTRAS = (PROMPT_COLUMN, "env_class")


@dataclass(frozen=True, slots=True)
class SkyrlRules:
    """How an environment is made.

    Attributes:
        spec: an id of the registry, or an `EnvSpec`.
        options: its `env_config`.
        pure: whether equal rows and actions give equal replies.
    """

    spec: Any
    options: Mapping[str, Any]
    pure: bool


class SkyrlEnvironment:
    """An episode as SkyRL plays it: `init` with the prompt, then one `step` for each completion.

    The reward of a step is that of its completion.
    """

    def __init__(self, rules: SkyrlRules) -> None:
        self._rules, self.pure = rules, rules.pure
        self._env: Any = None

    def begin(self, task: Task) -> Reply:
        """Make the environment with the columns of the row, and begin with the messages of its `init`."""
        import skyrl_gym
        from omegaconf import OmegaConf

        row = {name: value for name, value in task.row.items() if name not in _NOT_EXTRAS}
        extras = copy.deepcopy(row) | {"max_turns": task.max_turns}
        options = OmegaConf.create(dict(self._rules.options))
        self._env = skyrl_gym.make(self._rules.spec, env_config=options, extras=extras)
        found = self._env.init(row_messages(task.row))
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvironmentFailed(f"returned {type(found).__name__} from init, not (messages, metadata)")
        return Reply(messages=tuple(found[0]))

    def step(self, action: Action) -> Reply:
        """Take the completion as text."""
        found = self._env.step(action.text)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= found.keys():
            raise EnvironmentFailed("returned no observations, reward and done from step")
        changed = found.get("postprocessed_action")
        if changed is not None and changed != action.text:
            raise EnvironmentFailed(
                "changed the completion (postprocessed_action), but what was sampled is what is trained on"
            )
        reward, done = found["reward"], bool(found["done"])
        if not isinstance(reward, Real):
            raise EnvironmentFailed(f"returned a reward of type {type(reward).__name__}, not a number")
        if done:
            return Reply(done=True, reward=float(reward))
        if not found["observations"]:
            raise EnvironmentFailed("returned no observation from step, and the episode is not done")
        return Reply(messages=tuple(found["observations"]), reward=float(reward))

    def close(self) -> None:
        """Close the environment, if it was made."""
        if self._env is not None:
            self._env.close()


def skyrl_factory(id: str, *, options: Mapping[str, Any], pure: bool) -> Callable[[], Environment]:
    """Return what makes an environment for each episode. None is made as a test, since each needs a row.

    Args:
        id: of SkyRL-gym's registry, or `module:name` of your class.
        options: what the environment gets as `env_config`.
        pure: whether equal rows and actions give equal replies.

    Raises:
        SetupError: skyrl-gym is not installed, there is no such environment, it is no `BaseTextEnv`, or runs
            programs of the policy without isolation.
    """
    try:
        import skyrl_gym
        from skyrl_gym.envs.base_text_env import BaseTextEnv
    except ImportError:
        raise SetupError(
            'environment kind skyrl_gym needs the package skyrl-gym; install it with pip install "millrace-rl'
            '[skyrl-gym]"'
        ) from None
    name, registry = f"environment skyrl_gym {id}", skyrl_gym.registry
    if ":" not in id and id not in registry:
        hint = did_you_mean(
            id, list(registry), f"there are {', '.join(registry)}; your own class is module:name"
        )
        raise SetupError(f"{name}: there is no such environment; {hint}")
    entry: Any = id if ":" in id else registry[id].entry_point
    if isinstance(entry, str):
        _refuse_code(name, entry.partition(":")[0])
    try:
        found: Any = imported(entry) if isinstance(entry, str) else entry
    except FunctionError as error:
        raise SetupError(f"{name}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, BaseTextEnv):
        raise SetupError(f"{name} is no class with the base BaseTextEnv of skyrl_gym; name one that is")
    for base in found.__mro__:
        _refuse_code(name, base.__module__)
    if getattr(found, "step", None) is BaseTextEnv.step:
        raise SetupError(f"{name} is a class without a method step; add it")
    spec = skyrl_gym.envs.registration.EnvSpec(id=id, entry_point=found) if ":" in id else id
    rules = SkyrlRules(spec, options, pure)
    return lambda: SkyrlEnvironment(rules)


def _refuse_code(name: str, module: str) -> None:
    if module in _RUNS_CODE:
        raise SetupError(
            f"{name} runs what the policy writes without isolation, so it is refused; take "
            f"{_RUNS_CODE[module]}"
        )
