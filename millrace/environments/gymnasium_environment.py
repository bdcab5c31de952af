"""The environment `gymnasium`: one of that package, if its observations and actions are text. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.data.functions import explain
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Action, Reply, Task

if TYPE_CHECKING:
    import gymnasium

# Environments may pass their seed on to generators that take no more than 31 bits.
NUM_SEEDS = 1 << 31
_MAX_ERROR = 500
_NO_ACTION = "That is not an action. Answer with"
# Returns the action of a completion, or None if it is not one.
Reader = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class GymnasiumRules:
    """How an environment of gymnasium is played; see `config.environment_section`.

    Attributes:
        id: of gymnasium's registry, after `module:` if it needs an import.
        options: keyword arguments of `gymnasium.make`.
        instructions: text before the first observation.
        is_rendered: whether the text is that of `render()`, not the observation.
        text_field: field of the observation that is its text.
        read: reads actions.
        allowed: what the policy reads after a completion that is no action.
        max_invalid_actions: number of completions that are no action; one more ends the episode.
        pure: whether equal seeds and actions give equal replies.
    """

    id: str
    options: Mapping[str, Any]
    instructions: str
    is_rendered: bool
    text_field: str | None
    read: Reader
    allowed: str
    max_invalid_actions: int
    pure: bool


class GymnasiumEnvironment:
    """An episode: `reset` with the seed of the task, then one `step` for each completion that is an action.

    The reward of a step is that of its completion; the episode is done when the environment is terminated or
    truncated. A completion that is no action gets a reply with what is allowed, and does not step.
    """

    def __init__(self, rules: GymnasiumRules) -> None:
        self._rules, self.pure = rules, rules.pure
        self._env: gymnasium.Env[Any, Any] | None = None
        self._num_invalid = 0

    def begin(self, task: Task) -> Reply:
        """Make and reset the environment."""
        import gymnasium

        rules = self._rules
        self._env = gymnasium.make(rules.id, **rules.options)
        observation, _ = self._env.reset(seed=task.seed % NUM_SEEDS)
        text = text_of(self._env, observation, is_rendered=rules.is_rendered, field=rules.text_field)
        return Reply(f"{rules.instructions}\n{text}" if rules.instructions else text)

    def step(self, action: Action) -> Reply:
        """Take the action that the completion names."""
        rules = self._rules
        found = rules.read(action.text)
        if found is None:
            self._num_invalid += 1
            if self._num_invalid > rules.max_invalid_actions:
                shown = plain_text(action.text, _MAX_ERROR)
                reason = f"{self._num_invalid} completions were no action; the last: {shown}"
                return Reply(done=True, invalid=reason)
            return Reply(rules.allowed)
        assert self._env is not None  # begin made it
        observation, reward, terminated, truncated, _ = self._env.step(found)
        # Rewards may be numbers of NumPy.
        if terminated or truncated:
            return Reply(done=True, reward=float(reward))
        text = text_of(self._env, observation, is_rendered=rules.is_rendered, field=rules.text_field)
        return Reply(text, reward=float(reward))

    def close(self) -> None:
        """Close the environment, if it was made."""
        if self._env is not None:
            self._env.close()


def gymnasium_factory(
    id: str,
    *,
    options: Mapping[str, Any],
    instructions: str,
    observation: str,
    text_field: str | None,
    actions: Sequence[str],
    action_pattern: str | None,
    max_invalid_actions: int,
    pure: bool,
) -> Callable[[], Environment]:
    """Return what makes an environment for each episode, after a first one was made and reset as a test.

    The arguments are the settings of `GymnasiumEnvironmentConfig`.

    Raises:
        SetupError: gymnasium is not installed, there is no such environment, it does not take the options or
            cannot be reset, or its observations or actions are not text.
    """
    try:
        import gymnasium
    except ImportError:
        raise SetupError(
            "environment kind gymnasium needs the package gymnasium; install it with pip install "
            '"millrace-rl[gymnasium]"'
        ) from None
    name = f"environment gymnasium {id}"
    try:
        env = gymnasium.make(id, **options)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv, ModuleNotFoundError) as error:
        what = plain_text(str(error).replace("`", "'"), _MAX_ERROR)
        raise SetupError(
            f"{name} cannot be found: {what} Correct environment.id; one that your module registers is "
            "module:Name-v0"
        ) from error
    except Exception as error:
        raise SetupError(
            f"{name} cannot be made with environment.options {dict(options)}: {_reason(error)}"
        ) from error
    with closing(env):
        read, allowed = _reader(name, env.action_space, actions)
        if action_pattern is not None:
            read = _reads_group(action_pattern, read)
        rendered = observation == "render"
        if rendered and env.render_mode != "ansi":
            raise SetupError(
                f"{name} renders no text: environment.observation render needs render_mode ansi in "
                "environment.options"
            )
        # Text of the seed 0, twice if both have to be equal.
        texts = {_first_text(name, env, rendered, text_field) for _ in range(1 + pure)}
    if len(texts) > 1:
        raise SetupError(f"{name} is not pure: two resets with one seed differ; remove environment.pure")
    rules = GymnasiumRules(
        id, options, instructions, rendered, text_field, read, allowed, max_invalid_actions, pure
    )
    return lambda: GymnasiumEnvironment(rules)


def text_of(env: gymnasium.Env[Any, Any], observation: Any, *, is_rendered: bool, field: str | None) -> str:
    """Return the text of an observation.

    Raises:
        EnvironmentFailed: it has none.
    """
    found: Any = env.render() if is_rendered else observation
    if not is_rendered and field is not None:
        if not isinstance(observation, Mapping) or field not in observation:
            raise EnvironmentFailed(f"gave an observation without the field {field}")
        found = observation[field]
    if not isinstance(found, str):
        raise EnvironmentFailed(f"gave an observation of type {type(found).__name__}, not text")
    return found


def _first_text(name: str, env: gymnasium.Env[Any, Any], rendered: bool, field: str | None) -> str:
    try:
        observation, _ = env.reset(seed=0)
        return text_of(env, observation, is_rendered=rendered, field=field)
    except EnvironmentFailed as error:
        raise SetupError(
            f"{name} {error}; name its field of text with environment.text_field, or set "
            "environment.observation to render if it can render text"
        ) from error
    except Exception as error:
        raise SetupError(f"{name} cannot be reset: {_reason(error)}") from error


def _reader(name: str, space: gymnasium.Space[Any], names: Sequence[str]) -> tuple[Reader, str]:
    """Return what reads an action from a text, and the sentence about what is allowed."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        if names:
            raise SetupError(f"{name} takes text as action; remove environment.actions")

        def read_text(text: str) -> str | None:
            return text.strip() if text.strip() in space else None

        size = f"{space.min_length} to {space.max_length} characters"
        return read_text, f"{_NO_ACTION} {size} of: {space.characters}"
    if not isinstance(space, spaces.Discrete):
        raise SetupError(f"{name} has actions {space}; only Text and Discrete ones can be read from a text")
    first, count = int(space.start), int(space.n)
    if not names:

        def read_number(text: str) -> int | None:
            # Longer numbers are none of the space, and int() of very long ones raises.
            number = int(text) if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) else first - 1
            return number if first <= number < first + count else None

        return (
            read_number,
            f"{_NO_ACTION} a number from {first} to {first + count - 1}.",
        )
    numbers = {each.strip().casefold(): first + place for place, each in enumerate(names)}
    if len(names) != count or len(numbers) != count:
        raise SetupError(f"{name} has {count} actions; environment.actions needs {count} different names")
    return (
        lambda text: numbers.get(text.strip().casefold()),
        f"{_NO_ACTION} one of: {', '.join(names)}",
    )


def _reads_group(pattern: str, read: Reader) -> Reader:
    """Return what reads an action from the group `action` of the first match, found in linear time (RE2)."""
    import pyarrow
    import pyarrow.compute

    def group(text: str) -> Any:
        given = pyarrow.array([text.encode("utf-8", "replace").decode()])
        return pyarrow.compute.extract_regex(given, pattern=pattern)

    try:
        names = [field.name for field in group("").type]
    except pyarrow.ArrowInvalid as error:
        raise SetupError(f"environment.action_pattern {pattern!r} is not a pattern of RE2: {error}") from None
    if names != ["action"]:
        raise SetupError(
            f"environment.action_pattern {pattern!r} needs the group (?P<action>...) and no other"
        )

    def read_group(text: str) -> Any:
        (found,) = group(text).to_pylist()
        return None if found is None else read(found["action"])

    return read_group


def _reason(error: Exception) -> str:
    return plain_text(explain(error), _MAX_ERROR)
