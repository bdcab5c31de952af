"""Every method with three seeds on a reduced quickstart, one table and one picture.

    python benchmarks/methods.py                    # about 30 s a run, two runs at once on two cores
    python benchmarks/methods.py --only ppo grpo    # some of them; what is finished is not run again
    python benchmarks/methods.py --quick            # two batches of one method, writes nothing

One supervised SFT is shared: every run starts from the same weights, at about half of the held-out sums,
and has the same number of batches of 128 prompts. A run that was stopped goes on where it was; when all are
done, the table goes to docs/algorithms/results.md, the pictures to docs/algorithms/pictures and the figures
to benchmarks/results/methods.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.record import processor

from millrace.config.recipe import load_recipe, recipe_names
from millrace.observability.charts import Series, curve_svg
from millrace.observability.files import read_json_lines

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "algorithms"
# Recipes that are tasks, and the quickstart's own method, whose curve is the quickstart's.
PLAIN = ("quickstart", "gsm8k_smoke", "supervised", "grpo_token_mean")
TEACHER = "grpo"  # distillation learns from the best checkpoint of its first seed
BATCHES = 60
REDUCED = {
    "threads": 1,
    "loggers": [],
    "sft": None,
    "steps": BATCHES,
    "rollout.prompts_per_step": 128,
    "data.eval_size": 512,
    "evaluation.every": 5,
    "checkpoint.every": 20,
    "policy.optimizer.learning_rate": 1e-3,
    "policy.optimizer.warmup_steps": 5,
}
# What this task changes in methods whose settings are for pretrained models, long answers and large batches.
HERE: Mapping[str, Mapping[str, Any]] = {
    "clip_cov": {"policy.loss.fraction": 2e-3},
    "distillation": {"rollout.samples_per_prompt": 4},
    "gmpo": {"policy.loss.clip_low": 0.3, "policy.loss.clip_high": 0.3},
    "gspo": {"policy.loss.clip_low": 0.2, "policy.loss.clip_high": 0.28},
    "kl_cov": {"policy.loss.coefficient": 0.5},
    "ppo": {"rollout.samples_per_prompt": 4, "critic.learning_rate": 2e-3},
    "remax": {"rollout.samples_per_prompt": 4},
    "sapo": {"policy.loss.negative": 1.1},
    "vapo": {
        "rollout.samples_per_prompt": 4,
        "critic.learning_rate": 2e-3,
        "advantage.length_adaptive": 3.0,
    },
}
# Of a quick run: what it changes of a run, and of SFT. Weights that have learned nothing earn this
# reward about every other time, so that there is something to train on.
QUICK = {
    "steps": 2,
    "rollout.prompts_per_step": 4,
    "data.eval_size": 8,
    "data.task_size": 64,
    "rewards": [{"kind": "format", "pattern": ".*[0-4].*"}],
}
QUICK_WARM = {"sft.steps": 2, "sft.stop_accuracy": None, **QUICK}


@dataclass(frozen=True)
class Run:
    """One method with one seed."""

    recipe: str
    seed: int
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What it came to; empty before it has ended."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.summary.get("status") == "finished"

    def curve(self) -> list[tuple[float, float]]:
        """Batch and held-out accuracy."""
        records = read_json_lines(self.folder / "metrics.jsonl")
        return [(one["step"], one["accuracy"]) for one in records if one["stage"] == "evaluation"]


def methods() -> list[str]:
    """The recipes that are methods, without the presets; the teacher first."""
    names = [name for name in recipe_names() if name not in PLAIN and "@" not in name]
    return sorted(names, key=lambda name: (name != TEACHER, name == "distillation", name))


def millrace(*words: str) -> None:
    """One command of millrace, silent unless it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("millrace")), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Settings for the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def warm_up(work: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """The weights every run starts from."""
    folder = work / "sft"
    checkpoint = folder / "checkpoints" / "step-000000"
    if not checkpoint.is_dir():
        if folder.exists():
            millrace("resume", str(folder))
        else:
            given = {"steps": 1, "threads": 1, "name": "sft", "output": str(work), **changes}
            millrace("train", "quickstart", *words_of(given))
    return checkpoint / "model"


def work_through(
    run: Run, start: Path, teacher: Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> Run:
    """Run it, or what is left of it."""
    if run.finished:
        return run
    began = time.monotonic()
    if (run.folder / "recipe.yaml").is_file():
        millrace("resume", str(run.folder))
    else:
        given = REDUCED | {"base": run.recipe, **HERE.get(run.recipe, {}), "model.path": str(start)}
        given |= {"seed": run.seed, "name": run.folder.name, "output": str(run.folder.parent)}
        if run.recipe == "distillation":
            given["advantage.path"] = str(teacher)
        millrace("train", "quickstart", *words_of(given | changes))
    took_s = time.monotonic() - began
    print(f"{run.recipe:22} seed {run.seed}: {run.summary['eval_after']:.3f} in {took_s:.0f} s", flush=True)
    return run


def rows(runs: list[Run]) -> Iterator[dict[str, Any]]:
    """One row of the table for each recipe, over its seeds."""
    for recipe in dict.fromkeys(run.recipe for run in runs):
        own = [run.summary for run in runs if run.recipe == recipe]
        teacher = {"advantage.path": TEACHER} if recipe == "distillation" else {}
        config = load_recipe("quickstart", {"base": recipe, **teacher, **HERE.get(recipe, {})})
        yield {
            "recipe": recipe,
            "before": [one["eval_before"] for one in own],
            "after": [one["eval_after"] for one in own],
            "batches": own[0]["steps"],
            "optimizer_steps": own[0]["steps"] * config.policy.optimizer_steps_per_batch,
            "samples": own[0]["steps"]
            * REDUCED["rollout.prompts_per_step"]
            * config.rollout.samples_per_prompt,
            "seconds": [one["wall_s"] for one in own],
            "skipped_steps": sum(one["skipped_steps"] for one in own),
        }


def table(found: list[dict[str, Any]], facts: dict[str, str]) -> str:
    """The page of results."""
    lines = [
        "# Results of all methods on one task",
        "",
        "Two-digit addition (the quickstart, reduced): held-out accuracy before and after, three seeds, all",
        "from the same SFT. Made by `python benchmarks/methods.py` on",
        f"{facts['cpu']}, torch {facts['torch']}, {facts['date']}; two runs at once, one thread each.",
        "A task this small shows whether a method works here, not which one is better for yours. Seconds are",
        "wall time on a shared machine; samples exclude those of dynamic sampling and greedy baselines.",
        "",
        "![Held-out accuracy of all methods](pictures/all.svg)",
        "",
        "| recipe | before | after (three seeds) | mean | batches | optimizer steps | samples | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: -statistics.mean(row["after"])):
        after = ", ".join(f"{value:.3f}" for value in row["after"])
        lines.append(
            f"| [{row['recipe']}]({row['recipe']}.md) | {statistics.mean(row['before']):.3f} | {after} | "
            f"{statistics.mean(row['after']):.3f} | {row['batches']} | {row['optimizer_steps']} | "
            f"{row['samples']} | {statistics.median(row['seconds']):.0f} |"
        )
    return "\n".join(lines) + "\n"


def mean_curve(runs: list[Run]) -> list[tuple[float, float]]:
    """The mean over seeds at each evaluation."""
    curves = [run.curve() for run in runs]
    return [
        (points[0][0], statistics.mean(accuracy for _, accuracy in points))
        for points in zip(*curves, strict=True)
    ]


def draw(runs: list[Run]) -> None:
    """One picture of all methods, and one for each with its seeds."""
    folder = PAGES / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    of = {recipe: [run for run in runs if run.recipe == recipe] for recipe in {run.recipe for run in runs}}
    best = sorted(of, key=lambda recipe: -mean_curve(of[recipe])[-1][1])
    small_multiples({recipe: of[recipe] for recipe in best}, folder / "all.svg")
    for recipe, own in of.items():
        picture = curve_svg(
            [Series(f"seed {run.seed}", run.curve()) for run in own],
            title=f"{recipe}: held-out accuracy",
            x_label="batches",
            y_label="share of right answers",
            y_range=(0.0, 1.0),
            width=640,
            height=280,
            standalone=True,
        )
        (folder / f"{recipe}.svg").write_text(picture, encoding="utf-8")


def small_multiples(of: dict[str, list[Run]], path: Path) -> None:
    """A panel for each method: its seeds, and the mean of every other method behind them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "millrace", "font.size": 8}
    from matplotlib import pyplot

    columns = 5
    figure, panels = pyplot.subplots(
        -(-len(of) // columns), columns, figsize=(11, 9), sharex=True, sharey=True, layout="constrained"
    )
    means = {recipe: mean_curve(own) for recipe, own in of.items()}
    for panel, (recipe, own) in zip(panels.flat, of.items(), strict=False):
        for points in means.values():
            panel.plot(*zip(*points, strict=True), color="0.88", linewidth=0.6)
        for run in own:
            panel.plot(*zip(*run.curve(), strict=True), color="#0b6e99", linewidth=1.1)
        panel.set_title(f"{recipe}  {means[recipe][-1][1]:.3f}", fontsize=9)
        panel.grid(color="0.93", linewidth=0.5)
    for panel in panels.flat[len(of) :]:
        panel.set_axis_off()
    figure.supxlabel("batches")
    figure.supylabel("share of right answers on held-out sums")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def machine() -> dict[str, str]:
    """Where and with what this ran."""
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} cores of {processor()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "millrace-rl")},
        "date": date.today().isoformat(),
    }


def quick() -> None:
    """Warm-up and teacher in small, in a folder that goes; print the rows of the table and draw nothing."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run = Run(TEACHER, 0, work / f"{TEACHER}-0")
        work_through(run, warm_up(work, QUICK_WARM), run.folder, QUICK)
        print(table(list(rows([run])), machine()).splitlines()[-1])


def main() -> None:
    """Run what is missing, then write table and pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=None, help="recipes to run; the pages need all of them")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each recipe")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "methods", help="folder of the runs")
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)), help="runs at once")
    parser.add_argument("--quick", action="store_true", help="two batches of one method; nothing is written")
    words = parser.parse_args()
    if words.quick:
        quick()
        return
    unknown = set(words.only or ()) - set(methods())
    if unknown:
        raise SystemExit(
            f"no method is called {', '.join(sorted(unknown))}; there are {', '.join(methods())}"
        )
    words.work.mkdir(parents=True, exist_ok=True)
    start = warm_up(words.work)
    runs = [
        Run(recipe, seed, words.work / f"{recipe}-{seed}")
        for recipe in methods()
        for seed in range(words.seeds)
    ]
    teacher = words.work / f"{TEACHER}-0"
    wanted = [run for run in runs if words.only is None or run.recipe in words.only]
    if any(run.recipe == "distillation" for run in wanted):
        work_through(next(run for run in runs if run.folder == teacher), start, teacher)
    with ThreadPoolExecutor(words.at_once) as pool:
        list(pool.map(lambda run: work_through(run, start, teacher), wanted))
    found = list(rows(wanted))
    for row in found:
        print(
            f"{row['recipe']:22} {statistics.mean(row['before']):.3f} -> {statistics.mean(row['after']):.3f}"
        )
    if words.only is not None or words.seeds != 3:
        print("the pages in docs/algorithms are written when all recipes have run with three seeds")
        return
    facts = machine()
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / "results.md").write_text(table(found, facts), encoding="utf-8")
    result = ROOT / "benchmarks" / "results" / "methods.json"
    result.write_text(json.dumps({"machine": facts, "methods": found}, indent=1) + "\n", encoding="utf-8")
    draw(wanted)


if __name__ == "__main__":
    main()
