"""Health checks: warn about, or stop, a run that goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from millrace.config.method_sections import COMPARING
from millrace.data.batch import Batch
from millrace.inference.kv_blocks import MIN_IMPORTED
from millrace.observability.measure import measure_words
from millrace.protocols import StepReport
from millrace.run.evaluation import Evaluation
from millrace.run.progress import Progress
from millrace.run.train_step import Compared

# Batches in a row without gradient from rewards, before a warning.
EQUAL_BATCHES = 20
# A policy has collapsed when it has lost this fraction of its best value, or of its gain.
COLLAPSED_SHARE = 0.5
# Smaller values are noise.
LEAST_BEST = 0.1
# Advice where trainer and sampler diverge, by the limit that was exceeded.
_FAR = (
    "The policy goes far while a token waits: lower policy.optimizer.learning_rate or rollout.max_staleness"
)
ADVICE = {
    "mismatch_k3": "Compare mismatch/fresh_max: where that is large the sampler computes with other weights "
    "or other arithmetic, else its tokens are too old",
    "ess": f"{_FAR}, or raise policy.optimizer_steps_per_batch",
    "correction_clip_fraction": f"{_FAR}, or widen the bounds of policy.correction",
}


class RunStopped(RuntimeError):
    """The run cannot usefully go on; the message has the reason and the fix."""


def check_failures(fraction: float, *, limit: float, reason: str, of: str) -> None:
    """Stop where so many rewards failed that the others are not representative.

    Args:
        fraction: fraction of the rewards that failed.
        limit: largest allowed fraction; 1 is never allowed.
        reason: of one of the failures, if any.
        of: names the scored completions in the message.

    Raises:
        RunStopped: more than `limit` failed, or all.
    """
    if fraction > limit or fraction == 1:
        raise RunStopped(
            f"{fraction:.0%} of the rewards of {of} failed, more than limits.failed_rewards = {limit:.0%}; "
            f"the first: {reason}"
        )


def check_evaluation(result: Evaluation, *, limit: float, of: str = "the held-out answers") -> None:
    """Stop where too many rewards of held-out answers failed for the others to be representative.

    Raises:
        RunStopped: more than `limit` of the rewards failed, or all.
    """
    reason = next((row["reason"] for row in result.rows if row["outcome"] == "failed"), "")
    check_failures(result.failed, limit=limit, reason=reason, of=of)


def check_rewards(
    progress: Progress, record: dict[str, float], *, kind: str, limit: float, reason: str
) -> str | None:
    """Warn if rewards have given no gradient for many batches in a row.

    An advantage that compares the samples of a prompt has no gradient where those of each prompt earn the
    same reward; any other, where all samples of the batch do. A teacher ignores rewards.

    Args:
        progress: counts batches with equal rewards.
        record: metrics of the batch just scored.
        kind: of advantage.
        limit: largest allowed fraction of failed rewards in a batch.
        reason: of one of the failures, if any.

    Raises:
        RunStopped: more than `limit` of the batch's rewards failed.
    """
    check_failures(record["reward/failed_fraction"], limit=limit, reason=reason, of="this batch")
    everywhere = record["reward/std"] == 0 and kind != "teacher"
    equal = everywhere or (kind in COMPARING and record["group/zero_std_fraction"] == 1)
    progress.equal_in_row = progress.equal_in_row + 1 if equal else 0
    if progress.equal_in_row != EQUAL_BATCHES:
        return None
    what = f"all rewards have been {record['reward/mean']:g}"
    if not everywhere:
        what = "the rewards of each prompt's samples have all been equal"
    return (
        f"{what} for {EQUAL_BATCHES} batches, so nothing is learned; look at the rollouts, and at the reward"
    )


def check_steps(
    progress: Progress, reports: list[StepReport], batches: list[Batch], *, limit: int, folder: Path
) -> str | None:
    """Warn if an optimizer step was skipped; keep its batch under `folder` as evidence.

    Args:
        progress: counts skipped steps.
        reports: of the last optimizer steps.
        batches: of the skipped steps, in order.
        limit: steps in a row without a finite gradient before the run stops.
        folder: of evidence.

    Raises:
        RunStopped: `limit` steps in a row had no finite gradient.
    """
    told = None
    left = iter(batches)
    for number, report in enumerate(reports, start=1):
        progress.nonfinite_in_row = progress.nonfinite_in_row + 1 if report.skipped else 0
        progress.skipped_steps += report.skipped
        if not report.skipped:
            continue
        attempt = progress.attempts - len(reports) + number
        path = folder / f"{progress.checkpoint_name}-attempt-{attempt:06d}"
        _keep_evidence(path, next(left), {"grad_norm": report.grad_norm, **report.metrics})
        told = (
            "the gradient was not finite, so an optimizer step was skipped; its batch is in "
            f"{path}.safetensors"
        )
        if progress.nonfinite_in_row >= limit:
            raise RunStopped(
                f"{limit} optimizer steps in a row had no finite gradient (limits.nonfinite_steps); the "
                f"batches are in {folder}. Lower policy.optimizer.learning_rate or sft.learning_rate, or "
                "look for rewards that are not finite"
            )
    return told


def check_mismatch(
    record: dict[str, float],
    batch: Batch | None,
    *,
    k3: float | None,
    ess: float | None,
    correction_clip_fraction: float | None,
    folder: Path,
) -> list[str]:
    """Warn about each exceeded limit on the trainer-sampler mismatch; keep the first such batch.

    Args:
        record: metrics of the batch just trained on.
        batch: the same batch, packed.
        k3: largest allowed `mismatch/k3`; None for no limit.
        ess: least allowed `mismatch/ess`; None for no limit.
        correction_clip_fraction: largest allowed `policy/correction_clip_fraction`; None for no limit.
        folder: of evidence, with a file for each limit.
    """
    told = []
    for metric, setting, limit, how in (
        ("mismatch/k3", "mismatch_k3", k3, "passed"),
        ("mismatch/ess", "ess", ess, "fallen below"),
        ("policy/correction_clip_fraction", "correction_clip_fraction", correction_clip_fraction, "passed"),
    ):
        found = record.get(metric)
        if limit is None or found is None or batch is None:
            continue
        within = found >= limit if how == "fallen below" else found <= limit
        if within:
            continue
        path = folder / setting
        if not path.with_suffix(".json").exists():
            numbers = {name: record[name] for name in record if name.startswith("mismatch/")}
            _keep_evidence(path, batch, numbers | {metric: found})
        told.append(
            f"trainer and sampler have come apart: {metric} has {how} limits.{setting} = {limit:g}; the "
            f"first batch is in {path}.safetensors. {ADVICE[setting]}"
        )
    return told


def check_imports(metrics: Mapping[str, float]) -> str | None:
    """Warn if prefill workers compute prompts whose keys and values decode workers then lack.

    Args:
        metrics: of the batch; those of engines with workers have `engine/imported_fraction`.
    """
    if metrics.get("engine/imported_fraction", 1.0) >= MIN_IMPORTED:
        return None
    return (
        "decode workers import too few of the keys and values that prefill workers compute, so prompts are "
        "computed twice (engine/imported_fraction, engine/blocks_refused, engine/workers_lost); where that "
        "lasts, remove engine.disaggregation"
    )


def check_current(
    record: dict[str, float],
    compared: Compared | None,
    *,
    warning: float,
    limit: float,
    folder: Path,
) -> str | None:
    """Warn where sampler and trainer differ by more than rounding on tokens of the same policy version.

    Args:
        record: metrics of the batch just trained on.
        compared: the tokens whose log-probabilities were compared.
        warning: largest `mismatch/current` without a warning.
        limit: largest `mismatch/current` before the run stops.
        folder: of evidence; keeps the first such batch.

    Raises:
        RunStopped: `mismatch/current` is above `limit`.
    """
    found = record.get("mismatch/current")
    # A value that is not finite makes the gradient not finite, which has a check of its own.
    if found is None or compared is None or not math.isfinite(found) or found <= min(warning, limit):
        return None
    path = folder / "mismatch"
    if not path.with_suffix(".json").exists():
        numbers = {name: record[name] for name in record if name.startswith("mismatch/")}
        _keep_evidence(path, compared.batch, numbers, trainer_logprob_N=compared.trainer_logprob_N)
    stops = found > limit
    setting, most = ("mismatch", limit) if stops else ("mismatch_warning", warning)
    told = (
        f"the sampler does not sample from the trainer's policy: their log-probabilities of "
        f"{compared.num_current} tokens that the current weights sampled differ by {found:.2g} nats in the "
        f"mean (mismatch/current), and limits.{setting} is {most:.2g}; the batch is in {path}.safetensors. "
        "Run millrace doctor --numerics RECIPE, which names what differs"
    )
    if stops:
        raise RunStopped(f"{told}, or raise limits.mismatch where the sampler differs on purpose")
    return told


def check_collapse(progress: Progress, measure: str, value: float) -> str | None:
    """Warn if the policy has collapsed since its best evaluation.

    That is, if it has lost more than half of the best value or of its gain since the start, whichever is
    larger: a metric may start below 0.

    Args:
        progress: has the first value and the best.
        measure: name of the metric.
        value: at this evaluation.
    """
    best, first = progress.eval_best, progress.eval_before
    if best is None:
        return None
    had = max(best, best - (best if first is None else first))
    if had < LEAST_BEST or value >= best - COLLAPSED_SHARE * had:
        return None
    return (
        f"the policy has collapsed: {measure_words(measure)} is {value:.3f}, its best was {best:.3f} "
        f"({progress.best_checkpoint}); lower policy.optimizer.learning_rate or sample more per batch"
    )


def _keep_evidence(path: Path, batch: Batch, numbers: dict[str, float], **more: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = (
        "token_T",
        "segment_T",
        "action_mask_T",
        "sampler_logprob_T",
        "version_T",
        "advantage_T",
        "weight_T",
    )
    # Clones, because a safetensors file rejects tensors that share memory.
    kept = {name: getattr(batch, name) for name in names} | more
    save_file({name: value.clone() for name, value in kept.items()}, path.with_suffix(".safetensors"))
    told = {key: str(value) for key, value in numbers.items()}
    path.with_suffix(".json").write_text(json.dumps(told, indent=1), encoding="utf-8")
