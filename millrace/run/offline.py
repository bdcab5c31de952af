"""Use a trained policy: evaluate a checkpoint again, or complete the user's prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.inputs import DataConfig
from millrace.config.settings import RunConfig, every_reward
from millrace.data.chat import render
from millrace.data.chat_template import set_chat_template
from millrace.data.prompts import (
    chat_request,
    make_prompts,
    question_id,
    read_files,
    read_split,
    untokenized_prompts,
)
from millrace.data.rows import Row
from millrace.data.tokenizers import load_tokenizer, stop_token_ids
from millrace.distributed.ranks import Ranks
from millrace.engines.build_engine import engine_over
from millrace.errors import SetupError
from millrace.models.load import check_folder, load_model
from millrace.protocols import Engine
from millrace.rollout.sampled_batch import greedy
from millrace.run.answer_table import AnsweredSet, QuestionColumns, answered_set
from millrace.run.build import (
    build_all_rewards,
    check_all_answers,
    choose_device,
    full_marks,
    reference_rewards,
)
from millrace.run.build_environments import build_environments, episode_view, rows_of
from millrace.run.completion_server import CompletionServer
from millrace.run.components import longest_sequence
from millrace.run.evaluation import (
    EvaluatedAnswer,
    Evaluation,
    SamplingPlan,
    evaluate,
    repeated,
    summarise_evaluated,
)
from millrace.run.folder import RunFolder, find_checkpoint, is_of_checkpoint
from millrace.run.health.health_checks import check_evaluation
from millrace.types import Completion, Episode, EpisodeTurn, SamplingParams

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A loaded checkpoint, ready to generate.

    Attributes:
        template: of its run's prompts.
        tokenizer: of the checkpoint.
        engine: holds its weights.
        greedy: the run's sampling parameters at temperature 0.
        longest_prompt: prompt limit of the run, in tokens.
        longest: limit of prompt and completion together, and of an episode, in tokens.
        max_length: context length of the model, prompt and completion together; None without a limit.
    """

    template: str
    tokenizer: Tokenizer
    engine: Engine
    greedy: SamplingParams
    longest_prompt: int
    longest: int
    max_length: int | None


def open_policy(run: str | Path, checkpoint: str) -> Policy:
    """Load a checkpoint of a run: `best`, `last` or a checkpoint's name.

    Raises:
        ValueError, RuntimeError: the run or its checkpoint cannot be read; the message has the reason.
    """
    folder = RunFolder.open(run)
    return load_policy(find_checkpoint(folder, checkpoint) / "model", folder.config())


def load_policy(folder: Path, config: RunConfig) -> Policy:
    """Load a model folder, with the sampling parameters of a recipe.

    Raises:
        ValueError: it is no model folder, or does not fit the recipe; the message has the reason.
    """
    tokenizer = load_tokenizer(check_folder(folder))
    if not is_of_checkpoint(folder):
        set_chat_template(tokenizer, config.tokenizer.chat_template)
    model = load_model(folder, dtype=getattr(torch, config.precision)).to(choose_device(config.device))
    stops = stop_token_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None))
    max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rollout = config.rollout
    longest = longest_sequence(
        model,
        max_tokens=rollout.max_tokens,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
    )
    limit = min(config.data.max_prompt_tokens, longest - rollout.max_tokens)
    record_experts = bool(config.policy.needs_experts)
    engine = engine_over(config.engine, model, tokenizer, longest=longest, record_experts=record_experts)
    return Policy(config.data.template, tokenizer, engine, greedy(rollout, stops), limit, longest, max_length)


def evaluate_checkpoint(run: str | Path, checkpoint: str = "best") -> Evaluation:
    """Score greedy completions of a checkpoint on its run's held-out prompts.

    Args:
        run: the run folder.
        checkpoint: `best`, `last` or a checkpoint's name.

    Raises:
        ValueError, RuntimeError: the run, its checkpoint or its data cannot be read; the message has the
        reason.
    """
    folder = RunFolder.open(run)
    return evaluate_model(find_checkpoint(folder, checkpoint) / "model", folder.config())


def evaluate_model(
    folder: str | Path, config: RunConfig, *, whole: bool = False, temperature: float = 0.0
) -> Evaluation:
    """Score one completion of each of a recipe's prompts by any model folder, with the recipe's rewards.

    Args:
        folder: of the model and its tokenizer.
        config: sets prompts, template, sampling and rewards. Its settings of a model and of training are
            ignored.
        whole: use all prompts of `data.train`, rather than the held-out ones.
        temperature: 0 takes the most likely tokens; above it, completions are sampled with the recipe's seed.

    Raises:
        ValueError, RuntimeError: the model, the data or a reward cannot be used; the message has the reason.
    """
    columns = QuestionColumns.of(config.data, every_reward(config))
    plan = SamplingPlan(temperature=temperature)
    return answer_questions(folder, config, plan, columns, whole=whole).sampled


def read_questions(config: RunConfig, *, whole: bool) -> list[Row]:
    """Read the rows of an evaluation: all of `data.train`, or those that a recipe holds out.

    Raises:
        DataError: the data cannot be read.
    """
    if whole:
        return read_files(config.data)
    generate = rows_of(config.environment)
    return read_split(config.data, seed=config.seed, environment_rows=generate).eval


def num_trained_on(config: RunConfig, questions: Sequence[Row], data: DataConfig) -> int:
    """Return how many questions are problems that a run with this recipe trains on.

    Args:
        config: of the run.
        questions: rows to evaluate on.
        data: how these rows are read.

    Raises:
        DataError: the data cannot be read.
    """
    split = read_split(config.data, seed=config.seed, environment_rows=rows_of(config.environment))
    asked = Counter(question_id(row, data) for row in questions)
    trained = {id for row in split.train if (id := question_id(row, config.data)) in asked}
    return sum(asked[id] for id in trained)


def answer_questions(
    folder: str | Path, config: RunConfig, plan: SamplingPlan, columns: QuestionColumns, *, whole: bool
) -> AnsweredSet:
    """Generate and score answers of a model folder to a recipe's prompts, as many as the plan has.

    Args:
        folder: of the model and its tokenizer.
        config: see `evaluate_model`.
        plan: number of answers to a question, and how they are sampled.
        columns: of the table of answers.
        whole: see `evaluate_model`.

    Raises:
        ValueError, RuntimeError: as `evaluate_model`.
    """
    # Data and rewards come first, since their errors show before the slow load of a model.
    rows = read_questions(config, whole=whole)
    policy = load_policy(Path(folder), config)
    prompts, num_dropped = make_prompts(
        rows, config.data, policy.tokenizer, prefix="eval", max_prompt_tokens=policy.longest_prompt
    )
    check_all_answers(config, prompts)
    reward = build_all_rewards(config, choose_device(config.device))
    with closing(reward), ExitStack() as exit_stack:
        environments = build_environments(config, policy.tokenizer, policy.longest, Ranks(), exit_stack)
        results = [
            evaluate(
                policy.engine,
                reward,
                prompts,
                params,
                full_marks=full_marks(reference_rewards(config), config.environment),
                num_samples=num_samples,
                environments=environments,
                view_episode=episode_view(reward, environments),
            )
            for num_samples, params in plan.passes(replace(policy.greedy, seed=config.seed))
        ]
    for result in results:
        check_evaluation(result, limit=config.limits.failed_rewards)
    results[0] = replace(results[0], left_out=num_dropped)
    return answered_set(plan, prompts, results, columns, seed=config.seed)


def answer_by_server(
    server: CompletionServer, config: RunConfig, plan: SamplingPlan, columns: QuestionColumns, *, whole: bool
) -> AnsweredSet:
    """Let a server with OpenAI's API answer a recipe's prompts, and score the answers.

    A prompt of messages, or of the template `chat`, is sent as a chat; the server writes the template.

    Args:
        server: to ask.
        config: see `evaluate_model`; without an environment.
        plan: number of answers to a question, and how they are sampled.
        columns: of the table of answers.
        whole: see `evaluate_model`.

    Raises:
        SetupError: the recipe has an environment.
        ServerFailed: the server cannot be reached, or refuses a request.
        ValueError, RuntimeError: the data or a reward cannot be used; the message has the reason.
    """
    if config.environment is not None:
        raise SetupError(
            "a server answers questions of one turn alone, and the recipe has an environment; evaluate the "
            "model's folder instead"
        )
    prompts = untokenized_prompts(read_questions(config, whole=whole), config.data, prefix="eval")
    check_all_answers(config, prompts)
    requests = [chat_request(config.data, prompt) or {"prompt": prompt.text} for prompt in prompts]
    marks = full_marks(reference_rewards(config), None)
    reward = build_all_rewards(config, choose_device(config.device))
    results = []
    with closing(reward):
        for num_samples, params in plan.passes(greedy(config.rollout, ())):
            replies = server.answers(requests, replace(params, seed=config.seed), num_samples)
            asked = repeated(prompts, num_samples)
            episodes = [
                Episode((EpisodeTurn(prompt.text, one.text, 0, one.num_tokens, one.finish_reason, 0.0),))
                for prompt, one in zip(asked, replies, strict=True)
                if reward.sees_episodes
            ]
            outcomes = reward.score(asked, [reply.text for reply in replies], episodes)
            answers = [
                EvaluatedAnswer(reply.text, outcome, reply.num_tokens, reply.finish_reason)
                for reply, outcome in zip(replies, outcomes, strict=True)
            ]
            results.append(summarise_evaluated(asked, answers, full_marks=marks))
    for result in results:
        check_evaluation(result, limit=config.limits.failed_rewards)
    return answered_set(plan, prompts, results, columns, seed=config.seed)


def answer(
    run: str | Path,
    texts: Sequence[str],
    *,
    checkpoint: str = "best",
    temperature: float = 0.0,
    num_samples: int = 1,
    seed: int = 0,
) -> list[list[Completion]]:
    """Complete the user's prompts with a checkpoint, rendered with the run's template.

    Args:
        run: the run folder.
        texts: prompts.
        checkpoint: `best`, `last` or a checkpoint's name.
        temperature: 0 takes the most likely tokens.
        num_samples: completions of each prompt.
        seed: of the first sample; sample i uses seed + i.

    Raises:
        ValueError, RuntimeError: as `evaluate_checkpoint`.
    """
    policy = open_policy(run, checkpoint)
    prompts = [
        render(policy.tokenizer, policy.template, text, f"prompt {i + 1}")[1] for i, text in enumerate(texts)
    ]
    for number, prompt in enumerate(prompts, start=1):
        _check_length(policy, number, len(prompt))
    params = [
        replace(policy.greedy, temperature=temperature, seed=seed + sample) for sample in range(num_samples)
    ]
    completions = policy.engine.generate(
        [prompt for prompt in prompts for _ in params], params * len(prompts)
    )
    return [completions[i * num_samples : (i + 1) * num_samples] for i in range(len(prompts))]


def _check_length(policy: Policy, number: int, num_tokens: int) -> None:
    num_more = policy.greedy.max_tokens
    if policy.max_length is not None and num_tokens + num_more > policy.max_length:
        raise SetupError(
            f"prompt {number} has {num_tokens} tokens and rollout.max_tokens allows {num_more} more, but the "
            f"model was made for {policy.max_length} in all; shorten the prompt"
        )
