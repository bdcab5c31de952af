"""Settings of what goes in: weights, tokens and prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from millrace.config.reward_sections import RewardConfig
from millrace.config.section import Section, compiled, is_function

TASK_PREFIX = "reasoning-gym:"
# `data.train` of a recipe with `data.sources`.
MIXTURE = "sources"
# How far the weights of sources may add up beside 1, for thirds and sevenths.
WEIGHT_ROUNDING = 1e-3
# `data.train` for problems that the environment generates.
ENVIRONMENT_ROWS = "environment"
# Of a setting that follows what the rows hold.
AUTO = "auto"
# Where prompts are looked for; datasets for TRL and verl call theirs prompt, chats messages.
PROMPT_COLUMNS = ("question", "prompt", "messages", "problem")
# Columns of reference answers: ours and GSM8K's; verl's; open-instruct's; that of TRL's sets of mathematics.
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
# The option of a chat template that names its file.
TEMPLATE_FILE = "file"
# Settings of a fresh model and of a tokenizer that is trained on the data, which folders bring along.
FRESH_MODEL = ("architecture", "shape")
TRAINED_TOKENIZER = ("vocab_size", "alphabet", "across_words")
# The chance of a prompt that falls with what it earned.
HARD = "hard"


def check_pattern(pattern: str | None) -> str | None:
    """Return a pattern of answers; ValueError if it is invalid or has no group."""
    if pattern is not None and compiled(pattern).groups < 1:
        raise ValueError(f"{pattern!r} has no group; put the answer in parentheses")
    return pattern


def check_template(template: str) -> str:
    """Return a template of prompts; ValueError if it has no place for the prompt."""
    if template not in ("chat", AUTO) and "{prompt}" not in template:
        raise ValueError(f"{template!r} does not contain {{prompt}}")
    return template


class AdapterConfig(Section):
    """A low-rank adapter (LoRA): the model stays as it is, and a pair of small matrices learns beside it."""

    path: str | None = Field(
        None, description="adapter folder in peft's format to go on from; null makes a fresh adapter"
    )
    rank: PositiveInt = Field(16, description="width of each pair, the adapter's capacity")
    alpha: PositiveFloat = Field(32.0, description="what a pair adds is multiplied by alpha / rank")
    rank_stabilised: bool = Field(
        False, description="multiply by alpha / sqrt(rank) instead, so that ranks compare (rsLoRA)"
    )
    targets: tuple[str, ...] = Field(
        ("all-linear",),
        description="linear layers that get a pair, such as q_proj; all-linear is every one but the output "
        "head",
        min_length=1,
    )


class ModelConfig(Section):
    """Which weights the policy starts from."""

    path: str | None = Field(
        None, description="Hugging Face model folder (safetensors); null makes a fresh model"
    )
    architecture: str = Field("qwen3", description="transformers model type of a fresh model")
    shape: dict[str, Any] = Field(
        default_factory=dict, description="transformers config fields of a fresh model, such as hidden_size"
    )
    adapter: AdapterConfig | None = Field(
        None, description="a low-rank adapter that learns in the model's stead; null trains the model"
    )
    frozen: tuple[str, ...] = Field(
        (), description="names of weights that do not learn, * standing for any part"
    )


def idle_model(config: ModelConfig) -> Iterator[str]:
    """One sentence for each setting of what learns that was given and can have no effect."""
    adapter = config.adapter
    if adapter is None:
        return
    if config.frozen:
        yield "model.frozen has no effect with model.adapter, which leaves nothing else to learn; remove it"
    fresh = AdapterConfig(path=adapter.path)
    for name in AdapterConfig.model_fields:
        if adapter.path is not None and getattr(adapter, name) != getattr(fresh, name):
            yield f"model.adapter.{name} has no effect because model.adapter.path fixes it; remove it"


class TokenizerConfig(Section):
    """Which tokenizer; by default the model folder's, or for a fresh model one trained on the data."""

    path: str | None = Field(
        None, description="tokenizer folder; null takes the model's, or trains one on the data"
    )
    vocab_size: PositiveInt = Field(1024, description="most entries of a trained tokenizer")
    alphabet: Literal["bytes", "seen"] = Field(
        "bytes",
        description="what a trained tokenizer spells with: every byte, or only those of the data (a tiny "
        "model learns faster; other text is refused)",
    )
    across_words: bool = Field(
        False,
        description="let one entry of a trained tokenizer span words (short prompts for templated tasks)",
    )
    chat_template: dict[str, bool | int | FiniteFloat | str] = Field(
        default_factory=dict,
        description="variables of the chat template, such as {enable_thinking: false}; `file` names a Jinja "
        "file that replaces the tokenizer's template. Saved models keep both",
    )

    @field_validator("chat_template")
    @classmethod
    def _names(cls, options: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        for name in options:
            if not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is no name of a variable")
        if not isinstance(options.get(TEMPLATE_FILE, ""), str):
            raise ValueError(f"{TEMPLATE_FILE} is {options[TEMPLATE_FILE]!r}, not the name of a file")
        return options


class CurriculumConfig(Section):
    """How likely a prompt is dealt when its turn in the epoch comes."""

    chance: str = Field(
        HARD,
        description="`hard`, 1 less the mean reward of its last group; or module:function, your own, with "
        "inputs among row, reward and tries",
    )
    least: float = Field(0.1, ge=0.01, le=1, description="no prompt's chance is lower")

    @field_validator("chance")
    @classmethod
    def _form(cls, chance: str) -> str:
        if chance != HARD and not is_function(chance):
            raise ValueError(f"{chance!r} is neither {HARD} nor of the form module:function")
        return chance


class SourceConfig(Section):
    """One of several sources of prompts: its files, its part of all prompts, and how its rows are read."""

    name: str = Field(description="name in metrics, such as source/NAME/reward/mean")
    data: str = Field(description="file, pattern or folder, as data.train")
    weight: PositiveFloat | None = Field(
        None,
        description="fraction of the prompts; those of all sources add up to 1. null in all of them takes "
        "each prompt once an epoch",
    )
    template: str | None = Field(None, description="text around {prompt}, or `chat`; null is data.template")
    prompt_column: str | None = Field(
        None, description="column that holds the prompt; null is data.prompt_column"
    )
    answer_column: str | None = Field(
        None, description="column that holds the reference answer; null is data.answer_column"
    )
    answer_pattern: str | None = Field(
        None, description="regular expression of the answer; null is data.answer_pattern"
    )
    demonstration_column: str | None = Field(
        None, description="column that holds a completion to imitate; null is data.demonstration_column"
    )
    rewards: tuple[RewardConfig, ...] = Field(
        (), description="rewards of the answers to its prompts; an empty list takes those of the recipe"
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"{name!r} is no name of a source (letters, digits, dot, dash, underscore)")
        return name

    @field_validator("template")
    @classmethod
    def _names_prompt(cls, template: str | None) -> str | None:
        return None if template is None else check_template(template)

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return check_pattern(pattern)


def source_fractions(sources: Sequence[SourceConfig], sizes: Sequence[int]) -> list[Fraction]:
    """Return the exact fraction of all prompts that each source has; they add up to 1.

    Args:
        sources: of the recipe; their weights are read as decimal numbers.
        sizes: number of prompts of each, which are the weights where none is given.
    """
    weights = [
        Fraction(size) if one.weight is None else Fraction(str(one.weight))
        for one, size in zip(sources, sizes, strict=True)
    ]
    return [weight / sum(weights) for weight in weights]


class DataConfig(Section):
    """Prompts, their answers, and how they are split."""

    train: str = Field(
        description="JSONL, JSON, CSV (these also as .gz or .zst) or Parquet file, a pattern of several, "
        f"a folder of them or of the datasets package, {TASK_PREFIX}NAME, your own module:function that "
        f"returns rows, or {ENVIRONMENT_ROWS} for the problems of the "
        "environment; `sources` stands for data.sources"
    )
    sources: tuple[SourceConfig, ...] = Field(
        (), description="several sources instead of data.train, mixed by their weights"
    )
    eval: str | None = Field(
        None, description="held-out file or folder; null splits off eval_size rows of train"
    )
    task: dict[str, Any] = Field(default_factory=dict, description="options of a reasoning-gym task")
    task_size: PositiveInt = Field(
        10_000,
        description="problems generated by a reasoning-gym task or the environment, duplicates included",
    )
    eval_size: PositiveInt | None = Field(
        None,
        description="most rows that are held out for evaluation; null is 256, and where they are split off "
        "train at most a tenth of its problems",
    )
    train_size: PositiveInt | None = Field(
        None,
        description="most rows that are trained on, of those not held out: with shuffle sampled by seed, "
        "else "
        "the first; null is all",
    )
    prompt_column: str = Field(
        AUTO,
        description="column that holds the prompt (text or chat messages); auto is the first there is of "
        + ", ".join(PROMPT_COLUMNS),
    )
    answer_column: str | None = Field(
        AUTO,
        description="column that holds the reference answer; auto is the first with text or a number of "
        + ", ".join(ANSWER_COLUMNS)
        + "; null has none",
    )
    answer_pattern: str | None = Field(
        None, description="regular expression whose first group is the answer within its column"
    )
    demonstration_column: str | None = Field(
        None, description="column that holds a completion to imitate in SFT; null uses the answer"
    )
    identity_column: str | None = Field(
        None, description="column that identifies a problem, dotted into objects; null is the prompt"
    )
    template: str = Field(
        AUTO,
        description="text around {prompt}, or `chat` for the tokenizer's own chat template; auto is chat for "
        "messages and {prompt} for text",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="longest prompt")
    too_long: Literal["filter", "refuse"] = Field(
        "filter", description="drop longer prompts with a count, or stop"
    )
    streaming: bool = Field(
        False,
        description="read rows of JSON Lines and Parquet files from disk as they are needed, with the same "
        "prompts in the same order; for sets larger than memory",
    )
    shuffle: bool = Field(True, description="a new order each epoch, by seed")
    curriculum: CurriculumConfig | None = Field(
        None, description="prompts that are passed over, by what they earned; null deals all"
    )

    @model_validator(mode="before")
    @classmethod
    def _train_or_sources(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not given.get("sources"):
            return given
        if given.get("train") not in (None, MIXTURE):
            raise ValueError(f"train is {given['train']!r} and sources names other files; remove one of them")
        if given.get("train_size") is not None:
            raise ValueError("train_size is of data.train alone; remove it, or give sources smaller files")
        return {**given, "train": MIXTURE}

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return check_pattern(pattern)

    @field_validator("template")
    @classmethod
    def _names_prompt(cls, template: str) -> str:
        return check_template(template)

    @field_validator("sources")
    @classmethod
    def _weights(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [one.name for one in sources]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ValueError(f"two sources are called {name}; give each a name of its own")
        weights = [one.weight for one in sources if one.weight is not None]
        if weights and len(weights) < len(sources):
            without = ", ".join(one.name for one in sources if one.weight is None)
            raise ValueError(f"{without} has no weight and others have one; give all sources one, or none")
        if weights and abs(sum(weights) - 1) > WEIGHT_ROUNDING:
            shown = " + ".join(f"{weight:g}" for weight in weights)
            raise ValueError(f"the weights {shown} add up to {sum(weights):g}; make them add up to 1")
        return sources

    def of_source(self, name: str) -> DataConfig:
        """Return the settings by which rows of a source are read; these themselves if there is none."""
        own = next((one for one in self.sources if one.name == name), None)
        if own is None:
            return self
        inherited = ("template", "prompt_column", "answer_column", "answer_pattern", "demonstration_column")
        given = {key: value for key in inherited if (value := getattr(own, key)) is not None}
        return self.model_copy(update={"train": own.data, "sources": (), **given})
