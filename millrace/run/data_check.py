"""What a data set holds and how a recipe would read it, before anything is trained."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.config.inputs import DataConfig
from millrace.config.reward_sections import RewardConfig
from millrace.config.settings import RunConfig, rewards_of
from millrace.data.functions import FunctionError, imported
from millrace.data.prompts import (
    chat_request,
    make_prompts,
    question_id,
    refuse_shared,
    untokenized_prompts,
)
from millrace.data.rows import DataError, Row, json_kind
from millrace.data.template_checks import template_problems
from millrace.rewards.foreign_functions import foreign_signature
from millrace.rewards.reward_errors import RewardError
from millrace.run.answer_table import source_of
from millrace.run.build import build_all_rewards, choose_device, full_marks
from millrace.run.evaluation import is_right, one_turn, reference_completion
from millrace.types import Prompt

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Reference answers that are scored, evenly spread over the rows.
MAX_SCORED = 256
# Prompts that are shown.
NUM_SHOWN = 3
# Rewards that cost money or a model.
UNSCORED = ("judge", "model")
# Columns of other trainers' data, and what to do with them.
FORMATS: tuple[tuple[str, frozenset[str], str], ...] = (
    (
        "verl",
        frozenset(("prompt", "reward_model")),
        "the answer is read from reward_model.ground_truth",
    ),
    (
        "preference pairs",
        frozenset(("chosen", "rejected")),
        "millrace reward-model FILE trains a reward model on them",
    ),
    (
        "ShareGPT conversations",
        frozenset(("conversations",)),
        "write each as a column messages, with role (human is user, gpt is assistant) and content",
    ),
    (
        "prompts and completions of TRL",
        frozenset(("prompt", "completion")),
        "data.demonstration_column=completion imitates the completions in SFT",
    ),
    (
        "steps with labels of TRL",
        frozenset(("prompt", "completions", "labels")),
        "no reward of millrace uses the steps; a reward function gets them in its row",
    ),
    (
        "OpenRLHF or slime",
        frozenset(("input", "label")),
        "set data.prompt_column=input data.answer_column=label",
    ),
    ("slime", frozenset(("prompt", "label")), "set data.answer_column=label"),
    (
        "verifiers or prime-rl",
        frozenset(("prompt", "info")),
        "reward functions of verifiers get info and task of the row",
    ),
)


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """What the recipe's rewards give to reference answers as completions.

    Attributes:
        num_scored: answers that were scored, of those there are.
        num_right: with full marks.
        num_failed: without a score.
        mean: reward of those with a score; NaN if there is none.
        first_wrong: place, answer and reason of the first without full marks; empty if there is none.
    """

    num_scored: int
    num_right: int
    num_failed: int
    mean: float
    first_wrong: str = ""


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What a data set holds, and how a recipe would read it.

    Attributes:
        num_rows: rows of the file.
        columns: for each column what its values are (`text`, `a list`, ...; `missing` where a row lacks it).
        formats: name and advice of each format of another trainer whose columns are there.
        prompts: the rows that can be used, in order, each with its prompt.
        lengths: tokens of each prompt; empty without a tokenizer.
        num_too_long: prompts over `data.max_prompt_tokens`.
        num_answers: prompts with a reference answer.
        num_duplicates: rows whose problem an earlier row has.
        num_held_out: rows of the problems of `data.eval`, on which a run does not train; None without it.
        sources: rows by source; empty if no row names one.
        problems: why rows cannot be used, each with its row's place.
        template: what is unexpected about how prompts are written, one sentence each.
        trained: for each prompt of the beginning, pieces of text behind it as (is trained on, text); empty
            without a tokenizer.
        functions: name and trainer of reward functions that are called as another trainer does.
        scores: of reference answers; None if there is no reward or no answer.
    """

    num_rows: int
    columns: Mapping[str, Counter[str]]
    formats: Sequence[tuple[str, str]]
    prompts: Sequence[tuple[Row, Prompt]]
    lengths: Sequence[int]
    num_too_long: int
    num_answers: int
    num_duplicates: int
    num_held_out: int | None
    sources: Counter[str]
    problems: Sequence[str]
    template: Sequence[str]
    trained: Sequence[Sequence[tuple[bool, str]]]
    functions: Sequence[tuple[str, str]]
    scores: ReferenceScores | None


def check_data(
    rows: Sequence[Row],
    config: RunConfig,
    tokenizer: Tokenizer | None,
    *,
    held_out: Sequence[Row] = (),
) -> DataCheck:
    """Read rows as a run with this recipe would, and score the reference answers.

    Args:
        rows: of the file, or of the sources.
        config: sets columns, template, limits and rewards.
        tokenizer: counts tokens and writes chat templates; None leaves both out.
        held_out: rows of `data.eval`.

    Raises:
        RewardError: a reward cannot start.
    """
    prompts: list[tuple[Row, Prompt]] = []
    problems = []
    for row in rows:
        try:
            prompts.append((row, _prompt(row, config.data, tokenizer)))
        except DataError as error:
            problems.append(str(error))
    identities = [question_id(row, config.data) for row, _ in prompts]
    held = {question_id(row, config.data) for row in held_out}
    lengths = [len(prompt.token_ids) for _, prompt in prompts] if tokenizer is not None else []
    sources = Counter(source for row, _ in prompts if (source := row.source or source_of(row)))
    if config.data.sources:
        try:
            refuse_shared([row for row, _ in prompts], config.data)
        except DataError as error:
            problems.append(str(error))
    return DataCheck(
        num_rows=len(rows),
        columns=_columns(rows),
        formats=_formats(rows),
        prompts=prompts,
        lengths=lengths,
        num_too_long=sum(length > config.data.max_prompt_tokens for length in lengths),
        num_answers=sum(bool(prompt.answer) for _, prompt in prompts),
        num_duplicates=len(identities) - len(set(identities)),
        num_held_out=sum(identity in held for identity in identities) if held_out else None,
        sources=sources,
        problems=problems,
        template=_template_problems([prompt for _, prompt in prompts], config, tokenizer),
        trained=[] if tokenizer is None else [_trained(one, tokenizer) for _, one in prompts[:NUM_SHOWN]],
        functions=_functions(config),
        scores=_scores(prompts, config),
    )


def _prompt(row: Row, data: DataConfig, tokenizer: Tokenizer | None) -> Prompt:
    if tokenizer is None:
        (prompt,) = untokenized_prompts([row], data, prefix="row")
    else:
        (prompt,), _ = make_prompts([row], data, tokenizer, prefix="row", max_prompt_tokens=sys.maxsize)
    return prompt


def _formats(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Name and advice of the formats whose columns are there."""
    found = [one for one in FORMATS if any(one[1] <= row.keys() for row in rows)]
    is_trl = any({"prompt", "completion"} <= row.keys() for row in rows)
    return [(name, advice) for name, _, advice in found if not (name == "slime" and is_trl)]


def _template_problems(
    prompts: Sequence[Prompt], config: RunConfig, tokenizer: Tokenizer | None
) -> list[str]:
    requests = [chat_request(config.data, prompt) for prompt in prompts]
    chats = [request["messages"] for request in requests if request is not None]
    found = []
    if chats and len(chats) < len(prompts):
        found.append(
            f"{len(chats):,} prompts are messages, which the chat template writes, and "
            f"{len(prompts) - len(chats):,} are text without it; set data.template=chat to write all as chats"
        )
    if chats and tokenizer is not None:
        has_turns = any(message["role"] == "assistant" for messages in chats for message in messages)
        found += template_problems(tokenizer, has_turns=has_turns)
    return found


def _trained(prompt: Prompt, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """The demonstration as SFT trains on it: its completions with their end, and replies between them."""
    turns = prompt.demonstration or ()
    texts = (turns,) if isinstance(turns, str) else turns
    return [(n % 2 == 0, text + ("" if n % 2 else str(tokenizer.eos_token))) for n, text in enumerate(texts)]


def _functions(config: RunConfig) -> list[tuple[str, str]]:
    """Reward functions with the signature of another trainer; RewardError for one that is not there."""
    names = [
        reward.function
        for each in rewards_of(config).values()
        for reward in each
        if reward.kind == "function"
    ]
    found = []
    for name in dict.fromkeys(names):
        try:
            foreign = foreign_signature(imported(name))
        except FunctionError as error:
            raise RewardError(f"reward function {name}: {error}") from error
        found += [] if foreign is None else [(name, foreign.trainer)]
    return found


def _columns(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: Counter(json_kind(row[name]) if name in row else "missing" for row in rows) for name in names
    }


def _scores(prompts: Sequence[tuple[Row, Prompt]], config: RunConfig) -> ReferenceScores | None:
    rewards = {
        name: tuple(one for one in each if one.kind not in UNSCORED)
        for name, each in rewards_of(config).items()
    }
    answered = [(row, prompt) for row, prompt in prompts if prompt.answer and rewards.get(prompt.source)]
    if not answered or config.environment is not None:
        return None
    places, shown = zip(*answered[:: math.ceil(len(answered) / MAX_SCORED)], strict=True)
    texts = [reference_completion(prompt, rewards[prompt.source]) for prompt in shown]
    with closing(build_all_rewards(_scorable(config), choose_device(config.device))) as reward:
        episodes = [
            one_turn(prompt, text) for prompt, text in zip(shown, texts, strict=True) if reward.sees_episodes
        ]
        outcomes = reward.score(shown, texts, episodes)
    marks = [full_marks(rewards[prompt.source], None) for prompt in shown]
    right = list(map(is_right, outcomes, marks))
    values = [outcome.value for outcome in outcomes if outcome.kind != "failed"]
    first = ""
    if not all(right):
        place = right.index(False)
        why = outcomes[place].reason or f"reward {outcomes[place].value:g} of {marks[place]:g}"
        first = f"{places[place].where}, answer {texts[place]!r}: {why}"
    return ReferenceScores(
        num_scored=len(shown),
        num_right=sum(right),
        num_failed=len(outcomes) - len(values),
        mean=sum(values) / len(values) if values else math.nan,
        first_wrong=first,
    )


def _scorable(config: RunConfig) -> RunConfig:
    """The recipe without the rewards that are not tried."""

    def tried(rewards: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
        return tuple(one for one in rewards if one.kind not in UNSCORED)

    sources = tuple(one.model_copy(update={"rewards": tried(one.rewards)}) for one in config.data.sources)
    data = config.data.model_copy(update={"sources": sources})
    return config.model_copy(update={"rewards": tried(config.rewards), "data": data})


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Least, median, 95th percentile and largest of some lengths."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    places = {"min": 0, "median": last // 2, "p95": math.ceil(0.95 * last), "max": last}
    return {name: ordered[place] for name, place in places.items()}
