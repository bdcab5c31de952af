"""AReaL's ablation, small: naive against decoupled PPO over staleness, and what decides between them.

    python benchmarks/async_ablation.py                  # everything, some minutes of a free core
    python benchmarks/async_ablation.py --minutes 20     # stop then; the same command goes on
    python benchmarks/async_ablation.py --report         # tables and picture of what has run
    python benchmarks/async_ablation.py --quick          # two batches of an arm of each kind, writes nothing

The task is addition by a small perceptron, many of which train side by side (`common/stale_policies.py`). All
arms of a seed share start weights (at half of the sums), problems and random numbers. Batch t is sampled by
the weights of batch t - eta (the first ones by the start weights), so that every token is exactly eta batches
old and timing decides nothing.

- `naive`: the ratio is taken to the sampler's log-probabilities (`policy.proximal: sampler`).
- `decoupled`: it is taken to the trainer's, computed once a batch, and each token's loss is multiplied by
  their weight over the sampler's, truncated at `cap` (`policy.proximal: recompute`, `policy.correction`).
- `bypass`: no clip; the gradient of each token is multiplied by its ratio to the sampler, truncated at 2
  (`policy.loss.kind: cispo`).

Stage `rates` finds the best synchronous learning rate. Stage A is AReaL's ablation: 4 minibatches, returns
whitened over the batch, no cap. Stage B varies minibatches, cap and advantage at the rate and the two values
of eta at which A differs most clearly. Between them the gradients of naive and decoupled are compared with
the exact one at the same weights, and A is repeated at a quarter of the best rate. Runs are kept in
benchmarks/results/async_ablation.json as they end; docs/async.md gets the tables and docs/pictures the map
when all have run, or with --report.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common.ablation_report import HYPOTHESIS, best_rate, page_with, picture, tables, where_it_differs
from common.record import RESULTS
from common.stale_policies import Arm, train
from methods import ROOT, machine

RESULT = RESULTS / "async_ablation.json"
PAGE, PICTURE = ROOT / "docs" / "async.md", ROOT / "docs" / "pictures" / "async_ablation.svg"
BATCHES, SEEDS = 60, 5
ETAS, FACTORS, SMALL_FACTOR = (1, 2, 4, 8, 16), (1, 2, 4), 0.25
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2)
MINIBATCHES, CAPS, ADVANTAGES = (1, 4, 16), (None, 5.0, 2.0), ("whitened", "group")


def rate_arms() -> list[Arm]:
    """The synchronous arms, the best rate of which the others multiply."""
    return [Arm("naive", 0, rate) for rate in RATES]


def mirror_arms(rates: Sequence[float]) -> list[Arm]:
    """AReaL's ablation. Without staleness both kinds are one, so that only naive runs."""
    found = [Arm("naive", 0, rate) for rate in rates]
    return found + [Arm(kind, eta, rate) for rate in rates for eta in ETAS for kind in ("naive", "decoupled")]


def deciding_arms(minibatches: int, etas: Sequence[int], rate: float) -> list[Arm]:
    """Stage B for one number of minibatches."""
    found = []
    for eta in etas:
        for advantage in ADVANTAGES:
            same: dict[str, Any] = {"minibatches": minibatches, "advantage": advantage}
            found += [Arm("decoupled", eta, rate, cap=cap, **same) for cap in CAPS]
            found += [Arm(kind, eta, rate, **same) for kind in ("naive", "bypass")]
    return found


class Results:
    """The file of results: every run that has ended, in the order in which they did."""

    def __init__(self, path: Path) -> None:
        """Read it, if it is there."""
        self._path = path
        self.runs: list[dict[str, Any]] = []
        # Of decoupled arms at the best rate: cosines of both kinds' gradients at the same weights.
        self.gradients: list[dict[str, Any]] = []
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.runs, self.gradients = kept["runs"], kept.get("gradients", [])

    def __contains__(self, place: tuple[Arm, int]) -> bool:
        arm, seed = place
        wanted = asdict(arm) | {"seed": seed}
        return any(all(run[name] == value for name, value in wanted.items()) for run in self.runs)

    def add(self, runs: Sequence[dict[str, Any]] = (), gradients: Sequence[dict[str, Any]] = ()) -> None:
        """Keep more; the file is whole at any moment."""
        self.runs += runs
        self.gradients += gradients
        heading = {"benchmark": "async_ablation", **machine(), "batches": BATCHES, "hypothesis": HYPOTHESIS}
        lists = {"gradients": self.gradients, "runs": self.runs}
        parts = [json.dumps(heading, indent=1)[:-2]]
        for name, each in lists.items():
            lines = ",\n".join(map(json.dumps, each))
            parts.append(f' "{name}": [\n{lines}\n ]')
        text = ",\n".join(parts) + "\n}\n"
        draft = self._path.with_suffix(".new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self._path)


class Driver:
    """Runs what is missing, until the time is over."""

    def __init__(self, results: Results, seeds: int, until_s: float) -> None:
        """`until_s` is a time of the monotonic clock, after which no run begins."""
        self._results, self._seeds, self._until_s = results, seeds, until_s

    def work_through(self, stage: str, arms: Sequence[Arm]) -> bool:
        """Train the arms of a seed side by side, one seed after another; False where the time was over."""
        for seed in range(self._seeds):
            missing = [arm for arm in arms if (arm, seed) not in self._results]
            if not missing:
                continue
            if time.monotonic() > self._until_s:
                return False
            began = time.process_time()
            found = train(seed, missing, BATCHES)
            self._results.add(
                [asdict(arm) | {"seed": seed} | run for arm, run in zip(missing, found, strict=True)]
            )
            spent = f"{time.process_time() - began:.0f} s of a core"
            shape = f"{missing[0].minibatches} minibatches: {len(missing)} runs"
            print(f"{stage}, seed {seed}, {shape} in {spent}", flush=True)
        return True

    def compare_gradients(self, rate: float) -> bool:
        """Both kinds' gradients along the paths of decoupled arms; False where the time was over."""
        for seed in range(self._seeds):
            if any(one["seed"] == seed for one in self._results.gradients):
                continue
            if time.monotonic() > self._until_s:
                return False
            arms = [Arm("decoupled", eta, rate) for eta in ETAS]
            self._results.add(
                gradients=[
                    {"seed": seed, "staleness": arm.staleness, **gradients_of(run)}
                    for arm, run in zip(arms, train(seed, arms, BATCHES), strict=True)
                ]
            )
            print(f"gradients, seed {seed}", flush=True)
        return True


def gradients_of(run: dict[str, Any]) -> dict[str, list[float]]:
    """The cosines of each minibatch."""
    return {kind: run["minibatch"][f"cosine_{kind}"] for kind in ("naive", "decoupled")}


def everything(driver: Driver, results: Results) -> bool:
    """All stages, each from what the one before found; False where the time was over."""
    if not driver.work_through("rates", rate_arms()):
        return False
    best = best_rate(results.runs, RATES)
    print(f"best synchronous rate: {best:g}", flush=True)
    rates = [factor * best for factor in FACTORS]
    if not driver.work_through("stage A", mirror_arms(rates)):
        return False
    etas, rate = where_it_differs(results.runs, rates, ETAS)
    print(f"stage A differs most clearly at eta {etas} and rate {rate:g}", flush=True)
    small = mirror_arms([SMALL_FACTOR * best])
    if not driver.compare_gradients(best) or not driver.work_through("small rate", small):
        return False
    return all(
        driver.work_through("stage B", deciding_arms(minibatches, etas, rate)) for minibatches in MINIBATCHES
    )


def report(results: Results) -> None:
    """Write the tables into the page and the picture beside it."""
    text = tables(
        results.runs, results.gradients, rates=RATES, factors=FACTORS, small=SMALL_FACTOR, etas=ETAS
    )
    print(text)
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    PICTURE.write_text(picture(results.runs), encoding="utf-8")


def quick() -> None:
    """Two batches of an arm of each kind."""
    arms = [Arm(kind, 1, RATES[0]) for kind in ("naive", "decoupled", "bypass")]
    for arm, run in zip(arms, train(0, arms, 2), strict=True):
        print(f"{arm.kind}: expected reward {run['accuracy']}, effective share {run['minibatch']['ess']}")


def main() -> None:
    """Run what is missing, then write tables and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each arm")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so long")
    parser.add_argument("--report", action="store_true", help="write tables and picture of what has run")
    parser.add_argument("--quick", action="store_true", help="two batches; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HYPOTHESIS, flush=True)
    if given.quick:
        quick()
        return
    results, until_s = Results(RESULT), time.monotonic() + 60 * given.minutes
    if given.report or everything(Driver(results, given.seeds, until_s), results):
        report(results)


if __name__ == "__main__":
    main()
