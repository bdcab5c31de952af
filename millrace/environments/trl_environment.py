"""The environment `trl`: a class as GRPOTrainer of TRL takes it as `environment_factory`. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.data.functions import FunctionError, explain, imported
from millrace.data.rows import DataError
from millrace.data.tool_schema import read_tools, tool_of_function
from millrace.environments.row_prompts import row_messages
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.tool_environment import CallThreads, ToolEnvironment, ToolRules
from millrace.environments.tool_functions import Tool
from millrace.environments.trl_rewards import GET_REWARD, PlayedEpisode, TrlRewards
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Action, Reply, Task

# Texts are not shortened here, as in TRL; a longer one than an episode may have ends it.
_MAX_ERROR, _MAX_CHARACTERS = 500, 1 << 40
RESET = "reset"


@dataclass(frozen=True, slots=True)
class TrlRules:
    """How the class is played.

    Attributes:
        tools: the definition of each method that is a tool, by its name.
        rewards: what scores an episode.
        max_invalid_calls: see `ToolRules`.
        pure: whether equal rows and actions give equal replies.
    """

    tools: Mapping[str, Mapping[str, Any]]
    rewards: TrlRewards
    max_invalid_calls: int
    pure: bool


class TrlEnvironment:
    """An episode of an object of the class: `reset`, then its methods as tools until a completion calls none.

    As in TRL, an object is used again for another episode, unless a method was interrupted by a deadline or
    raised outside of a call.
    """

    def __init__(
        self, make: Callable[[], Any], unused: list[Any], rules: TrlRules, threads: CallThreads
    ) -> None:
        """Take what makes an object, those of episodes that have ended, and threads for their methods."""
        self._make, self._unused, self._rules, self._threads = make, unused, rules, threads
        self.pure = rules.pure
        self._is_reusable = False
        self._completion: list[Mapping[str, Any]] = []
        self._token_ids: list[int] = []
        self._num_turns = 0

    async def begin(self, task: Task) -> Reply:
        """Reset the object with the columns of the row; text that it returns ends the last message."""
        rules = self._rules
        self._task, self._prompt = task, row_messages(task.row)
        self._played = self._unused.pop() if self._unused else await self._call(self._make)
        tools = [Tool(tool, _as_in_trl(getattr(self._played, name))) for name, tool in rules.tools.items()]
        # One call after the other, since they change the object.
        one_by_one = ToolRules(1, _MAX_CHARACTERS, rules.max_invalid_calls)
        self._calls = ToolEnvironment(tools, one_by_one, self._threads)
        text = await self._call(self._played.reset, **task.row)
        if text is not None and not isinstance(text, str):
            raise EnvironmentFailed(f"returned {type(text).__name__} from reset, not text or None")
        self._is_reusable = True
        definitions = tuple(rules.tools.values())
        if not text:
            return Reply(tools=definitions)
        last = self._prompt[-1]
        self._prompt[-1] = {**last, "content": (last["content"] or "") + text}
        return Reply(messages=tuple(self._prompt), tools=definitions)

    async def step(self, action: Action) -> Reply:
        """Run the calls of a completion; one without calls, or the last that there may be, is scored."""
        self._is_reusable = False
        self._num_turns += 1
        self._completion.append(action.message or {"role": "assistant", "content": action.text})
        self._token_ids += action.token_ids
        if self._num_turns < self._task.max_turns:
            reply = await self._calls.step(action)
        else:
            reply = Reply(done=True, calls=0, invalid_calls=int(action.status != "ok"))
        self._completion += reply.messages
        if reply.done and not reply.invalid:
            episode = PlayedEpisode(self._played, self._task, self._prompt, self._completion, self._token_ids)
            reply = replace(reply, score=await self._rules.rewards.score(episode, self._call))
        self._is_reusable = True
        return reply

    async def close(self) -> None:
        """Keep the object for another episode, if none of its methods may still run."""
        if self._is_reusable:
            self._unused.append(self._played)

    async def _call(self, function: Callable[..., Any], **given: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**given)
        return await self._threads.run(lambda: function(**given))


def trl_factory(
    factory: str, *, reward_functions: Sequence[str], max_invalid_calls: int, is_scored: bool
) -> Callable[[], Environment]:
    """Return what makes an environment for each episode, after a first object was made as a test.

    `factory` is `module:name` of the class, or of a function that makes an object. `is_scored` is whether
    the recipe has rewards.

    Raises:
        SetupError: the object cannot be made, has no `reset` or a method that cannot be a tool, there is no
            such reward function, or nothing scores an episode.
    """
    name = f"environment trl {factory}"
    try:
        make = imported(factory)
        functions = {function: imported(function) for function in reward_functions}
        first = make()
        # The rule of TRL for what is a tool.
        methods = [method for method, _ in inspect.getmembers(type(first), inspect.isfunction)]
        public = [one for one in methods if not one.startswith("_") and one not in (RESET, GET_REWARD)]
        tools = {one: read_tools([tool_of_function(getattr(first, one))], one)[0] for one in public}
    except (FunctionError, DataError) as error:
        raise SetupError(f"{name}: {error}") from error
    except Exception as error:
        raise SetupError(f"{name} cannot be made: {plain_text(explain(error), _MAX_ERROR)}") from error
    if RESET not in methods or inspect.iscoroutinefunction(first.reset):
        raise SetupError(f"{name} has no method `def reset(self, **kwargs)`, which begins an episode; add it")
    rewards = TrlRewards(functions, is_own=GET_REWARD in methods)
    rewards.check(name)
    if not (is_scored or functions or rewards.is_own):
        raise SetupError(f"{name} has no get_reward; add it, or environment.reward_functions, or rewards")
    rules = TrlRules(tools, rewards, max_invalid_calls, bool(getattr(first, "pure", False)))
    unused, threads = [first], CallThreads()
    return lambda: TrlEnvironment(make, unused, rules, threads)


def _as_in_trl(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its result as TRL writes it: `str` of it, or of `{"error": message}`."""

    def run(**given: Any) -> str:
        try:
            return str(method(**given))
        except Exception as error:
            return str({"error": str(error)})

    async def wait(**given: Any) -> str:
        try:
            return str(await method(**given))
        except Exception as error:
            return str({"error": str(error)})

    return wait if inspect.iscoroutinefunction(method) else run
