"""`millrace plan`: whether a recipe fits some accelerators, how long a step takes, and what to change."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.train import Overrides, Recipe
from millrace.errors import PlanError

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.planner.fit import Fit, Refuse
    from millrace.planner.hardware import Gpu
    from millrace.planner.layout import Layout
    from millrace.planner.memory import Workload
    from millrace.planner.model_shape import ModelShape

Gpus = Annotated[str, typer.Option(help="How many accelerators, and which, such as 8xH200.")]
LayoutText = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="Layout of the ranks, such as dp_shard=4,tp=2: short for mesh.dp_shard=4 mesh.tp=2.",
    ),
]
Mfu = Annotated[
    float,
    typer.Option(min=0.01, max=1.0, help="Fraction of the peak rate that matrix products reach (MFU)."),
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
OFFLOADED = "of each rank: weights, moments and gradients"
WAITING = "of each rank: what trains, while the engine samples"


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    gpus: Gpus,
    layout: LayoutText = None,
    mfu: Mfu = 0.4,
) -> None:
    """Say whether a recipe fits some accelerators, what to change if not, and how long a step takes.

    The layout is that of the recipe's mesh; where the recipe is of one rank and there are more accelerators,
    the simplest that fits is chosen. Nothing is run and no weight is read.

    Exit code: 0 it fits, 1 it does not, 2 a mistake in the words.
    """
    from millrace.config.recipe import load_recipe, parse_overrides
    from millrace.planner.fit import choose, judge
    from millrace.planner.hardware import parse_gpus
    from millrace.planner.layout import Layout

    sizes = Layout.parse(layout).settings() if layout is not None else {}
    config = load_recipe(recipe, parse_overrides(overrides or []) | sizes)
    num_ranks, gpu = parse_gpus(gpus)
    shape, work = read_shape(config), workload(config)
    refuse = partial(refusal, config, shape)
    asked = Layout.of(config.mesh.model_dump())
    if asked.num_ranks > 1:
        asked.check_ranks(num_ranks)
        asked.check(shape)
        reason = refuse(asked)
        if reason is not None:
            raise PlanError(reason)
        fit = judge(shape, asked, work, gpu.memory_bytes, "as the recipe's mesh asks for")
    else:
        fit = choose(shape, work, num_ranks, gpu.memory_bytes, refuse=refuse)
    for line in plan_lines(shape, work, fit, gpu, refuse=refuse, mfu=mfu):
        typer.echo(line)
    if not fit.fits:
        raise typer.Exit(1)


def read_shape(config: RunConfig) -> ModelShape:
    """The shape of a recipe's model: its folder's config.json, or the architecture with its fields.

    A PlanError if it cannot be read or planned for; a ModelError if the architecture or a field is unknown.
    """
    from millrace.observability.files import RESTORE, FileError, read_json
    from millrace.planner.model_shape import ModelShape

    if config.model.path is not None:
        path = Path(config.model.path) / "config.json"
        try:
            return ModelShape.of(read_json(path, dict[str, Any]))
        except FileError as error:
            raise PlanError(str(error)) from None
        except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
            # Fields of other types than a config has.
            raise PlanError(f"{path} is damaged: {error}; {RESTORE}") from None
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


def refusal(config: RunConfig, shape: ModelShape, layout: Layout) -> str | None:
    """Why a recipe does not go with a layout that divides its model; None where it does."""
    from millrace.config.settings import ineffective_settings
    from millrace.planner.layout import tensor_misfit

    mesh = config.mesh.model_copy(update=asdict(layout))
    size = config.engine.tensor_parallel_size
    num_stages, heads = layout.pp * mesh.pp_chunks, shape.num_heads // layout.tp
    reasons = ineffective_settings(config.model_copy(update={"mesh": mesh}))
    if (misfit := tensor_misfit(size, shape, "engine.tensor_parallel_size")) is not None:
        reasons.append(misfit)
    if num_stages > shape.num_layers:
        reasons.append(
            f"mesh.pp {layout.pp} x mesh.pp_chunks {mesh.pp_chunks} is {num_stages} stages, but the model "
            f"has {shape.num_layers} layers; lower one of them"
        )
    if mesh.cp_kind == "ulysses" and heads % layout.cp:
        reasons.append(
            f"mesh.cp is {layout.cp}, which does not divide the {heads} attention heads of a rank; choose a "
            "cp that does, or mesh.cp_kind=ring"
        )
    return reasons[0] if reasons else None


def workload(config: RunConfig) -> Workload:
    """What a recipe asks of its ranks; PlanError for precision float64, or without reinforcement."""
    from millrace.config.sections import EIGHT_BIT
    from millrace.planner.hardware import NUMBER_BYTES
    from millrace.planner.memory import EIGHT_BIT_MOMENT, Workload

    if config.precision not in NUMBER_BYTES:
        raise PlanError(f"precision {config.precision} is for tests; plan float32 or bfloat16")
    if config.steps == 0:
        raise PlanError("steps is 0 (supervised training alone); a plan is of reinforcement, so set steps")
    rollout, engine, policy, mesh = config.rollout, config.engine, config.policy, config.mesh
    weight_bytes = NUMBER_BYTES[config.precision]
    num_frozen = (policy.kl is not None) + (config.advantage.kind == "teacher")
    return Workload(
        prompt_tokens=config.data.max_prompt_tokens,
        completion_tokens=rollout.max_tokens,
        num_sequences=rollout.prompts_per_step * rollout.samples_per_prompt,
        samples_per_prompt=rollout.samples_per_prompt,
        micro_batch_tokens=policy.tokens_per_micro_batch,
        weight_bytes=weight_bytes,
        compute_bytes=NUMBER_BYTES[mesh.compute_dtype or config.precision],
        moment_bytes=EIGHT_BIT_MOMENT if policy.optimizer.kind == EIGHT_BIT else weight_bytes,
        checkpointing=mesh.activation_checkpointing,
        activation_offload=mesh.activation_offload,
        reshard_after_forward=mesh.reshard_after_forward,
        sequence=mesh.sequence_parallel,
        num_chunks=mesh.pp_chunks,
        offload=mesh.offload,
        num_frozen=num_frozen,
        num_away=int(policy.kl is not None and policy.kl.offload),
        frozen_beside=policy.kl is not None and policy.kl.estimator == "full",
        num_scorings=num_frozen + (policy.proximal == "recompute"),
        critic=config.critic is not None,
        max_requests=engine.max_num_seqs,
        cache_tokens=engine.cache_tokens,
        block_size=engine.block_size,
        step_tokens=engine.max_num_batched_tokens,
        colocated=engine.colocated,
        engine_ranks=engine.tensor_parallel_size,
    )


def plan_lines(
    shape: ModelShape, work: Workload, fit: Fit, gpu: Gpu, *, refuse: Refuse, mfu: float
) -> list[str]:
    """Format the plan as lines; `refuse` rejects layouts that are incompatible with the recipe."""
    from millrace.planner.fit import USABLE_SHARE, gigabytes
    from millrace.planner.step_time import BANDWIDTH_SHARE, step_time

    memory, usable = fit.memory, gigabytes(USABLE_SHARE * gpu.memory_bytes)
    active = "" if not shape.num_experts else f", {shape.num_active_parameters:,} of them for a token"
    lines = [
        f"{fit.layout.num_ranks} x {gpu.name}, layout {fit.layout} ({fit.why})",
        f"model: {shape.num_parameters:,} weights{active}",
        "",
        "memory of the fullest rank, GB",
    ]
    for name, size in memory.parts().items():
        if size:
            lines.append(f"  {name:{NAME_WIDTH}}{gigabytes(size):>{NUMBER_WIDTH}}  {MEANINGS[name]}")
    phases = {"while training": memory.training, "while sampling": memory.sampling}
    lines += [f"  {name:{NAME_WIDTH}}{gigabytes(size):>{NUMBER_WIDTH}}" for name, size in phases.items()]
    if memory.host:
        what = WAITING if memory.colocated else OFFLOADED
        lines.append(f"  {'in the host':{NAME_WIDTH}}{gigabytes(memory.host):>{NUMBER_WIDTH}}  {what}")
    verdict = "it fits" if fit.fits else "it does not fit"
    lines += [f"{verdict}: {gigabytes(memory.peak)} of {usable} GB that may be used", ""]
    if not fit.fits:
        return lines + advice_lines(shape, work, fit, gpu, refuse)
    times = step_time(shape, fit.layout, work, memory, gpu, mfu=mfu)
    rows = {"prefill": times.prefill, "decode": times.decode, "scoring": times.scoring}
    rows |= {"training": times.training, "one after another": times.total}
    lines.append(
        f"seconds of a step of {work.num_sequences} sequences of {work.longest} tokens, at {mfu:.0%} of "
        f"{gpu.flops(work.compute_bytes) / 1e12:.4g} TFLOP/s and {BANDWIDTH_SHARE:.0%} of "
        f"{gpu.bandwidth / 1e12:.3g} TB/s"
    )
    lines += [f"  {name:{NAME_WIDTH + 2}}{seconds:>{NUMBER_WIDTH}.3g}" for name, seconds in rows.items()]
    return lines


def advice_lines(shape: ModelShape, work: Workload, fit: Fit, gpu: Gpu, refuse: Refuse) -> list[str]:
    """What to change where a recipe does not fit, in the words of its settings."""
    from millrace.planner.fit import advice, gigabytes

    changes = advice(shape, work, fit, gpu.memory_bytes, refuse=refuse)
    lines = ["what helps, each on top of the ones before"]
    for change in changes:
        then = change.fit
        lines.append(f"  {change.text}: {gigabytes(then.memory.peak)} GB with layout {then.layout}")
    if not changes or not changes[-1].fit.fits:
        lines.append("  more accelerators, or larger ones")
    return lines
