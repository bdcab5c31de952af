"""`millrace evaluate`: what a checkpoint's answers, or those of any model, are worth."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.train import Overrides

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.evaluation.answer_scores import QuestionAnswers
    from millrace.run.answer_table import AnsweredSet
    from millrace.run.evaluation import Evaluation, SamplingPlan
    from millrace.run.folder import RunFolder

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL|URL",
        help="A run's folder, such as runs/quickstart-1, one of its checkpoints, any model folder, or a "
        "server such as http://127.0.0.1:8000/v1 (URL#MODEL where it has several models).",
    ),
]
Checkpoint = Annotated[
    str, typer.Option(metavar="best|last|NAME", help="Which checkpoint, such as best or step-000050.")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Questions: a file, pattern or folder, as data.train (every row), or reasoning-gym:NAME.",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward", metavar="KIND", help="exact, gsm8k, number, task, or module:function; several add up."
    ),
]
RecipeName = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="Recipe that a model folder is evaluated as.")
]
Samples = Annotated[
    int, typer.Option(min=1, max=1000, help="Answers to each question, for avg@N, pass@k, pass^k and maj@k.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="0 takes the most likely tokens; by default 0, and with --samples rollout.temperature."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="By default 1, and with --samples rollout.top_p."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="A greedy answer beside the samples.")]
Ks = Annotated[
    list[int] | None,
    typer.Option("--k", min=1, help="k of pass@k and maj@k; several; by default 2, 4, ... up to --samples."),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER",
        help="Compare with another run, checkpoint, model folder or server, or with a table of its answers "
        "(.parquet), question by question.",
    ),
]
Answers = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Parquet file for the answers; by default evaluations/NAME-1.parquet."),
]
SourceColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Column of the source, for numbers per source; by default source or data_source."
    ),
]
ClusterColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Column that dependent questions share, such as a passage; for the errors."
    ),
]
KeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="VARIABLE", help="Environment variable with the key of a server."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# The rewards that need no settings.
PLAIN_REWARDS = ("exact", "gsm8k", "number", "task")
NUM_EXAMPLES = 3
MAX_SHOWN = 200


def evaluate(
    target: Target,
    overrides: Overrides = None,
    *,
    checkpoint: Checkpoint = "best",
    data: Data = None,
    reward: Rewards = None,
    recipe: RecipeName = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    k: Ks = None,
    against: Against = None,
    answers: Answers = None,
    source_column: SourceColumn = None,
    cluster_column: ClusterColumn = None,
    api_key_env: KeyVariable = None,
    as_json: AsJson = False,
) -> None:
    """Let a model answer questions, without training, and score the answers.

    A run's checkpoint answers the run's held-out questions, and is scored as in the run. Any model folder or
    server answers the questions of --data or --recipe. KEY=VALUE changes settings, such as
    data.template=chat, data.prompt_column=problem or rollout.max_tokens=512.
    """
    from millrace.cli import evaluation_tables as tables
    from millrace.config.inputs import TASK_PREFIX

    model = _target(target, checkpoint, recipe)
    config = settings_of(
        recipe if model.run is None else str(model.run.recipe), data, reward or [], overrides or []
    )
    plan = plan_of(config, samples, temperature, top_p, greedy=greedy)
    ks = _checked_ks(k, samples)
    other = None if against is None else _target(against, "best", None, may_be_answers=True)
    # Before the model answers, since that takes long.
    table = read_answers(other.path, samples) if other is not None and other.kind == "answers" else None
    whole = data is not None and not data.startswith(TASK_PREFIX)
    columns = {"source": source_column, "cluster": cluster_column}
    ask = partial(EvaluationTarget.answers, plan=plan, columns=columns, whole=whole, api_key_env=api_key_env)
    found = ask(model, config)
    kept = _keep(found, answers, model.name)
    of = f"checkpoint {checkpoint}" if model.run else target
    summary, sources = found.summary(ks), found.sources(ks)
    measure = _measure(config)
    tree: dict[str, Any] = {model.kind: target, "answers": str(kept)}
    tree |= {"checkpoint": checkpoint} if model.run else {}
    tree |= as_tree(measure, found.sampled, samples) | tables.summary_tree(plan, summary, sources)
    lines = [*as_lines(of, measure, found.sampled, samples), *tables.summary_lines(summary, sources)]
    lines.append(f"answers are in {kept}")
    if model.run is not None and whole:
        note, tree["num_trained_on"] = _trained_on(model.run, config)
        lines += [note] * bool(note)
    if other is not None and against is not None:
        pairs = table or _asked(other, partial(ask, config=_template_of(other, config, overrides or [])))
        compared = tables.compare_sets(against, found, pairs, ks)
        tree["against"] = tables.comparison_tree(against, compared)
        lines += tables.comparison_lines(target, against, compared)
    typer.echo(json.dumps(tree, indent=1, ensure_ascii=False) if as_json else "\n".join(lines))


def _measure(config: RunConfig) -> str:
    """The recipe's measure; accuracy for that of a further set of a run, which has no metric here."""
    from millrace.config.evaluation_section import SET_PREFIX

    measure = config.evaluation.measure
    return "accuracy" if measure.startswith(SET_PREFIX) else measure


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    """What is evaluated: a run's checkpoint, a model folder, a server, or a table of answers."""

    kind: str
    name: str
    path: Path
    run: RunFolder | None = None
    url: str = ""

    def answers(
        self,
        config: RunConfig,
        plan: SamplingPlan,
        columns: Mapping[str, str | None],
        *,
        whole: bool,
        api_key_env: str | None,
    ) -> AnsweredSet:
        """Let it answer; see `run.offline`. `columns` are those of `QuestionColumns.of`."""
        from millrace.run.answer_table import QuestionColumns
        from millrace.run.offline import answer_by_server, answer_questions

        named = QuestionColumns.of(config.data, config.rewards, **columns)
        if self.kind != "server":
            return answer_questions(self.path, config, plan, named, whole=whole)
        from millrace.config.section import api_key
        from millrace.run.completion_server import CompletionServer

        base_url, _, name = self.url.partition("#")
        key = "" if api_key_env is None else api_key(api_key_env, f"server {base_url}")
        return answer_by_server(CompletionServer(base_url, name, key=key), config, plan, named, whole=whole)


def _target(
    text: str, checkpoint: str, recipe: str | None, *, may_be_answers: bool = False
) -> EvaluationTarget:
    from millrace.config.recipe import ConfigError
    from millrace.config.section import check_url
    from millrace.run.folder import RunFolder, find_checkpoint, model_folder

    path = Path(text)
    if re.match(r"https?://", text):
        try:
            url = check_url(text.partition("#")[0], "/v1")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        name = text.partition("#")[2] or url.partition("//")[2]
        return EvaluationTarget("server", name, path, url=text)
    if may_be_answers and path.suffix == ".parquet":
        return EvaluationTarget("answers", path.stem, path)
    if path.parent.name == "checkpoints" and (path.parent.parent / "recipe.yaml").is_file():
        path, checkpoint = path.parent.parent, path.name
    if (path / "recipe.yaml").is_file():
        if recipe is not None:
            raise ConfigError(f"{path} is a run, which has a recipe of its own; remove --recipe")
        run = RunFolder.open(path)
        found = find_checkpoint(run, checkpoint)
        return EvaluationTarget("run", f"{path.name}-{found.name}", found / "model", run)
    if checkpoint != "best":
        raise ConfigError(f"{text} is not a run, so --checkpoint has no effect; remove it")
    return EvaluationTarget("model", path.resolve().name, model_folder(path))


def plan_of(
    config: RunConfig, samples: int, temperature: float | None, top_p: float | None, *, greedy: bool
) -> SamplingPlan:
    """Return how many answers a question gets, and how they are sampled.

    Raises:
        ConfigError: an option has no effect.
    """
    from millrace.config.recipe import ConfigError
    from millrace.run.evaluation import sampling_plan

    if top_p == 0:
        raise ConfigError("--top-p 0 leaves no token; give one above 0, or --temperature 0")
    plan = sampling_plan(samples, temperature, top_p, greedy=greedy, rollout=config.rollout)
    if plan.temperature == 0:
        if samples > 1:
            raise ConfigError(
                f"--samples {samples} has no effect at temperature 0, where all answers to a question are "
                "equal; give a --temperature above 0"
            )
        for option, given in (("--greedy", greedy), ("--top-p", top_p is not None)):
            if given:
                raise ConfigError(
                    f"{option} has no effect where the one answer is greedy; add --samples 8, or remove it"
                )
    return plan


def _checked_ks(ks: Sequence[int] | None, samples: int) -> list[int] | None:
    from millrace.config.recipe import ConfigError
    from millrace.evaluation.answer_scores import check_ks

    try:
        check_ks(ks or (), samples)
    except ValueError as error:
        raise ConfigError(f"{error} by --samples") from None
    return list(ks) if ks else None


def _template_of(other: EvaluationTarget, config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Return the settings with the template of another run, unless the command sets one."""
    if other.run is None or any(word.startswith("data.template=") for word in words):
        return config
    template = other.run.config().data.template
    return config.model_copy(update={"data": config.data.model_copy(update={"template": template})})


def _keep(found: AnsweredSet, path: Path | None, name: str) -> Path:
    """Write the table of answers; by default under the first free name."""
    from millrace.observability.tables import write_table

    number = 0
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
    while path is None or (number and path.exists()):
        number += 1
        path = Path("evaluations") / f"{plain}-{number}.parquet"
    write_table(path, found.rows)
    return path


def _asked(
    other: EvaluationTarget, ask: Callable[[EvaluationTarget], AnsweredSet]
) -> tuple[list[QuestionAnswers], list[QuestionAnswers]]:
    """Return the questions with the sampled and the greedy answers of the other model, which are kept."""
    theirs = ask(other)
    _keep(theirs, None, other.name)
    return theirs.questions, theirs.greedy_questions


def _trained_on(run: RunFolder, config: RunConfig) -> tuple[str, int | None]:
    """Return a note on questions that the run trained on, and their number; None if its data is gone."""
    from millrace.data.rows import DataError
    from millrace.run.offline import num_trained_on, read_questions

    rows = read_questions(config, whole=True)
    try:
        count = num_trained_on(run.config(), rows, config.data)
    except DataError as error:
        return f"whether the run trained on some of these questions is not known: {error}", None
    if not count:
        return "", 0
    note = f"the run trained on {count} of these {len(rows)} questions, which make the numbers better than"
    return f"{note} on new ones; remove these rows", count


def read_answers(path: Path, samples: int) -> tuple[list[QuestionAnswers], list[QuestionAnswers]]:
    """Read the questions with their sampled and greedy answers from a table of `millrace evaluate`.

    Raises:
        DataError: it is no such table, or has another number of answers to a question.
    """
    from millrace.data.rows import DataError
    from millrace.evaluation.answer_scores import by_question
    from millrace.observability.tables import read_table

    if not path.is_file():
        raise DataError(f"{path} does not exist here; give a table that millrace evaluate wrote")
    rows = read_table(path)
    needed = {
        "prompt_id",
        "question_id",
        "sample",
        "greedy",
        "source",
        "cluster",
        "outcome",
        "right",
        "reward",
        "prediction",
    }
    if not rows or (missing := needed - rows[0].keys()):
        lacks = ", ".join(sorted(missing)) if rows else "rows"
        raise DataError(f"{path} lacks {lacks}; give a table that millrace evaluate wrote")
    there = 1 + max((row["sample"] for row in rows if not row["greedy"]), default=0)
    if there != samples:
        raise DataError(
            f"{path} has {there} answers to a question, and this evaluation {samples}; set --samples {there}"
        )
    return by_question(row for row in rows if not row["greedy"]), by_question(
        row for row in rows if row["greedy"]
    )


def settings_of(
    recipe: str | None, data: str | None, rewards: Sequence[str], words: Sequence[str]
) -> RunConfig:
    """Settings of an evaluation: the command line's over any recipe's; ConfigError if one is missing."""
    from millrace.config.inputs import TASK_PREFIX, DataConfig
    from millrace.config.recipe import ConfigError, from_settings, load_recipe, parse_overrides

    given: dict[str, Any] = parse_overrides(words)
    if data is not None:
        # The recipe's are of another source; the command may set its own.
        task = {"data.task": {}, "data.task_size": DataConfig.model_fields["task_size"].default}
        given = {"data.eval": None} | ({} if data.startswith(TASK_PREFIX) else task) | given
        given["data.train"] = data
    if rewards:
        given["rewards"] = [_reward(word) for word in rewards]
    if recipe is not None:
        return load_recipe(recipe, given)
    if "data.train" not in given:
        raise ConfigError("there are no questions; give --data FILE, or --recipe for those that it holds out")
    if not any(key.partition(".")[0] == "rewards" for key in given):
        raise ConfigError(
            f"there is no reward; give --reward {', '.join(PLAIN_REWARDS)} or module:function, or --recipe"
        )
    return from_settings({"steps": 1} | given, "of the command")


def _reward(word: str) -> dict[str, Any]:
    from millrace.config.recipe import ConfigError

    if ":" in word:
        return {"kind": "function", "function": word}
    if word not in PLAIN_REWARDS:
        raise ConfigError(
            f"--reward {word} is none of {', '.join(PLAIN_REWARDS)} and module:function; give one of these, "
            "or rewards='[{kind: ...}]'"
        )
    return {"kind": word}


def as_tree(measure: str, result: Evaluation, num_samples: int = 1) -> dict[str, Any]:
    """An evaluation for programs: numbers, and a few answers without full marks."""
    return {
        "measure": measure,
        "value": result.metrics[measure],
        "accuracy": result.accuracy,
        "mean_reward": result.reward,
        "rewards": dict(result.parts),
        "mean_length_tokens": result.length,
        "truncated_fraction": result.truncated,
        "failed_fraction": result.failed,
        "num_prompts": len(result.rows) // num_samples,
        "num_left_out": result.left_out,
        "wrong": [{key: row[key] for key in ("prompt", "completion", "answer")} for row in _wrong(result)],
    }


def as_lines(of: str, measure: str, result: Evaluation, num_samples: int = 1) -> list[str]:
    """An evaluation for people."""
    from millrace.observability.measure import measure_words
    from millrace.observability.plain import plain_text

    metrics, size = result.metrics, len(result.rows)
    left_out = f" ({result.left_out} too long)" if result.left_out else ""
    questions = f"{size // num_samples} questions{left_out}" + f" x {num_samples} answers" * (num_samples > 1)
    told = [(measure_words(measure), f"{metrics[measure]:.3f} on {questions}, {of}")]
    others = [name for name in metrics if name.endswith("/mean") and name.startswith("reward/")]
    others = [name for name in ("accuracy", *others) if name != measure]
    told += [(measure_words(name), f"{metrics[name]:.3f}") for name in others]
    full = sum(row["right"] for row in result.rows)
    failed = [row for row in result.rows if row["outcome"] == "failed"]
    invalid = sum(row["outcome"] == "invalid" for row in result.rows)
    unread = f" ({invalid} of them could not be read)" if invalid else ""
    told.append(("answers", f"{full} with full marks, {size - full - len(failed)} with less{unread}"))
    if failed:
        reason = plain_text(failed[0]["reason"], 300)
        told.append(("failed", f"{len(failed)} have no score, and no mean counts them; the first: {reason}"))
    told.append(("mean length", f"{result.length:.1f} tokens, {result.truncated:.0%} ran out of tokens"))
    width = max(len(name) for name, _ in told)
    lines = [f"{name:{width}}  {value}" for name, value in told]
    examples = _wrong(result)
    if examples:
        lines.append("answers without full marks, for example:")
    for row in examples:
        lines += [
            f"  {_short(row['prompt'])}",
            f"    answered {_short(row.get('transcript', row['completion']))}",
        ]
        lines += [f"    expected {_short(row['answer'])}"] * bool(row["answer"])
        lines += [f"    reward   {row['reward']:.3f}"] * (measure != "accuracy")
    return lines


def _wrong(result: Evaluation) -> list[dict[str, Any]]:
    """The first answers without full marks, one to a prompt."""
    wrong = [row for row in result.rows if not row["right"] and row["outcome"] != "failed"]
    return list({row["prompt"]: row for row in reversed(wrong)}.values())[::-1][:NUM_EXAMPLES]


def _short(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
