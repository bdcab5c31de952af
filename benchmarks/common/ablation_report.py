"""What the runs of `async_ablation.py` show: choices between its stages, tables, and the map.

A run is a dictionary of the file of results; its end is the mean of its last three evaluations. Intervals
are those of Student's t at 95 %, over seeds; differences are paired by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.stale_gradient import METHODS, over_staleness
from scipy.stats import t as student

from millrace.observability.charts import Series, curve_svg

HYPOTHESIS = (
    "Hypothesis, written down before the runs: decoupled ends above naive where naive's fraction of tokens "
    "outside the clip before the first step of a batch is above about 5 % and the effective sample share of "
    "the weights is above about 0.7; it ends below naive where that share is below about 0.6; both end "
    "alike where the learning rate is small. A run collapses if it ends below where it began."
)
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"
# The hypothesis in numbers.
LEAST_OUTSIDE, LEAST_WINNING, MOST_LOSING = 0.05, 0.7, 0.6
ARM = ("kind", "staleness", "rate", "minibatches", "cap", "advantage")
FIGURES = ("spent", "outside", "cut", "raised", "kl", "ess", "grad_norm", "cosine")
Run = dict[str, Any]


def end(run: Run) -> float:
    """Accuracy at the end."""
    return statistics.fmean(run["accuracy"][-3:])


def chosen(runs: Iterable[Run], **values: Any) -> dict[int, Run]:
    """The runs with these values, by seed."""
    return {run["seed"]: run for run in runs if all(run[name] == value for name, value in values.items())}


def mirror(runs: Iterable[Run], kind: str, staleness: int, rate: float) -> dict[int, Run]:
    """Runs of stage A by seed; without staleness decoupled is naive."""
    kind = "naive" if staleness == 0 else kind
    same = {"minibatches": 4, "cap": None, "advantage": "whitened"}
    return chosen(runs, kind=kind, staleness=staleness, rate=rate, **same)


def differences(ours: dict[int, Run], theirs: dict[int, Run]) -> list[float]:
    """Accuracy at the end of the first less that of the second, for the seeds that both have."""
    return [end(ours[seed]) - end(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of their mean; infinite for fewer than two."""
    if len(values) < 2:
        return math.inf
    return float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def best_rate(runs: Sequence[Run], rates: Sequence[float]) -> float:
    """The rate at which synchronous runs end best."""
    return max(rates, key=lambda rate: statistics.fmean(map(end, mirror(runs, "naive", 0, rate).values())))


def where_it_differs(
    runs: Sequence[Run], rates: Sequence[float], etas: Sequence[int]
) -> tuple[list[int], float]:
    """The rate and the two staleness values of the clearest differences: in halves of their intervals."""

    def gap(rate: float, eta: int) -> float:
        pairs = differences(mirror(runs, "decoupled", eta, rate), mirror(runs, "naive", eta, rate))
        return abs(statistics.fmean(pairs)) / max(half_width(pairs), 1e-9) if pairs else 0.0

    def two(rate: float) -> list[int]:
        return sorted(sorted(etas, key=lambda eta: -gap(rate, eta))[:2])

    rate = max(rates, key=lambda rate: sum(gap(rate, eta) for eta in two(rate)))
    return two(rate), rate


def page_with(page: str, text: str) -> str:
    """The page with its tables written anew; ValueError if it has no place for them."""
    before, begin, rest = page.partition(BEGIN)
    _, last, after = rest.partition(END)
    if not begin or not last:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


@dataclass(frozen=True)
class Cell:
    """Decoupled beside naive, with everything else equal."""

    staleness: int
    rate: float
    minibatches: int
    cap: float | None
    advantage: str
    gaps: tuple[float, ...]
    outside: float
    ess: float

    @property
    def expected(self) -> str:
        """What the hypothesis says."""
        if self.ess < MOST_LOSING:
            return "loses"
        return "wins" if self.outside > LEAST_OUTSIDE and self.ess > LEAST_WINNING else "equal"

    @property
    def found(self) -> str:
        """What the interval of the difference says."""
        mean, half = statistics.fmean(self.gaps), half_width(self.gaps)
        return "equal" if abs(mean) <= half else "wins" if mean > 0 else "loses"


def first(runs: Iterable[Run], name: str) -> float:
    """The mean of a figure of the first minibatches."""
    return statistics.fmean(run["minibatch"][name][0] for run in runs)


def cells(runs: Sequence[Run]) -> list[Cell]:
    """Every decoupled arm that has a naive one, with at least two seeds of both."""
    found = []
    for place in dict.fromkeys(tuple(run[name] for name in ARM) for run in runs):
        given = dict(zip(ARM, place, strict=True))
        if given["kind"] != "decoupled" or given["staleness"] == 0:
            continue
        ours, theirs = chosen(runs, **given), chosen(runs, **given | {"kind": "naive", "cap": None})
        gaps = differences(ours, theirs)
        if len(gaps) > 1:
            del given["kind"]
            outside, ess = first(theirs.values(), "outside"), first(ours.values(), "ess")
            found.append(Cell(**given, gaps=tuple(gaps), outside=outside, ess=ess))
    return found


def spoken(values: Sequence[float], *, signed: bool = False) -> str:
    """The mean with half of its interval."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.3f}"
    return mean if len(values) < 2 else f"{mean} ± {half_width(values):.3f}"


def collapsed(runs: Iterable[Run]) -> str:
    """How many ended below where they began."""
    every = list(runs)
    return f"{sum(end(run) < run['accuracy'][0] for run in every)} of {len(every)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the page."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rates_table(runs: Sequence[Run], rates: Iterable[float]) -> str:
    """Synchronous runs."""
    rows = []
    for rate in rates:
        own = list(mirror(runs, "naive", 0, rate).values())
        if own:
            rows.append([f"{rate:g}", spoken([end(run) for run in own]), collapsed(own), str(len(own))])
    return table(["learning rate", "right at the end", "collapsed", "seeds"], rows)


def mirror_table(runs: Sequence[Run], rates: Sequence[float], etas: Sequence[int]) -> str:
    """Stage A."""
    rows = []
    for rate in rates:
        for eta in (0, *etas):
            naive, decoupled = (mirror(runs, kind, eta, rate) for kind in ("naive", "decoupled"))
            if not naive or not decoupled:
                continue
            gaps = differences(decoupled, naive)
            parts = [
                f"{rate:g}",
                str(eta),
                *(spoken([end(run) for run in own.values()]) for own in (naive, decoupled)),
                spoken(gaps, signed=True) if eta else "the same runs",
                f"{100 * first(naive.values(), 'outside'):.1f} %",
                f"{first(decoupled.values(), 'ess'):.2f}",
                f"{collapsed(naive.values())}; {collapsed(decoupled.values())}",
            ]
            rows.append(parts)
    heads = [
        "rate",
        "eta",
        "naive",
        "decoupled",
        "difference",
        "outside",
        "ess",
        "collapsed: naive; decoupled",
    ]
    return table(heads, rows)


def deciding_table(runs: Sequence[Run], etas: Sequence[int], rate: float) -> str:
    """Stage B: accuracy at the end of each arm, and which differences from naive are not 0."""
    rows = []
    for eta in etas:
        for minibatches in (1, 4, 16):
            for advantage in ("whitened", "group"):
                same = {"staleness": eta, "rate": rate, "minibatches": minibatches, "advantage": advantage}
                naive = chosen(runs, kind="naive", **same)
                others = [chosen(runs, kind="decoupled", cap=cap, **same) for cap in (None, 5.0, 2.0)]
                others.append(chosen(runs, kind="bypass", **same))
                if not naive or not any(others):
                    continue
                facts = f"{100 * first(naive.values(), 'outside'):.0f} %"
                ess = f"{first(others[0].values(), 'ess'):.2f}" if others[0] else "-"
                rows.append(
                    [str(eta), str(minibatches), advantage, spoken([end(run) for run in naive.values()])]
                    + [spoken(differences(own, naive), signed=True) for own in others]
                    + [facts, ess, str(len(naive))]
                )
    heads = ["eta", "minibatches", "advantage", "naive", "no cap", "cap 5", "cap 2", "bypass"]
    return table([*heads, "outside", "ess", "seeds"], rows)


def minibatch_table(runs: Sequence[Run], etas: Sequence[int], rate: float) -> str:
    """What the minibatches of a batch look like, one after another."""
    rows = []
    for eta in etas:
        for kind in ("naive", "decoupled"):
            own = mirror(runs, kind, eta, rate).values()
            for place in range(4 if own else 0):
                mean = {
                    name: statistics.fmean(run["minibatch"][name][place] for run in own) for name in FIGURES
                }
                parts = [f"{100 * mean[name]:.1f} %" for name in ("spent", "outside", "cut", "raised")]
                parts += [
                    f"{mean['kl']:.3f}",
                    f"{mean['ess']:.2f}",
                    f"{mean['grad_norm']:.2f}",
                    f"{mean['cosine']:+.2f}",
                ]
                rows.append([str(eta), kind, str(place + 1), *parts])
    heads = ["eta", "kind", "minibatch", "off the sampler", "outside", "cut", "raised"]
    return table([*heads, "KL", "ess", "gradient norm", "cosine"], rows)


def verdict_table(found: Sequence[Cell]) -> str:
    """What the hypothesis said of the cells, and what they did."""
    outcomes = ("wins", "equal", "loses")
    rows = []
    for expected in outcomes:
        own = [cell for cell in found if cell.expected == expected]
        counts = [str(sum(cell.found == outcome for cell in own)) for outcome in outcomes]
        gaps = [statistics.fmean(cell.gaps) for cell in own]
        rows.append([expected, *counts, f"{statistics.fmean(gaps):+.3f}" if gaps else "-"])
    return table(["expected of decoupled", *outcomes, "mean difference"], rows)


def compared_table(gradients: Sequence[dict[str, Any]], etas: Sequence[int]) -> str:
    """Cosines of the gradients of both kinds with the exact one, at the same weights."""
    rows = []
    for eta in etas:
        own = [one for one in gradients if one["staleness"] == eta]
        pairs = [[statistics.fmean(one[kind]) for one in own] for kind in ("naive", "decoupled")]
        gaps = [ours - theirs for theirs, ours in zip(*pairs, strict=True)]
        firsts = [statistics.fmean(one[kind][0] for one in own) for kind in ("naive", "decoupled") if own]
        if own:
            shown = [f"{first:+.2f}" for first in firsts] + [spoken(pair, signed=True) for pair in pairs]
            rows.append([str(eta), *shown, spoken(gaps, signed=True), str(len(own))])
    heads = ["eta", "naive, first", "decoupled, first", "naive, all four", "decoupled, all four"]
    return table([*heads, "difference", "seeds"], rows)


def gradient_table(staleness: Sequence[int], seeds: Sequence[int]) -> str:
    """Cosines with the exact gradient."""
    rows = []
    for eta, mean in over_staleness(staleness, seeds).items():
        cosines = [f"{mean[method]:+.2f} ({mean[f'{method}, minibatch']:+.2f})" for method in METHODS]
        rows.append([str(eta), f"{100 * mean['outside']:.0f} %", f"{mean['ess']:.2f}", *cosines])
    return table(["staleness", "outside", "ess", *METHODS], rows)


def tables(
    runs: Sequence[Run],
    gradients: Sequence[dict[str, Any]],
    *,
    rates: Sequence[float],
    factors: Sequence[float],
    small: float,
    etas: Sequence[int],
) -> str:
    """All tables of the page, of the runs that there are; `small` is the factor of the last stage."""
    best = best_rate(runs, rates)
    multiples = [factor * best for factor in factors]
    found = cells(runs)
    parts = [f"**Synchronous rates**\n\n{rates_table(runs, rates)}"]
    parts.append(f"**Stage A, as AReaL**\n\n{mirror_table(runs, [small * best, *multiples], etas)}")
    decisive, rate = where_it_differs(runs, multiples, etas)
    parts.append(f"**Minibatches at rate {rate:g}**\n\n{minibatch_table(runs, decisive, rate)}")
    heading = f"**Stage B at rate {rate:g}: naive's accuracy, and differences from it**"
    parts.append(f"{heading}\n\n{deciding_table(runs, decisive, rate)}")
    parts.append(f"**Hypothesis and outcome, {len(found)} cells of both stages**\n\n{verdict_table(found)}")
    heading = "**Cosine with the exact gradient, at the same weights on the paths of decoupled**"
    parts.append(f"{heading}\n\n{compared_table(gradients, etas)}")
    heading = "**The same on a token MDP, before the first step: of the expected gradient (of a minibatch)**"
    parts.append(f"{heading}\n\n{gradient_table((0, 1, 2, 4, 8, 16), range(8))}")
    return "\n".join(parts)


def picture(runs: Sequence[Run]) -> str:
    """The map: each cell by naive's fraction outside the clip and decoupled's effective sample share."""
    found, series = cells(runs), []
    for colour, outcome in ((3, "wins"), (7, "equal"), (5, "loses")):
        points = [(100 * cell.outside, cell.ess) for cell in found if cell.found == outcome]
        if points:
            series.append(Series(f"decoupled {outcome}", points, colour=colour, joined=False))
    return curve_svg(
        series,
        title="Decoupled against naive, by tokens outside the clip and effective share",
        x_label="tokens outside the clip before the first step, naive (%)",
        y_label="effective sample share",
        width=720,
        height=360,
        y_range=(0.0, 1.0),
        standalone=True,
    )
