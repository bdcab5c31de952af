"""What staleness does to learning: a reduced quickstart at several bounds, corrected for it and not.

    python benchmarks/async_quickstart.py                          # everything, about half an hour
    python benchmarks/async_quickstart.py --seeds 1 --staleness 0 4
    python benchmarks/async_quickstart.py --ablation               # AReaL's arms alone, a third of an hour
    python benchmarks/async_quickstart.py --quick                  # two batches of three runs, writes nothing

All runs start from the weights of one SFT run, that of `method.py`, at about half of the held-out
sums, and train on the same number of batches, one run at a time: sampling and training have a core each.

- `plain`: the ratio is taken to the sampler's log-probabilities, and clipped, as in the quickstart.
- `decoupled`: the ratio is taken to the trainer's own log-probabilities, and their truncated weight over the
  sampler's multiplies the loss (`policy.proximal=recompute policy.correction={}`).

At staleness 4 also:

- `keys kept`: running answers keep the keys and values of the old weights (`rollout.kv_on_update=keep`).
- `on Ray`: trainer and engine are Ray actors (`mesh.launcher=ray`).
- `faster`: three times the learning rate.

With `--ablation` these run instead, as AReaL ran them: four minibatches, returns whitened over the batch
without a group's mean, clip 0.2, betas 0.9 and 0.95, decay 0.05.

- `naive`: the ratio is taken to the sampler's log-probabilities.
- `decoupled, no cap`: it is taken to the trainer's, and their weight over the sampler's is not truncated.

Hypothesis, written down before the runs (docs/async.md has it for a perceptron): at staleness 4 decoupled
ends above naive, since more than 5 % of naive's tokens are clipped and the effective sample share of
decoupled's weights is above 0.7; at 16 it ends below naive, since that share is below 0.6.

A run that was stopped goes on where it was. The figures of the ablation go to
benchmarks/results/async_quickstart_ablation.json, those of the others to
benchmarks/results/async_quickstart.json, the picture to docs/pictures/async.svg; all when every bound has
run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from methods import QUICK, QUICK_WARM, REDUCED, ROOT, machine, millrace, warm_up, words_of

from millrace.observability.charts import Series, curve_svg
from millrace.observability.files import read_json_lines

WARM = ROOT / "runs" / "methods"
BOUNDS = (0, 1, 2, 4, 8)
RATE = 3e-4
DECOUPLED = {"policy.proximal": "recompute", "policy.correction": {}}
KEPT, ON_RAY = {"rollout.kv_on_update": "keep"}, {"mesh.launcher": "ray"}
FASTER = {"policy.optimizer.learning_rate": 3 * RATE}
# What a kind changes of the recipe; those behind the first two run at one bound alone.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoupled": DECOUPLED,
    "plain, keys kept": KEPT,
    "decoupled, keys kept": DECOUPLED | KEPT,
    "plain, on Ray": ON_RAY,
    "plain, on Ray, keys kept": ON_RAY | KEPT,
    "plain, faster": FASTER,
    "decoupled, faster": DECOUPLED | FASTER,
}
# As AReaL: `async_ablation.py` has the same arms on a smaller task.
AREAL: dict[str, Any] = {
    "policy.optimizer_steps_per_batch": 4,
    "policy.optimizer.betas": [0.9, 0.95],
    "policy.optimizer.weight_decay": 0.05,
    "policy.loss.clip_low": 0.2,
    "policy.loss.clip_high": 0.2,
    "advantage": {"kind": "reinforce_plus_plus"},
}
UNCAPPED = {"policy.proximal": "recompute", "policy.correction": {"high": 1e9}}
ABLATION: dict[str, dict[str, Any]] = {"naive": AREAL, "decoupled, no cap": AREAL | UNCAPPED}
ABLATION_BOUNDS = (0, 4, 16)
EVERYWHERE, ELSE_AT = ("plain", "decoupled"), 4
FIGURES = ("before", "after", "staleness_mean", "staleness_max", "mismatch_k3", "clip", "ess", "seconds")


@dataclass(frozen=True)
class Run:
    """One kind at one bound with one seed."""

    kind: str
    staleness: int
    seed: int
    work: Path

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.work / f"{self.kind.replace(', ', '-').replace(' ', '-')}-{self.staleness}-{self.seed}"

    def work_through(self, start: Path, changes: Mapping[str, Any]) -> dict[str, float]:
        """Run it, or what is left of it; its figures."""
        summary = self.folder / "summary.json"
        if not summary.is_file() or json.loads(summary.read_text(encoding="utf-8"))["status"] != "finished":
            if (self.folder / "recipe.yaml").is_file():
                millrace("resume", str(self.folder))
            else:
                millrace("train", "quickstart", *self._words(start, changes))
        return figures(self.folder)

    def _words(self, start: Path, changes: Mapping[str, Any]) -> list[str]:
        given = REDUCED | {"policy.optimizer.learning_rate": RATE, "policy.optimizer.warmup_steps": 20}
        given |= {**changes, "model.path": str(start), "seed": self.seed} | (KINDS | ABLATION)[self.kind]
        given |= {"output": str(self.work), "name": self.folder.name, "rollout.max_staleness": self.staleness}
        return words_of(given)


def figures(run: Path) -> dict[str, float]:
    """What a run came to."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    batches = [one for one in read_json_lines(run / "metrics.jsonl") if one["stage"] == "reinforcement"]

    def mean(name: str) -> float:
        return statistics.fmean(one[name] for one in batches if name in one)

    return {
        "before": summary["eval_before"],
        "after": summary["eval_after"],
        "staleness_mean": statistics.fmean(one.get("staleness/mean", 0.0) for one in batches),
        "staleness_max": max(one.get("staleness/max", 0) for one in batches),
        "mismatch_k3": mean("mismatch/k3"),
        # Tokens outside the clip, over the optimizer steps of a batch; and the share before the first one.
        "clip": mean("policy/clip_fraction"),
        "ess": mean("mismatch/ess"),
        # Between the first batch and the last one: an evaluation before and after is no part of it.
        "seconds": batches[-1]["time/wall_s"] - batches[0]["time/wall_s"],
    }


def wanted(seeds: int, bounds: list[int], work: Path) -> list[Run]:
    """All runs, the seeds of one place after another."""
    return [
        Run(kind, bound, seed, work)
        for seed in range(seeds)
        for kind in KINDS
        for bound in bounds
        if bound == ELSE_AT or kind in EVERYWHERE
    ]


def of_ablation(seeds: int, work: Path) -> list[Run]:
    """The runs of the ablation, one seed after another; without staleness both kinds are one."""
    return [
        Run(kind, bound, seed, work)
        for seed in range(seeds)
        for bound in ABLATION_BOUNDS
        for kind in ABLATION
        if bound or kind == "naive"
    ]


def rows(found: dict[Run, dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each kind and bound: each figure of all its seeds."""
    places = dict.fromkeys((run.kind, run.staleness) for run in found)
    return [
        {"kind": kind, "staleness": bound}
        | {
            name: [one[name] for run, one in found.items() if (run.kind, run.staleness) == (kind, bound)]
            for name in FIGURES
        }
        for kind, bound in places
    ]


def table(told: list[dict[str, Any]]) -> str:
    """The table of the page, means over the seeds; the greatest staleness is of all."""
    lines = [
        "| run | bound | right before | right after (each seed) | staleness (most) | mismatch k3 | clipped | "
        "ess | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in told:
        mean = {name: statistics.fmean(row[name]) for name in FIGURES}
        after = ", ".join(f"{value:.3f}" for value in row["after"])
        lines.append(
            f"| {row['kind']} | {row['staleness']} | {mean['before']:.3f} | {mean['after']:.3f} ({after}) | "
            f"{mean['staleness_mean']:.2f} ({max(row['staleness_max']):.0f}) | {mean['mismatch_k3']:.1e} | "
            f"{mean['clip']:.3f} | {mean['ess']:.2f} | "
            f"{mean['seconds']:.0f} |"
        )
    return "\n".join(lines)


def picture(told: list[dict[str, Any]]) -> str:
    """Accuracy at the end against the bound, with and without the correction."""
    curves = [
        Series(
            kind,
            [(row["staleness"], statistics.fmean(row["after"])) for row in told if row["kind"] == kind],
            colour=colour,
            marked=True,
        )
        for colour, kind in enumerate(EVERYWHERE, start=1)
    ]
    # Where all began, so that the axis does not make much of little.
    before = statistics.fmean(value for row in told for value in row["before"])
    curves.append(Series("before", [(min(BOUNDS), before), (max(BOUNDS), before)], colour=7))
    return curve_svg(
        curves,
        title="The quickstart, reduced: what staleness does to learning",
        x_label="rollout.max_staleness",
        y_label="right answers to held-out sums at the end",
        width=640,
        height=300,
        standalone=True,
    )


def quick() -> None:
    """One run synchronous and one ahead and corrected, in a folder that goes; print the table."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        start = warm_up(work, QUICK_WARM)
        runs = [Run("plain", 0, 0, work), Run("decoupled", 2, 0, work), Run("decoupled, no cap", 2, 0, work)]
        print(table(rows({run: run.work_through(start, QUICK) for run in runs})))


def main() -> None:
    """Run what is missing, then print the table and write figures and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind and bound")
    parser.add_argument("--staleness", type=int, nargs="+", default=list(BOUNDS), help="bounds to run")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "async", help="folder of the runs")
    parser.add_argument("--ablation", action="store_true", help="AReaL's arms instead of the others")
    parser.add_argument(
        "--quick", action="store_true", help="some batches at staleness 0 and 2; nothing is written"
    )
    given = parser.parse_args()
    if given.quick:
        quick()
        return
    given.work.mkdir(parents=True, exist_ok=True)
    start = warm_up(WARM)
    runs = wanted(given.seeds, given.staleness, given.work)
    if given.ablation:
        runs = of_ablation(given.seeds, given.work)
    found: dict[Run, dict[str, float]] = {}
    for run in runs:
        found[run] = run.work_through(start, {})
        told = ", ".join(f"{name} {value:.3g}" for name, value in found[run].items())
        print(f"{run.kind}, staleness {run.staleness}, seed {run.seed}: {told}", flush=True)
    told = rows(found)
    print(table(told))
    if set(given.staleness) != set(BOUNDS):
        return
    name = "async_quickstart_ablation" if given.ablation else "async_quickstart"
    written = {
        "benchmark": name,
        **machine(),
        "batches": REDUCED["steps"],
        "learning_rate": RATE,
        "seeds": given.seeds,
        "rows": told,
    }
    result = ROOT / "benchmarks" / "results" / f"{name}.json"
    result.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if given.ablation:
        return
    (ROOT / "docs" / "pictures" / "async.svg").write_text(picture(told), encoding="utf-8")


if __name__ == "__main__":
    main()
