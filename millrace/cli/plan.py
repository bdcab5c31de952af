"""`millrace plan`: whether a recipe fits some accelerators, how long a step takes, and what to change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millrace.cli.train import Overrides, Recipe

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.planner.fit import Fit
    from millrace.planner.hardware import Gpu
    from millrace.planner.memory import Workload
    from millrace.planner.model_shape import ModelShape

Gpus = Annotated[str, typer.Option(help="How many accelerators, and which, such as 8xH200.")]
LayoutText = Annotated[
    str | None,
    typer.Option(
        "--layout", help="How they share the model, such as dp_shard=4,tp=2; without, one is chosen."
    ),
]
Compute = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="Dtype of forwards and of the sampler; without, the recipe's precision."),
]
Checkpointing = Annotated[
    Literal["none", "selective", "full"], typer.Option(help="What is computed again in the backward.")
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Trainer and sampler leave the device to each other.")
]
SamplerTp = Annotated[
    int, typer.Option(min=1, help="Ranks that share one engine's weights; our own engine takes 1.")
]
Mfu = Annotated[
    float,
    typer.Option(min=0.01, max=1.0, help="Share of the peak rate that matrix products are taken to reach."),
]
NAME_WIDTH, NUMBER_WIDTH = 16, 9

MEANINGS = {
    "weights": "the policy, as it is trained",
    "moments": "AdamW",
    "critic": "weights and moments of the critic",
    "frozen": "reference or teacher",
    "gradients": "of the policy",
    "gathered": "whole layers put together for a while",
    "activations": "what a forward keeps for its backward",
    "scratch": "logits or slopes at the fullest moment",
    "sampler": "weights of the engine",
    "cache": "keys and values",
    "drawing": "logits and a forward of the engine",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says besides the recipe."""

    compute: str | None = None
    checkpointing: Literal["none", "selective", "full"] = "none"
    offload: bool = False
    sampler_tp: int = 1


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    gpus: Gpus,
    layout: LayoutText = None,
    compute: Compute = None,
    checkpointing: Checkpointing = "none",
    offload: Offload = False,
    sampler_tp: SamplerTp = 1,
    mfu: Mfu = 0.4,
) -> None:
    """Say whether a recipe fits some accelerators, what to change if not, and how long a step takes.

    Nothing is run and no weight is read. Exit code: 0 it fits, 1 it does not, 2 a mistake in the words.
    """
    from millrace.config.recipe import load_recipe, parse_overrides
    from millrace.planner.errors import PlanError
    from millrace.planner.fit import Fit, choose, fits
    from millrace.planner.hardware import parse_gpus
    from millrace.planner.layout import Split
    from millrace.planner.memory import memory_per_rank

    config = load_recipe(recipe, parse_overrides(overrides or []))
    num_ranks, gpu = parse_gpus(gpus)
    shape = read_shape(config)
    work = workload(config, Options(compute, checkpointing, offload, sampler_tp))
    if num_ranks % sampler_tp:
        raise PlanError(f"--sampler-tp {sampler_tp} does not divide the {num_ranks} accelerators of --gpus")
    if layout is None:
        fit = choose(shape, work, num_ranks, gpu.memory_bytes)
    else:
        split = Split.parse(layout)
        if split.num_ranks != num_ranks:
            raise PlanError(f"--layout {split} needs {split.num_ranks} ranks, but --gpus says {num_ranks}")
        memory = memory_per_rank(shape, split, work, gpu.memory_bytes)
        fit = Fit(split, memory, fits(memory, gpu.memory_bytes), "as --layout asks for")
    for line in plan_lines(shape, work, fit, gpu, free=layout is None, mfu=mfu):
        typer.echo(line)
    if not fit.fits:
        raise typer.Exit(1)


def read_shape(config: RunConfig) -> ModelShape:
    """The shape of a recipe's model: its folder's config.json, or the architecture with its fields.

    Raises:
        PlanError: the folder has no readable config.json, or the model is not one that can be planned for.
        ModelError: the architecture or one of its fields is unknown.
    """
    from millrace.planner.errors import PlanError
    from millrace.planner.model_shape import ModelShape

    if config.model.path is not None:
        path = Path(config.model.path) / "config.json"
        try:
            described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"{path} cannot be read: {error}") from None
        return ModelShape.of(described)
    from millrace.models.load import fresh_config

    # Defaults are transformers' own; a tokenizer that is yet to be trained has at most so many entries.
    made = fresh_config(
        config.model.architecture,
        config.model.shape,
        vocab_size=_vocabulary(config),
        eos_token_id=0,
    )
    return ModelShape.of(made.to_dict())


def _vocabulary(config: RunConfig) -> int:
    if config.tokenizer.path is None:
        return config.tokenizer.vocab_size
    from millrace.data.tokenizers import load_tokenizer

    return len(load_tokenizer(config.tokenizer.path))


def workload(config: RunConfig, options: Options) -> Workload:
    """What a recipe asks of its ranks.

    Raises:
        PlanError: the precision is float64, or there is no reinforcement to plan.
    """
    from millrace.planner.errors import PlanError
    from millrace.planner.memory import Workload

    sizes = {"float32": 4, "bfloat16": 2}
    if config.precision not in sizes:
        raise PlanError(f"precision {config.precision} is for tests; plan float32 or bfloat16")
    if config.steps == 0:
        raise PlanError("steps is 0 (supervised training alone); a plan is of reinforcement, so set steps")
    rollout, engine, policy = config.rollout, config.engine, config.policy
    weight_bytes = sizes[config.precision]
    num_frozen = (policy.kl is not None) + (config.advantage.kind == "teacher")
    return Workload(
        prompt_tokens=config.data.max_prompt_tokens,
        completion_tokens=rollout.max_tokens,
        num_sequences=rollout.prompts_per_step * rollout.samples_per_prompt,
        samples_per_prompt=rollout.samples_per_prompt,
        micro_batch_tokens=policy.tokens_per_micro_batch,
        weight_bytes=weight_bytes,
        compute_bytes=sizes[options.compute] if options.compute else weight_bytes,
        moment_bytes=weight_bytes,
        checkpointing=options.checkpointing,
        offload=options.offload,
        num_frozen=num_frozen,
        num_scorings=num_frozen + (policy.proximal == "recompute"),
        critic=config.critic is not None,
        max_requests=engine.max_requests,
        cache_tokens=engine.cache_tokens,
        block_size=engine.block_size,
        step_tokens=engine.tokens_per_step,
        sampler_tp=options.sampler_tp,
    )


def plan_lines(shape: ModelShape, work: Workload, fit: Fit, gpu: Gpu, *, free: bool, mfu: float) -> list[str]:
    """The plan, line by line; `free` says whether advice may change the layout too."""
    from millrace.planner.fit import USABLE_SHARE, advice, gigabytes
    from millrace.planner.step_time import BANDWIDTH_SHARE, step_time

    memory, usable = fit.memory, gigabytes(USABLE_SHARE * gpu.memory_bytes)
    active = "" if not shape.num_experts else f", {shape.num_active_parameters:,} of them for a token"
    lines = [
        f"{fit.split.num_ranks} x {gpu.name}, layout {fit.split} ({fit.why})",
        f"model: {shape.num_parameters:,} weights{active}",
        "",
        "memory of the fullest rank, GB",
    ]
    for name, size in memory.parts().items():
        if size:
            lines.append(f"  {name:{NAME_WIDTH}}{gigabytes(size):>{NUMBER_WIDTH}}  {MEANINGS[name]}")
    phases = {"while training": memory.training, "while sampling": memory.sampling}
    lines += [f"  {name:{NAME_WIDTH}}{gigabytes(size):>{NUMBER_WIDTH}}" for name, size in phases.items()]
    verdict = "it fits" if fit.fits else "it does not fit"
    lines += [f"{verdict}: {gigabytes(memory.peak)} of {usable} GB that may be used", ""]
    if not fit.fits:
        changes = advice(shape, work, fit, gpu.memory_bytes, free=free)
        lines += ["what helps, each on top of the ones before"]
        for change in changes:
            then = change.fit
            lines.append(f"  {change.text}: {gigabytes(then.memory.peak)} GB with layout {then.split}")
        if not changes or not changes[-1].fit.fits:
            lines += ["  more accelerators, or larger ones"]
        return lines
    times = step_time(shape, fit.split, work, memory, gpu, mfu=mfu)
    rows = {"prefill": times.prefill, "decode": times.decode, "scoring": times.scoring}
    rows |= {"training": times.training, "one after another": times.total}
    lines.append(
        f"seconds of a step of {work.num_sequences} sequences of {work.longest} tokens, at {mfu:.0%} of "
        f"{gpu.flops(work.compute_bytes) / 1e12:.4g} TFLOP/s and {BANDWIDTH_SHARE:.0%} of "
        f"{gpu.bandwidth / 1e12:.3g} TB/s"
    )
    lines += [f"  {name:{NAME_WIDTH + 2}}{seconds:>{NUMBER_WIDTH}.3g}" for name, seconds in rows.items()]
    return lines
