"""The training loops: SFT, then reinforcement on batches from a `BatchSource`.

Every random choice is a function of the recipe's seed and a counter, and every counter is in the checkpoint.
So at staleness 0 a resumed run is bitwise equal to an uninterrupted one. At higher staleness, the same
prompts are sampled with the same seeds, but timing decides which policy version generates which token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from millrace.config.reward_sections import RewardConfig
from millrace.config.sections import SftConfig
from millrace.config.settings import RunConfig, rewards_of
from millrace.data.mixture import PromptFeed
from millrace.data.packing import TokenWeights, pack_demonstrations
from millrace.distributed.ranks import Ranks
from millrace.observability.profile import profiled
from millrace.observability.tables import write_table
from millrace.planner.flops import utilization
from millrace.planner.hardware import peak_flops
from millrace.rollout.batch_source import BatchSource
from millrace.run.build_algorithm import build_token_weights
from millrace.run.build_source import build_source, build_stream
from millrace.run.evaluation import is_right, one_turn, reference_completion
from millrace.run.health.health_checks import (
    check_current,
    check_imports,
    check_mismatch,
    check_rewards,
    check_steps,
)
from millrace.run.health.memory_peaks import fullest
from millrace.run.launch import new_run, resumed_run
from millrace.run.progress import RunReport
from millrace.run.rounding import rounding
from millrace.run.run import Controller, Repetition
from millrace.run.train_step import BatchResult, TrainStep, train_on
from millrace.training.policy import PolicyTrainer


def train(
    config: RunConfig,
    *,
    recipe: str = "run",
    quiet: bool = False,
    repeats: Repetition | None = None,
    ranks: Ranks | None = None,
) -> RunReport:
    """Train a policy in a new run folder, which is removed if the run fails before its first result.

    Args:
        config: from `load_recipe`.
        recipe: name of the run folder where `config.name` is null.
        quiet: print nothing.
        repeats: in a replay, the recorded segment to follow; see `replay.replay`.
        ranks: already connected ranks; None connects them here.

    Returns:
        The report, also written to summary.json; its `status` is finished or interrupted.

    Raises:
        ValueError: the data, model, rewards or settings cannot be used; the message names the fix.
        RuntimeError: the run stopped; it can be resumed from what was saved.
        KeyboardInterrupt: the user pressed Ctrl-C twice.
    """
    with new_run(config, recipe=recipe, quiet=quiet, repeats=repeats, ranks=ranks) as started:
        run(started.config, started.controller, started.checkpoint)
    assert started.report is not None
    return started.report


def resume(
    path: str | Path, *, quiet: bool = False, repeats: Repetition | None = None, ranks: Ranks | None = None
) -> RunReport:
    """Resume a run from its newest complete checkpoint, or from the beginning if it has none yet.

    Args:
        path: the run folder.
        quiet: print nothing.
        repeats: see `train`.
        ranks: see `train`.

    Raises:
        RunFolderError: the path is no run folder, the run is finished, or another process trains it.
        ValueError, RuntimeError: as `train`.
    """
    with resumed_run(path, quiet=quiet, repeats=repeats, ranks=ranks) as started:
        run(started.config, started.controller, started.checkpoint)
    assert started.report is not None
    return started.report


def reached(
    operations: int, seconds: float, *, num_ranks: int, device: torch.device, dtype: str
) -> dict[str, float]:
    """Compute throughput metrics of a batch; `time/mfu` only where the device's peak FLOP/s is known.

    Args:
        operations: floating-point operations of policy and critic, forward and backward, over all ranks.
        seconds: wall time from the scored batch to the new weights.
        num_ranks: number of ranks, each with the same device.
        device: of this rank.
        dtype: of the matrix products' operands, such as "bfloat16".
    """
    each = operations / num_ranks
    found = {"time/tflops_per_rank": each / seconds / 1e12}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_flops(name, dtype)
    if peak is not None:
        found["time/mfu"] = utilization(each, seconds=seconds, peak_flops=peak)
    return found


def run(config: RunConfig, controller: Controller, checkpoint: Path | None) -> None:
    """Run the remaining steps of a run.

    Args:
        config: of the run.
        controller: at the progress of the newest checkpoint, or at the beginning.
        checkpoint: the newest checkpoint; None at the beginning.

    Raises:
        Interrupted: the user asked to stop, or the run is out of time; everything is saved.
        RunStopped: it cannot usefully continue.
        CheckpointError: the reference policy is damaged, or a checkpoint cannot be written.
    """
    progress = controller.progress
    controller.callbacks.on_start(controller.view, checkpoint)
    if config.environment is None:
        try_demonstrations(rewards_of(config), controller)
    if progress.order and controller.ranks.first:
        controller.tidy(progress)
    if progress.stage == "sft" and config.sft is None:
        begin_reinforcement(controller)
    if progress.stage == "sft":
        supervise(config, controller, checkpoint)
        checkpoint = None
        if config.steps:
            begin_reinforcement(controller)
    if progress.stage == "reinforcement":
        reinforce(config, controller, checkpoint)


def try_demonstrations(rewards: Mapping[str, Sequence[RewardConfig]], controller: Controller) -> None:
    """Score the held-out demonstrations: a reward that gives reference answers no marks is broken.

    `rewards` are those of each source; an empty name has those of prompts without one.
    """
    components = controller.components
    shown = [prompt for prompt in components.eval_prompts if isinstance(prompt.demonstration, str)]
    if not shown:
        return
    with controller.spans("score"):
        texts = [reference_completion(prompt, rewards[prompt.source]) for prompt in shown]
        episodes = [
            one_turn(prompt, text)
            for prompt, text in zip(shown, texts, strict=True)
            if components.view_episode is not None
        ]
        with controller.recorded("demonstrations"):
            outcomes = components.reward.score(shown, texts, episodes)
    right = sum(is_right(outcome, components.full_marks) for outcome in outcomes)
    controller.note_demonstrations(len(shown), right)
    mean = sum(outcome.value for outcome in outcomes) / len(shown)
    kinds = {reward.kind for each in rewards.values() for reward in each}
    graded = not kinds.isdisjoint(("function", "judge", "model"))
    if right == len(shown) or (graded and mean > 0):
        earned = "all earn full marks" if right == len(shown) else f"mean reward {mean:.3f}"
        controller.console.say(f"rewards tried on {len(shown)} held-out reference answers: {earned}")
        return
    wrong = next(i for i, outcome in enumerate(outcomes) if not is_right(outcome, components.full_marks))
    why = outcomes[wrong].reason or f"reward {outcomes[wrong].value:g} of {components.full_marks:g}"
    controller.warn(
        f"{len(shown) - right} of {len(shown)} held-out reference answers do not earn full marks "
        f"from this recipe's rewards; the first is {shown[wrong].id}: {why}"
    )


def supervise(config: RunConfig, controller: Controller, checkpoint: Path | None) -> None:
    """Train on demonstrations until the held-out accuracy is reached or all steps are done."""
    progress, components, sft = controller.progress, controller.components, config.sft
    assert sft is not None
    with controller.spans.rest("start"):
        trainer = controller.adopt(components.imitator(progress.version), checkpoint)
        stream = build_stream(config.data, components, progress, seed=config.seed)
        token_weights = build_token_weights(sft.loss_aggregation, config.precision)
    controller.console.stage("SFT", sft.steps, progress.step)
    if progress.step == 0 and not config.steps:
        with controller.spans.rest("start"):
            controller.update_weights()
            result = controller.evaluate()
            controller.keep_answers("before", result)
            progress.eval_before = controller.measured(result)
    while progress.step < sft.steps and not progress.sft_done:
        with controller.spans.rest("bookkeeping"):
            _imitate(config, controller, trainer, stream, token_weights)
            _after_imitation(config, controller)
        controller.leave_if_asked()


def _imitate(
    config: RunConfig,
    controller: Controller,
    trainer: PolicyTrainer,
    stream: PromptFeed,
    token_weights: TokenWeights,
) -> None:
    """Do one optimizer step on demonstrations, and record it."""
    progress, sft, demonstrations = controller.progress, config.sft, controller.components.demonstrations
    assert sft is not None and demonstrations is not None
    with controller.spans("weight_sync"):
        controller.turns.train()
    with controller.spans("train"):
        prompts = stream.next(sft.sequences_per_step)
        spans = [(prompt.token_ids, *demonstrations.tokens(prompt)) for prompt in prompts]
        batch = pack_demonstrations(spans, token_weights)
        trainer.forward_backward(batch)
        controller.callbacks.before_optimizer_step(controller.view, trainer.model, batch)
        report = trainer.optim_step()
    progress.step += 1
    progress.stream, progress.attempts = stream.state(), trainer.num_attempts
    progress.tokens_trained += int(batch.action_mask_T.sum())
    spent = controller.spans.take()
    controller.record(
        "sft",
        {
            "loss": report.metrics["loss"],
            "learning_rate": report.learning_rate,
            "grad_norm": report.grad_norm,
            "time/step_s": spent["train"],
            **{f"time/{name}_s": seconds for name, seconds in spent.items() if name != "train"},
        },
    )
    limit = config.limits.nonfinite_steps
    controller.warn(check_steps(progress, [report], [batch], limit=limit, folder=controller.folder.evidence))


def _after_imitation(config: RunConfig, controller: Controller) -> None:
    """Evaluate, save and report after an optimizer step of SFT, where that is due."""
    progress, sft = controller.progress, config.sft
    assert sft is not None
    last = progress.step == sft.steps
    improved = False
    if last or progress.step % config.evaluation.every == 0:
        controller.update_weights()
        result = controller.evaluate(last=last)
        check_accuracy(controller, sft, result.accuracy, last=last)
        last = last or progress.sft_done
        if not config.steps:
            # If reinforcement follows, the best checkpoint is one of reinforcement.
            improved = controller.note_best(result)
            if last:
                controller.keep_answers("after", result)
                progress.eval_after, progress.sft_steps = controller.measured(result), progress.step
    if improved or last or progress.step % config.checkpoint.every == 0:
        controller.checkpoint()
    controller.report()


def check_accuracy(controller: Controller, sft: SftConfig, accuracy: float, *, last: bool) -> None:
    """Open the gate once accuracy has reached its band, and warn where the band was missed."""
    if sft.stop_accuracy is None:
        return
    low, high = sft.stop_accuracy
    controller.progress.sft_done = accuracy >= low
    if accuracy > high:
        controller.warn(
            f"SFT ended at accuracy {accuracy:.3f}, above {high} of sft.stop_accuracy; evaluate more often "
            "(evaluation.every) or lower sft.learning_rate"
        )
    if last and accuracy < low:
        controller.warn(
            f"SFT ended at accuracy {accuracy:.3f}, below {low} of sft.stop_accuracy, after {sft.steps} "
            "steps; raise sft.steps"
        )


def begin_reinforcement(controller: Controller) -> None:
    """Set up batch 0: a new optimizer, the baseline evaluation, and the first checkpoint."""
    progress, components = controller.progress, controller.components
    progress.version = controller.trainer.version if controller.trainer else 0
    progress.sft_steps = progress.step
    progress.stage, progress.step, progress.attempts = "reinforcement", 0, 0
    progress.stream, progress.nonfinite_in_row = {}, 0
    with controller.spans.rest("start"):
        controller.adopt(components.reinforcer(progress.version, None, None), None)
        controller.update_weights()
        result = controller.evaluate()
        controller.keep_answers("before", result)
        progress.eval_before = controller.measured(result)
        controller.note_best(result)
        controller.checkpoint()
        controller.report()
    controller.leave_if_asked()


def reinforce(config: RunConfig, controller: Controller, checkpoint: Path | None) -> None:
    """Train on batches of reinforcement, each as soon as its samples are complete."""
    progress = controller.progress
    with controller.spans.rest("start"):
        train_step = controller.build_train_step(checkpoint)
    controller.console.stage("reinforcement", config.steps, progress.step)
    with controller.spans.rest("start"):
        waiting = build_source(config, controller)
    with waiting as source:
        with controller.spans.rest("start"):
            source.begin(checkpoint, train_step.trainer.version)
            controller.callbacks.after_weight_update(controller.view, train_step.trainer.version)
        # The first weight update serves all batches, so it counts as start-up.
        controller.spans.rename("weight_sync", "start")
        controller.memory.take()
        while progress.step < config.steps:
            with controller.spans.rest("bookkeeping"):
                _reinforce_once(config, controller, train_step, source)
            controller.leave_if_asked(source)


def _reinforce_once(
    config: RunConfig, controller: Controller, train_step: TrainStep, source: BatchSource
) -> None:
    """Train on one batch and record it; evaluate, save and report where that is due."""
    progress = controller.progress
    profile = profiled(progress.step + 1, config.profile_steps, controller.folder.profile)
    with profile, controller.spans.rest("bookkeeping"):
        policy_moves = config.critic is None or progress.step >= config.critic.warmup_steps
        result, metrics = _one_batch(
            controller, train_step, source, seed=config.seed, policy_moves=policy_moves
        )
    progress.step += 1
    _account(config, controller, train_step, result, metrics)
    _check_health(config, controller, result)
    for sentence in source.warnings():
        controller.warn(sentence)
    last, improved = progress.step == config.steps, False
    if last or progress.step % config.evaluation.every == 0:
        evaluation = controller.evaluate(last=last)
        improved = controller.note_best(evaluation)
        if last:
            controller.keep_answers("after", evaluation)
            progress.eval_after = controller.measured(evaluation)
    if improved or last or progress.step % config.checkpoint.every == 0:
        controller.checkpoint(source)
    controller.report()


def _one_batch(
    controller: Controller, train_step: TrainStep, source: BatchSource, *, seed: int, policy_moves: bool
) -> tuple[BatchResult, dict[str, float]]:
    """Sample, train and update the weights; return the batch's result and its rollout metrics."""
    spans, step = controller.spans, controller.progress.step
    with spans("weight_sync"):
        controller.turns.sample()
    with spans.rest("rollout_manager"):
        sampled, metrics = source.next_batch()
    controller.callbacks.after_batch(controller.view, sampled.groups)
    with spans("weight_sync"):
        controller.turns.train()
    with spans("train"):
        environments = controller.components.environments
        result = train_on(
            train_step,
            sampled,
            seed=seed,
            step=step + 1,
            policy_moves=policy_moves,
            transcript=None if environments is None else environments.transcript,
        )
    with spans.rest("rollout_manager"):
        source.update_weights(train_step.trainer.version)
    controller.callbacks.after_weight_update(controller.view, train_step.trainer.version)
    return result, metrics


def _account(
    config: RunConfig,
    controller: Controller,
    train_step: TrainStep,
    result: BatchResult,
    metrics: dict[str, float],
) -> None:
    """Count and record one batch.

    Args:
        config: of the run.
        controller: of the run.
        train_step: what was trained.
        result: of the training step.
        metrics: rollout metrics of the batch.
    """
    progress, spans = controller.progress, controller.spans
    progress.attempts = train_step.trainer.num_attempts
    progress.tokens_sampled += result.tokens_sampled
    progress.tokens_trained += result.tokens_trained
    with spans("other"):
        write_table(controller.folder.rollouts / f"step-{progress.step:06d}.parquet", result.rows)
    spent = spans.take()
    parts = dict.fromkeys(("sample", "score", "train", "weight_sync", "other"), 0.0)
    total = sum(spent.get(part, 0.0) for part in (*parts, "environment"))
    # Time between two batches, such as for a checkpoint, is recorded beside them and counts for neither.
    times = {f"time/{part}_s": seconds for part, seconds in (parts | spent).items()}
    speed = {"time/step_s": total, "time/tokens_per_s": result.tokens_sampled / total if total else 0.0}
    if train_step.shape is not None:
        dtype, device = config.mesh.compute_dtype or config.precision, train_step.trainer.model.device
        num_ranks = controller.ranks.size
        speed |= reached(result.operations, spent["train"], num_ranks=num_ranks, device=device, dtype=dtype)
    peaks = fullest(controller.ranks, controller.memory.take())
    version = {"version": train_step.trainer.version}
    metrics |= controller.components.transport.metrics
    controller.warn(check_imports(metrics))
    controller.record("reinforcement", version | result.record | metrics | times | speed | peaks)


def _check_health(config: RunConfig, controller: Controller, result: BatchResult) -> None:
    """Run the health checks on one batch.

    Raises:
        RunStopped: too many rewards failed, too many steps had no finite gradient, or the sampler does not
            sample from the policy.
    """
    progress, limits = controller.progress, config.limits
    reason = next((row["reason"] for row in result.rows if row["outcome"] == "failed"), "")
    kind, limit = config.advantage.kind, limits.failed_rewards
    controller.warn(check_rewards(progress, result.record, kind=kind, limit=limit, reason=reason))
    limit = limits.nonfinite_steps
    folder = controller.folder.evidence
    controller.warn(check_steps(progress, result.reports, result.skipped, limit=limit, folder=folder))
    for sentence in check_mismatch(
        result.record,
        result.batch,
        k3=limits.mismatch_k3,
        ess=limits.ess,
        correction_clip_fraction=limits.correction_clip_fraction,
        folder=folder,
    ):
        controller.warn(sentence)
    most = limits.mismatch or rounding(
        config.precision, config.mesh.compute_dtype, config.rollout.temperature
    )
    controller.warn(
        check_current(
            result.record,
            result.compared,
            warning=limits.mismatch_warning or most / 4,
            # Off-policy training does not depend on it: older tokens are corrected, or reported as stale.
            limit=math.inf if config.rollout.max_staleness else most,
            folder=folder,
        )
    )
