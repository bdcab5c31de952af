"""The environment `openenv`: a server of OpenEnv that is played in text. No torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import Any

from millrace.config.section import api_key
from millrace.environments.openenv_session import OpenEnvSession, RefusedActionError
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Action, Reply, Task

# Servers pass their seed on to generators that take no more than 31 bits.
NUM_SEEDS = 1 << 31
# Until a server has answered at the start of a run, in seconds.
START_S = 60.0
_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class OpenEnvRules:
    """How a server is played; see `config.environment_section`.

    Attributes:
        action_field: field of the action that is the text of the completion.
        action: its other fields.
        text_field: field of the observation that is its text; None is the whole as JSON.
        reset_columns: columns of the row that `reset` gets, beside the seed.
        instructions: text before the first observation.
        max_invalid_actions: number of completions that the server refuses; one more ends the episode.
        pure: whether equal seeds, columns and actions give equal replies.
    """

    action_field: str
    action: Mapping[str, Any]
    text_field: str | None
    reset_columns: Sequence[str]
    instructions: str
    max_invalid_actions: int
    pure: bool


class OpenEnvEnvironment:
    """An episode in a session of its own: `reset` with the seed of the task, a `step` for each completion.

    The reward of a step is that of its completion. A completion that the server refuses gets its reason.
    """

    def __init__(self, session: OpenEnvSession, rules: OpenEnvRules) -> None:
        self._session, self._rules, self.pure = session, rules, rules.pure
        self._num_invalid = 0

    async def begin(self, task: Task) -> Reply:
        """Open the session and reset it."""
        rules = self._rules
        missing = [name for name in rules.reset_columns if name not in task.row]
        if missing:
            raise EnvironmentFailed(f"has a row without the column {missing[0]} of environment.reset_columns")
        given = {name: task.row[name] for name in rules.reset_columns}
        reply = self._reply(await self._session.ask("reset", {"seed": task.seed % NUM_SEEDS, **given}))
        text = f"{rules.instructions}\n{reply.text}" if rules.instructions else reply.text
        return Reply(text, done=reply.done)

    async def step(self, action: Action) -> Reply:
        """Send the completion as an action."""
        rules = self._rules
        # JSON has no halves of characters.
        text = action.text.encode("utf-8", "replace").decode("utf-8")
        try:
            return self._reply(await self._session.ask("step", {**rules.action, rules.action_field: text}))
        except RefusedActionError as error:
            self._num_invalid += 1
            if self._num_invalid <= rules.max_invalid_actions:
                return Reply(f"That is not an action: {error}")
            reason = f"{self._num_invalid} completions were no action; the last: {error}"
            return Reply(done=True, invalid=plain_text(reason, _MAX_REASON))

    async def close(self) -> None:
        """End the session, if it was opened."""
        await self._session.close()

    def _reply(self, found: Mapping[str, Any]) -> Reply:
        observation, reward, done = found["observation"], found["reward"], found["done"]
        if not isinstance(reward, Real | None) or not isinstance(done, bool):
            raise EnvironmentFailed("replied with a reward that is no number, or done that is no bool")
        if done:
            return Reply(done=True, reward=float(reward or 0.0))
        field = self._rules.text_field
        text = json.dumps(observation, ensure_ascii=False) if field is None else None
        if field is not None and isinstance(observation, Mapping):
            text = observation.get(field)
        if not isinstance(text, str):
            shown = ", ".join(observation) if isinstance(observation, Mapping) else "none"
            raise EnvironmentFailed(f"gave an observation without the text {field}; its fields are: {shown}")
        return Reply(text, reward=float(reward or 0.0))


def openenv_factory(url: str, *, api_key_env: str | None, **given: Any) -> Callable[[], Environment]:
    """Return what makes a session for each episode, after a first one was reset as a test.

    A server that needs columns of a row is not tested.

    Args:
        url: of the server.
        api_key_env: environment variable with a bearer token.
        given: the fields of `OpenEnvRules`.

    Raises:
        SetupError: websockets is not installed, the server does not answer, or its observation has no text.
    """
    if find_spec("websockets") is None:
        raise SetupError(
            "environment kind openenv needs the package websockets; install it with pip install "
            '"millrace-rl[openenv]"'
        )
    name, rules, headers = f"environment openenv {url}", OpenEnvRules(**given), {}
    if api_key_env is not None:
        headers = {"Authorization": f"Bearer {api_key(api_key_env, name)}"}

    def make() -> OpenEnvEnvironment:
        return OpenEnvEnvironment(OpenEnvSession(url, headers), rules)

    try:
        if not rules.reset_columns:
            asyncio.run(_try(make()))
    except TimeoutError:
        raise SetupError(f"{name} did not answer within {START_S:g} s; start the server") from None
    except EnvironmentFailed as error:
        raise SetupError(f"{name} {error}; start the server, or correct the recipe") from error
    return make


async def _try(game: OpenEnvEnvironment) -> None:
    try:
        await asyncio.wait_for(game.begin(Task("", "", {}, seed=0, sample=0, max_turns=1)), START_S)
    finally:
        await game.close()
