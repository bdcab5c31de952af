"""The environments of a recipe: what is played, by which rules, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from millrace.config.environment_section import (
    CallSection,
    EnvironmentConfig,
    FunctionEnvironmentConfig,
    NemoGymEnvironmentConfig,
    ProgramSection,
    ToolEnvironmentConfig,
    TrlEnvironmentConfig,
    environment_name,
)
from millrace.config.inputs import AUTO
from millrace.config.settings import RunConfig
from millrace.data.chat import CHAT
from millrace.data.prompts import prompt_messages, settled
from millrace.data.rows import DataError, Row
from millrace.data.tool_calls import ToolCallParser, parser_for
from millrace.distributed.ranks import Ranks
from millrace.environments.fault_injection import FaultInjection
from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import BUILT_IN, ROWS, environment_factory
from millrace.environments.reply_tokens import ReplyEncoder, ReplyTokens
from millrace.environments.running_episodes import EnvironmentHost, EnvironmentReply, is_pure
from millrace.environments.synchronous import MakeHost, SynchronousEnvironments
from millrace.environments.tool_messages import ToolMessages
from millrace.environments.workers import EnvironmentWorkers, longest_reply_s
from millrace.errors import SetupError
from millrace.protocols import EpisodeReward
from millrace.rollout.episodes import EpisodeRules, EpisodeView, Sample, view_answer
from millrace.run.evaluation_replies import EvaluationReplies
from millrace.types import ROOT, Episode, Prompt, Trajectory, parents

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


class Environments:
    """The environments of a run; `run.components.Components.environments`.

    Attributes:
        rules: how episodes go on and end.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        tokenizer: Tokenizer,
        rules: EpisodeRules,
        ranks: Ranks,
        exit_stack: ExitStack,
        *,
        is_chat: Callable[[Prompt], bool],
        messages_of: Callable[[Prompt], list[dict[str, Any]]],
    ) -> None:
        """Test the environment by making one.

        Raises:
            SetupError: it cannot be made, it is to run in the trainer's process and is not pure, or there is
                no parser of its tool calls.
        """
        self.rules = rules
        self._environment, self._ranks, self._exit_stack = environment, ranks, exit_stack
        # Most replies are equal to earlier ones, and the tokenizer decodes slowly.
        self._decode = lru_cache(maxsize=10_000)(lambda token_ids: str(tokenizer.decode(token_ids)))
        tool_messages = None
        if isinstance(environment, ToolEnvironmentConfig):
            tool_messages = ToolMessages(tokenizer, environment.reply_tokens)
        self._encode: ReplyEncoder = ReplyTokens(
            tokenizer,
            max_tokens=rules.max_tokens,
            is_chat=is_chat,
            parser=_parser_of(environment, tokenizer),
            messages_of=messages_of,
            tool_messages=tool_messages,
            shows_tokens=rules.shows_tokens,
        )
        if environment.fault:
            self._encode = FaultInjection(self._encode, environment.fault, rules.seed)
        self._make = None
        if environment.num_workers == 0:
            name = environment_name(environment)
            self._make = environment_factory(environment.kind, name, environment.arguments)
            if not is_pure(self._make()):
                raise SetupError(
                    f"environment {name} is not pure, so it cannot run in the trainer's process; set "
                    "environment.workers to 1 or more, or `pure = True` in the class if its replies depend "
                    "on the task and the actions alone"
                )

    def host(self, on_reply: Callable[[EnvironmentReply], object]) -> EnvironmentHost:
        """Make a host; the caller closes it.

        Raises:
            SetupError: the environment cannot be made, or its worker does not start.
        """
        if self._make is not None:
            return EnvironmentsInThread(self._make, self._encode, on_reply)
        return EnvironmentWorkers(
            self._environment,
            self._encode,
            on_reply,
            max_tokens=self.rules.max_tokens,
            is_scored=self.rules.scored,
        )

    def synchronous(self, make_host: MakeHost | None = None) -> SynchronousEnvironments:
        """Make environments for a caller who waits, on all ranks; the caller closes them.

        `make_host` makes another host than `host`: that of a replay.
        """
        alone = self._make is not None or self._ranks.size == 1
        return SynchronousEnvironments(
            make_host or self.host,
            limit_s=longest_reply_s(self._environment),
            broadcast=None if alone else self._ranks.broadcast_text,
            first=alone or self._ranks.first,
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return tokens as text."""
        return self._decode(token_ids)

    def transcript(self, trajectory: Trajectory) -> str:
        """Return all turns as text, one to a line, `>` before what the policy wrote.

        A turn that does not follow the one before has a line with the completion that it follows, counted
        from 1, or `[anew]`.
        """
        lines = []
        for at, (turn, parent) in enumerate(zip(trajectory.turns, parents(trajectory.turns), strict=True)):
            if parent != at - 1:
                lines.append("[anew]" if parent == ROOT else f"[after completion {parent + 1}]")
            lines += [self._decode(turn.observation), f"> {turn.completion.text}"]
        return "\n".join(lines)

    def view(self, prompt: Prompt, sample: Sample) -> Episode:
        """Return an episode as text, for a reward."""
        return sample.view(prompt, self._decode)

    @cached_property
    def evaluation(self) -> SynchronousEnvironments:
        """The environments of evaluations, closed at the end of the run."""
        return self._exit_stack.enter_context(closing(self.synchronous(self._evaluation_host)))

    @property
    def evaluation_replies(self) -> EvaluationReplies | None:
        """What keeps the replies of evaluations; None for environments in this process, which are pure.

        On several ranks, rank 0 has it.
        """
        host = self.evaluation.host
        return host if isinstance(host, EvaluationReplies) else None

    def _evaluation_host(self, on_reply: Callable[[EnvironmentReply], object]) -> EnvironmentHost:
        if self._make is not None:
            return self.host(on_reply)
        return EvaluationReplies(self.host, on_reply)


def build_environments(
    config: RunConfig, tokenizer: Tokenizer, longest: int, ranks: Ranks, exit_stack: ExitStack
) -> Environments | None:
    """Build the environments of a recipe, or None; `longest` is what model and micro-batch hold.

    Raises:
        SetupError: an episode may have more tokens, or the environment cannot be made.
    """
    environment = config.environment
    if environment is None:
        return None
    most = environment.max_tokens or longest
    if most > longest:
        raise SetupError(
            f"environment.max_tokens is {most}, but model and micro-batch hold {longest} tokens; lower it, "
            "or raise policy.tokens_per_micro_batch"
        )
    is_program = isinstance(environment, ProgramSection)
    rules = EpisodeRules(
        seed=config.seed,
        max_turns=environment.max_turns,
        max_tokens=most,
        ends_at_length=environment.on_length == "end",
        attempts=environment.attempts,
        invalid_score=environment.invalid_score,
        scored=bool(config.rewards),
        shows_tokens=is_program,
    )

    @lru_cache(maxsize=100_000)
    def is_chat(prompt: Prompt) -> bool:
        if is_program:  # it writes the messages, whatever the row's prompt is
            return bool(tokenizer.chat_template)
        return settled(config.data, prompt).template == CHAT

    def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
        return prompt_messages(config.data, prompt)

    return Environments(
        environment, tokenizer, rules, ranks, exit_stack, is_chat=is_chat, messages_of=messages_of
    )


def _parser_of(environment: EnvironmentConfig, tokenizer: Tokenizer) -> ToolCallParser | None:
    if not isinstance(environment, CallSection):
        return None
    format: str | None = environment.tool_format
    if isinstance(environment, ToolEnvironmentConfig | TrlEnvironmentConfig):
        format = format or AUTO
    if format is None and isinstance(environment, ProgramSection | NemoGymEnvironmentConfig):
        # Where calls cannot be read, a request with tools is refused, with a hint to this setting.
        with suppress(DataError):
            return parser_for(AUTO, tokenizer)
    if format is None:
        return None
    try:
        return parser_for(format, tokenizer, pattern=environment.tool_pattern, tool=environment.tool)
    except DataError as error:
        raise SetupError(f"environment.tool_format {format}: {error}") from error


def episode_view(reward: EpisodeReward, environments: Environments | None) -> EpisodeView | None:
    """Return what the reward gets of an episode; None if it does not look at them."""
    if not reward.sees_episodes:
        return None
    return view_answer if environments is None else environments.view


def environment_rows(environment: EnvironmentConfig, count: int, seed: int) -> Iterator[Row]:
    """Yield problems that the environment generates by its static method `rows(count, seed, **options)`.

    Raises:
        DataError: it has no such method, or it fails.
        SetupError: there is no such environment.
    """
    kind, name, options = environment.kind, environment_name(environment), environment.arguments
    found: object = BUILT_IN.get(kind)
    if isinstance(environment, FunctionEnvironmentConfig):
        found = type(environment_factory(kind, name, options)())
    if kind in ROWS:
        # A process that lists problems sees the variables that the workers see.
        options = options | {"env_vars": environment.visible_env_vars}
    rows = ROWS.get(kind) or getattr(found, "rows", None)
    if rows is None:
        raise DataError(
            f"environment {name} generates no problems: it has no method rows(count, seed); set data.train "
            "to a file"
        )
    try:
        for number, row in enumerate(rows(count, seed, **options)):
            yield Row(row, f"environment {name} problem {number}")
    except (TypeError, ValueError) as error:
        raise DataError(f"environment {name} cannot generate problems: {error}") from error


def rows_of(environment: EnvironmentConfig | None) -> Callable[[int, int], Iterator[Row]] | None:
    """Return what generates the problems of an environment."""
    return None if environment is None else partial(environment_rows, environment)
