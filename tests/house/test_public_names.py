"""The names that stay. Changing a line here changes what users wrote; say so in CHANGELOG.md."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from textwrap import wrap
from typing import Any

import pytest
from pydantic import BaseModel

from tests.house.source import PACKAGE

PINNED = {
    "millrace.types:SamplingParams": """
        max_tokens: int = 128
        temperature: float = 1.0
        top_k: int = 0
        top_p: float = 1.0
        stop_token_ids: tuple[int, ...] = ()
        stop: tuple[str, ...] = ()
        seed: int = 0
        min_tokens: int = 0
        min_p: float = 0.0
        repetition_penalty: float = 1.0
        presence_penalty: float = 0.0
        frequency_penalty: float = 0.0
        allowed_token_ids: tuple[int, ...] = ()
        forbidden_token_ids: tuple[int, ...] = ()
        logit_bias: tuple[tuple[int, float], ...] = ()
        logprobs: Literal['processed', 'raw'] = 'processed'
        prompt_logprobs: bool = False
        prompt_top_tokens: bool = False
        token_ids(self) -> dict[str, tuple[int, ...]]
    """,
    "millrace.types:Completion": """
        token_ids: tuple[int, ...]
        logprobs: np.ndarray
        versions: np.ndarray
        finish_reason: Literal['stop', 'length', 'abort', 'error']
        text: str
        support: Support | None = None
        prompt_logprobs: np.ndarray | None = None
        prompt_top: TopTokens | None = None
        experts: np.ndarray | None = None
        reason: str = ''
    """,
    "millrace.types:Task": """
        prompt: str
        answer: str
        row: Mapping[str, Any]
        seed: int
        sample: int
        max_turns: int
    """,
    "millrace.types:Action": """
        text: str
        token_ids: tuple[int, ...]
        finish_reason: str
        message: Mapping[str, Any] | None = None
        status: str = 'ok'
        error: str = ''
        num_context_tokens: int = 0
        logprobs: tuple[float, ...] = ()
        token_texts: tuple[str, ...] = ()
    """,
    "millrace.types:Reply": """
        text: str | None = None
        reward: float = 0.0
        state: str = ''
        done: bool = False
        score: float = 0.0
        messages: tuple[Mapping[str, Any], ...] = ()
        tools: tuple[Mapping[str, Any], ...] = ()
        invalid: str = ''
        calls: int | None = None
        invalid_calls: int = 0
        progress: float | None = None
        after: int | None = None
        verbatim: bool = False
        token_ids: tuple[int, ...] | None = None
        refused: int = 0
    """,
    "millrace.types:Trajectory": """
        turns: tuple[Turn, ...]
        outcome: Outcome | None = None
        end: str = ''
        branches (property) -> tuple[tuple[int, ...], ...]
        episode_return (property) -> float
        finish_reason (property) -> str
        num_actions (property) -> int
        num_roots (property) -> int
        num_tokens (property) -> int
        scored(self, outcome: Outcome) -> Trajectory
        text (property) -> str
        turn_rewards (property) -> tuple[float, ...]
    """,
    "millrace.types:Group": """
        prompt: Prompt
        trajectories: tuple[Trajectory, ...]
    """,
    "millrace.data.batch:Batch": """
        token_T: Tensor
        position_T: Tensor
        segment_T: Tensor
        action_mask_T: Tensor
        sampler_logprob_T: Tensor
        version_T: Tensor
        reward_T: Tensor
        advantage_T: Tensor
        weight_T: Tensor
        reference_logprob_T: Tensor | None = None
        proximal_logprob_T: Tensor | None = None
        value_T: Tensor | None = None
        return_T: Tensor | None = None
        correction_T: Tensor | None = None
        selected_T: Tensor | None = None
        expert_TLK: Tensor | None = None
        support: Supports | None = None
        turn_T: Tensor | None = None
        episode_T: Tensor | None = None
        chosen (property) -> Chosen
        chosen_support (property) -> Supports | None
        deal(self, world: int, *, even_tokens: float = inf, sharing: bool = False) -> list[list[int]]
        length_B (property) -> Tensor
        num_segments (property) -> int
        num_tokens (property) -> int
        places(self, segments: list[int]) -> Tensor
        select(self, segments: list[int]) -> Batch
        shard(self, rank: int, world: int) -> Batch
        split(self, max_tokens: int) -> Iterator[Batch]
        to(self, device: torch.device | str) -> Batch
        unit_T (property) -> Tensor
    """,
    "millrace.protocols:Engine": """
        generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]
        version (property) -> int
    """,
    "millrace.protocols:Trainer": """
        version: int
        forward_backward(self, batch: Batch) -> Tensor
        logprobs_of(self, token_ids: Sequence[int]) -> list[float]
        named_tensors(self) -> NamedTensors
        optim_step(self) -> StepReport
    """,
    "millrace.protocols:Scorer": """
        logprobs(self, batch: Batch) -> Tensor
    """,
    "millrace.protocols:Environment": """
        begin(self, task: Task) -> Reply | Awaitable[Reply]
        step(self, action: Action) -> Reply | Awaitable[Reply]
    """,
    "millrace.protocols:Reward": """
        close(self) -> None
        score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]
    """,
    "millrace.run.run:Controller": """
        __init__(self, settings: ControllerSettings, components: Components, folder: RunFolder, *,
          ranks: Ranks, saver: Saver, recipe: str, console: Console, interrupts: Interrupts,
          metrics: JsonlSink, loggers: list[Sink], progress: Progress, started_s: float,
          repeats: Repetition | None = None) -> None
        adopt(self, trainer: PolicyTrainer, checkpoint: Path | None) -> PolicyTrainer
        at_start (property) -> bool
        build_train_step(self, checkpoint: Path | None) -> TrainStep
        checkpoint(self, source: BatchSource | None = None) -> None
        evaluate(self, *, last: bool = True) -> Evaluation
        finish(self, status: Literal['finished', 'interrupted', 'failed']) -> RunReport
        keep_answers(self, name: str, result: Evaluation) -> None
        leave_if_asked(self, source: BatchSource | None = None) -> None
        measured(self, result: Evaluation) -> float
        note_best(self, result: Evaluation) -> bool
        note_demonstrations(self, num_scored: int, num_right: int) -> None
        owners(self) -> list[Owner]
        record(self, stage: str, numbers: dict[str, Any]) -> None
        recorded(self, name: str, reward: EpisodeReward | None = None) -> Iterator[None]
        report(self) -> None
        tidy(self, saved: Progress) -> None
        update_weights(self) -> None
        view (property) -> RunView
        wall_s (property) -> float
        warn(self, text: str | None) -> None
    """,
    "millrace.protocols:WeightTransport": """
        metrics (property) -> Mapping[str, float]
        update_weights(self, tensors: NamedTensors, policy_version: int) -> None
    """,
    "millrace.config.settings:RunConfig": """
        name: str | None = None
        output: str = 'runs'
        seed: NonNegativeInt = 0
        steps: NonNegativeInt = 200
        device: Literal['auto', 'cpu', 'cuda'] = 'auto'
        deterministic: bool = False
        precision: Literal['float32', 'bfloat16', 'float64'] = 'float32'
        threads: NonNegativeInt = 0
        profile_steps: tuple[PositiveInt, ...] = ()
        loggers: tuple[str, ...] = ('tensorboard',)
        project: str = 'millrace'
        run_group: str | None = None
        callbacks: tuple[FunctionName, ...] = ()
        model: ModelConfig = ModelConfig()
        tokenizer: TokenizerConfig = TokenizerConfig()
        data: DataConfig
        sft: SftConfig | None = None
        rollout: RolloutConfig = RolloutConfig()
        engine: EngineConfig = EngineConfig()
        environment: EnvironmentConfig | None = None
        rewards: tuple[RewardConfig, ...] = ()
        advantage: AdvantageConfig = GroupAdvantage()
        critic: CriticConfig | None = None
        policy: PolicyConfig = PolicyConfig()
        mesh: MeshConfig = MeshConfig()
        evaluation: EvaluationConfig = EvaluationConfig()
        checkpoint: CheckpointConfig = CheckpointConfig()
        limits: LimitConfig = LimitConfig()
        timeouts: TimeoutConfig = TimeoutConfig()
    """,
}
# Pinned as soon as the file that defines it is there.
LATER = {"millrace.run.run:Controller": "run/run.py"}


def surface(kind: Any) -> list[str]:
    """Fields in their order, then public properties and methods by name, as one would write them."""
    annotations = inspect.get_annotations(kind)
    lines = [f"{name}: {_word(kind, name, annotations[name])}" for name in annotations if name[0] != "_"]
    for name, member in sorted(vars(kind).items()):
        if name[0] == "_" and name != "__init__":
            continue
        if isinstance(member, property):
            lines.append(f"{name} (property) -> {inspect.signature(member.fget).return_annotation}")
        elif isinstance(member, classmethod | staticmethod):
            lines.append(f"{name} ({type(member).__name__}){_signature(member.__func__)}")
        elif inspect.isfunction(member) and (name != "__init__" or _has_own_init(kind)):
            lines.append(f"{name}{_signature(member)}")
    return lines


def _has_own_init(kind: Any) -> bool:
    generated = dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False)
    return not generated and not issubclass(kind, BaseModel)


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    plain = [p.replace(annotation=_Bare(p.annotation)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=_Bare(signature.return_annotation)))


class _Bare(str):
    """An annotation that prints without quotes."""

    def __new__(cls, annotation: Any) -> Any:
        return annotation if annotation is inspect.Parameter.empty else super().__new__(cls, annotation)

    def __repr__(self) -> str:
        return str(self)


def _word(kind: Any, name: str, annotation: str) -> str:
    annotation = annotation.replace('"', "'")
    if dataclasses.is_dataclass(kind):
        field = next(field for field in dataclasses.fields(kind) if field.name == name)
        if field.default is not dataclasses.MISSING:
            return f"{annotation} = {field.default!r}"
        return annotation + (" = ..." if field.default_factory is not dataclasses.MISSING else "")
    if issubclass(kind, BaseModel):
        info = kind.model_fields[name]
        if info.is_required():
            return annotation
        made = info.default_factory
        return f"{annotation} = {made.__name__ + '()' if made else repr(info.default)}"
    return annotation


def difference(name: str, pinned: str) -> list[str]:
    """What is pinned and gone, and what is there and not pinned."""
    module, _, kind = name.partition(":")
    there = surface(getattr(import_module(module), kind))
    wanted = _lines(pinned)
    found = [f"gone: {line}" for line in wanted if line not in there]
    found += [f"new: {line}" for line in there if line not in wanted]
    return found or ([] if there == wanted else ["the order differs"])


def _lines(pinned: str) -> list[str]:
    """The lines of an entry; one whose parenthesis is open goes on in the next."""
    lines = [""]
    for line in pinned.strip().splitlines():
        is_open = lines[-1].count("(") > lines[-1].count(")")
        if is_open:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    return lines[1:]


@pytest.mark.parametrize("name", PINNED)
def test_a_public_name_keeps_its_signature(name):
    assert difference(name, PINNED[name]) == []


@pytest.mark.parametrize("name", LATER)
def test_a_public_name_is_pinned_once_it_exists(name):
    module, _, kind = name.partition(":")
    if not (PACKAGE / LATER[name]).exists():
        pytest.skip(f"{LATER[name]} is not there yet")
    lines = surface(getattr(import_module(module), kind))
    there = "\n        ".join(part for line in lines for part in wrap(line, 95, subsequent_indent="    "))
    assert name in PINNED, f'pin it in PINNED:\n    "{name}": """\n        {there}\n    """,'


def test_a_long_signature_may_go_on_in_the_next_line():
    assert _lines("\n  a: int\n  f(self,\n    x: int) -> None\n  g(self)\n") == [
        "a: int",
        "f(self, x: int) -> None",
        "g(self)",
    ]


def test_a_changed_signature_is_found():
    name = "millrace.types:Group"
    assert difference(name, "prompt: Prompt\ntrajectories: tuple[Trajectory, ...]") == []
    assert difference(name, "trajectories: tuple[Trajectory, ...]\nprompt: Prompt") == ["the order differs"]
    assert difference(name, "prompt: Prompt\ntrajectories: list[Trajectory]") == [
        "gone: trajectories: list[Trajectory]",
        "new: trajectories: tuple[Trajectory, ...]",
    ]
