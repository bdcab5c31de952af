"""Bias and noise of every estimator on a token MDP: the table and the picture of docs/algorithms.

    python scripts/estimators_picture.py

Three tokens of which the last ends a sequence, at most three tokens, so fifteen sequences and 680 batches of
three (in any order): every number is a sum over all of them and none is sampled. The page shows means over a
few such worlds. D = batches, N = sequences, P = prefixes, V = vocabulary, T = packed tokens of all batches,
B = their segments (one sequence each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms import advantages, losses, ratios, returns, weights
from millrace.algorithms.masked import whiten
from millrace.foundations.enumerate import Draws, TokenTree, draws, exact_gradient, prefix_values
from millrace.foundations.mdp import Floats
from millrace.foundations.softmax_policy import softmax
from millrace.observability.charts import CHART_STYLE, DARK, LIGHT

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "algorithms"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TREE = TokenTree(num_tokens=3, horizon=3)
SIZE = 3
SEEDS = range(4)
LOW, HIGH = 0.2, 0.28


class Lesson:
    """A policy, what drew for it, and every batch that can be drawn.

    A sequence earns 0, 0.5 or 1 by a draw of the seed, and 0.3 more if it is at most two tokens long.
    """

    def __init__(self, seed: int, *, stale: bool) -> None:
        """`stale`: other weights than the policy's draw, their logits off by 0.3 (one standard deviation)."""
        rng = np.random.default_rng(seed)
        shape = (len(TREE.prefixes), TREE.num_tokens)
        logit_PV, shift_PV = rng.normal(size=shape), 0.3 * rng.normal(size=shape)
        self.policy_PV = softmax(logit_PV)
        self.right_N = rng.choice([0.0, 0.5, 1.0], len(TREE.sequences), p=[0.5, 0.2, 0.3])
        self.short_N = np.array([float(len(sequence) < 3) for sequence in TREE.sequences])
        self.reward_PV = TREE.at_the_end(self.right_N + 0.3 * self.short_N)
        self.exact_PV = exact_gradient(TREE, self.policy_PV, self.reward_PV)
        sampler_PV = softmax(logit_PV + shift_PV) if stale else self.policy_PV
        self.draws: Draws = draws(TREE, sampler_PV, SIZE)
        self.prefix_T = torch.from_numpy(self.draws.prefix_T)
        self.segment_T = torch.from_numpy(self.draws.segment_T)
        self.length_B = torch.from_numpy(self.draws.length_B)
        self.policy_T = self._drawn(np.log(self.policy_PV)).requires_grad_()
        self.sampler_T = self._drawn(np.log(sampler_PV))
        self.reward_T = self._drawn(self.reward_PV)
        self.reward_B = self._of_sequences(self.right_N + 0.3 * self.short_N)
        self.groups = (torch.from_numpy(self.draws.draw_B), len(self.draws.probability_D))

    def _drawn(self, table_PV: Floats) -> Tensor:
        return torch.from_numpy(table_PV[self.draws.prefix_T, self.draws.token_T])

    def _of_sequences(self, number_N: Floats) -> Tensor:
        return torch.from_numpy(number_N[self.draws.sequence_B])

    @property
    def parts_KB(self) -> Tensor:
        """The two parts of the reward."""
        return torch.stack([self._of_sequences(self.right_N), self._of_sequences(self.short_N)])

    @property
    def place(self) -> tuple[Tensor, int]:
        """The segment of each token, and how many there are."""
        return self.segment_T, len(self.length_B)

    def batches(self) -> Iterator[tuple[slice, slice]]:
        """The segments and the tokens of each batch."""
        ends_B = self.length_B.cumsum(0).tolist()
        for first in range(0, len(ends_B), SIZE):
            segments = slice(first, first + SIZE)
            yield segments, slice(ends_B[first - 1] if first else 0, ends_B[first + SIZE - 1])

    def each(self, function: Callable[[slice, slice], Tensor]) -> Tensor:
        """[T] of what looks at its whole batch, called for each batch alone."""
        return torch.cat([function(*batch) for batch in self.batches()])

    def judge(self, loss_T: Tensor, weight_T: Tensor | None = None) -> Floats:
        """Angle, length and noise of a loss; its tokens weigh 1 / size without `weight_T`.

        The angle, in degrees, and the ratio of lengths are those of the expected gradient and the exact one;
        the noise is the standard deviation of the gradient over the length of its expectation.
        """
        total = (loss_T * (1 / SIZE if weight_T is None else weight_T)).sum()
        (slope_T,) = torch.autograd.grad(total, self.policy_T, retain_graph=True)
        gradient_DPV = self.draws.gradients(-slope_T.numpy(), self.policy_PV)
        mean_PV = self.draws.mean(gradient_DPV)
        length, exact = float(np.linalg.norm(mean_PV)), float(np.linalg.norm(self.exact_PV))
        cosine = float((mean_PV * self.exact_PV).sum()) / (length * exact)
        angle_deg = math.degrees(math.acos(min(cosine, 1.0)))
        noise = math.sqrt(self.draws.variance(gradient_DPV)) / length
        return np.array([angle_deg, length / exact, noise])


def of_advantages(seed: int) -> dict[str, Floats]:
    """Estimators of the advantage, under REINFORCE and equal weights for sequences."""
    lesson = Lesson(seed, stale=False)
    found = {**_of_groups(lesson), **_of_batches(lesson), **_over_time(lesson)}
    return {
        name: lesson.judge(losses.reinforce(lesson.policy_T, advantage_T))
        for name, advantage_T in found.items()
    }


def _of_groups(lesson: Lesson) -> dict[str, Tensor]:
    group = (lesson.reward_B, *lesson.groups)
    greedy: tuple[int, ...] = ()
    while greedy in TREE.prefixes:
        greedy += (int(lesson.policy_PV[TREE.prefixes.index(greedy)].argmax()),)
    number = TREE.sequences.index(greedy)
    baseline_B = torch.full_like(lesson.reward_B, lesson.right_N[number] + 0.3 * lesson.short_N[number])
    weight_K = torch.tensor([1.0, 0.3], dtype=torch.float64)
    return_T = lesson.reward_B[lesson.segment_T]
    found_B = {
        "return (no baseline)": lesson.reward_B,
        "group_centred (Dr. GRPO)": advantages.group_centred(*group),
        "leave_one_out (RLOO)": advantages.leave_one_out(*group),
        "group_normalised (GRPO)": advantages.group_normalised(*group),
        "leave_one_out_normalised": advantages.leave_one_out_normalised(*group),
        "length_weighted_centred (OPO)": advantages.length_weighted_centred(
            lesson.reward_B, lesson.length_B, *lesson.groups
        ),
        "pass_at_k, undivided": advantages.pass_at_k(*group, divide_by_std=False),
        "pass_at_k": advantages.pass_at_k(*group),
        "group_decoupled (GDPO), not whitened": advantages.group_decoupled(
            lesson.parts_KB, *lesson.groups, weight_K=weight_K
        ),
    }
    square_T = torch.from_numpy(np.square(lesson.policy_PV).sum(axis=1))[lesson.prefix_T]
    return {name: advantage_B[lesson.segment_T] for name, advantage_B in found_B.items()} | {
        "baseline_centred (ReMax)": advantages.baseline_centred(return_T, baseline_B, lesson.segment_T),
        "optimal_token_baseline": advantages.optimal_token_baseline(
            return_T,
            lesson.policy_T.detach(),
            square_T,
            torch.from_numpy(lesson.draws.position_T),
            lesson.segment_T,
            lesson.groups[0],
        ),
    }


def _of_batches(lesson: Lesson) -> dict[str, Tensor]:
    one = torch.zeros(SIZE, dtype=torch.long)

    def gpg(segments: slice, tokens: slice) -> Tensor:
        return advantages.gpg(lesson.reward_B[segments], one, 1).repeat_interleave(lesson.length_B[segments])

    def plus_plus(segments: slice, tokens: slice) -> Tensor:
        length_B = lesson.length_B[segments]
        return advantages.reinforce_plus_plus(lesson.reward_T[tokens], length_B, gamma=1.0)

    def plus_plus_baseline(segments: slice, tokens: slice) -> Tensor:
        length_B = lesson.length_B[segments]
        return advantages.reinforce_plus_plus_baseline(lesson.reward_B[segments], one, 1, length_B)

    def gdpo(segments: slice, tokens: slice) -> Tensor:
        weight_K = torch.tensor([1.0, 0.3], dtype=torch.float64)
        decoupled_B = advantages.group_decoupled(lesson.parts_KB[:, segments], one, 1, weight_K=weight_K)
        return whiten(decoupled_B.repeat_interleave(lesson.length_B[segments]))

    return {
        "gpg": lesson.each(gpg),
        "reinforce_plus_plus": lesson.each(plus_plus),
        "reinforce_plus_plus_baseline": lesson.each(plus_plus_baseline),
        "group_decoupled (GDPO), whitened": lesson.each(gdpo),
    }


def _over_time(lesson: Lesson) -> dict[str, Tensor]:
    value_P = prefix_values(TREE, lesson.policy_PV, lesson.reward_PV)
    wrong_P = value_P + 0.3 * np.random.default_rng(len(value_P)).normal(size=value_P.shape)
    lam_B = returns.length_adaptive_lambda(lesson.length_B, alpha=0.8)
    cases: list[tuple[str, Floats, float | Tensor]] = [
        *((f"gae, exact values, lambda {lam:g}", value_P, lam) for lam in (0.0, 0.5, 1.0)),
        ("gae, exact values, lambda by length (VAPO)", value_P, lam_B),
        *((f"gae, wrong values, lambda {lam:g}", wrong_P, lam) for lam in (0.0, 0.5, 1.0)),
    ]
    return {
        name: returns.gae(
            lesson.reward_T, torch.from_numpy(table_P)[lesson.prefix_T], lesson.length_B, gamma=1.0, lam=lam
        )[0]
        for name, table_P, lam in cases
    }


def of_token_weights(seed: int) -> dict[str, Floats]:
    """Token weights, with the leave-one-out advantage."""
    lesson = Lesson(seed, stale=False)
    loss_T = losses.reinforce(lesson.policy_T, _left_out(lesson))
    aggregations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sequence_sum": weights.sequence_sum,
        "token_sum": weights.token_sum,
        "fixed_length, 3": partial(weights.fixed_length, length=3),
        "token_mean (DAPO)": weights.token_mean,
        "sequence_mean (GRPO)": weights.sequence_mean,
    }

    def of_batch(aggregate: Callable[[Tensor, Tensor], Tensor], segments: slice, tokens: slice) -> Tensor:
        segment_T = lesson.segment_T[tokens]
        return aggregate(torch.ones_like(segment_T, dtype=torch.bool), segment_T)

    return {
        name: lesson.judge(loss_T, lesson.each(partial(of_batch, aggregate)))
        for name, aggregate in aggregations.items()
    }


def of_losses(seed: int) -> dict[str, Floats]:
    """Losses and importance weights in draws of other weights, with the leave-one-out advantage."""
    lesson = Lesson(seed, stale=True)
    advantage_T = _left_out(lesson)
    token = (lesson.policy_T, lesson.sampler_T, advantage_T)
    plain_T = losses.reinforce(lesson.policy_T, advantage_T)
    log_ratio_T = lesson.policy_T.detach() - lesson.sampler_T
    token_T, whole_T, mean_T = (
        ratios.importance_weights(log_ratio_T, *lesson.place, level=level)
        for level in ("token", "sequence", "geometric")
    )
    kept_T = ratios.rejection(log_ratio_T, *lesson.place, estimator="k1", level="mean", low=0.8, high=1.25)
    found = {
        "reinforce, uncorrected": plain_T,
        "reinforce x sequence weights": whole_T * plain_T,
        "reinforce x sequence weights, truncated at 1.5": ratios.truncate(whole_T, high=1.5) * plain_T,
        "reinforce x sequence weights, icepop 0.5 to 1.5": ratios.icepop(whole_T, low=0.5, high=1.5)
        * plain_T,
        "reinforce x token weights": token_T * plain_T,
        "reinforce x geometric weights": mean_T * plain_T,
        "reinforce, rejecting by the mean of k1": kept_T * plain_T,
        "ppo_clip without bounds": losses.ppo_clip(*token, low=1 - 1e-9, high=math.inf),
        "ppo_clip": losses.ppo_clip(*token, low=LOW, high=HIGH),
        "ppo_clip, dual 1.5": losses.ppo_clip(*token, low=LOW, high=HIGH, dual=1.5),
        "ppo_clip, decoupled": _decoupled(lesson, advantage_T),
        "clip_cov": _clip_cov(lesson, advantage_T),
        "kl_cov": _kl_cov(lesson, advantage_T),
        "cispo": losses.cispo(*token, low=LOW, high=HIGH),
        "sapo": losses.sapo(*token, positive=1.0, negative=1.05),
        "dppo_tv": losses.dppo_tv(*token, low=0.1, high=0.1, cap=20.0),
        "dppo_kl": losses.dppo_kl(*token, low=0.05, high=0.05, cap=20.0),
        "dro": losses.dro(*token, beta=0.1),
        "gspo": losses.gspo(*token, *lesson.place, low=LOW, high=HIGH),
        "gspo_token": losses.gspo_token(*token, *lesson.place, low=LOW, high=HIGH),
        # Its loss stands at every token, so a weight of 1 / length counts it once.
        "gmpo": losses.gmpo(*token, *lesson.place, low=0.4, high=0.4) / lesson.length_B[lesson.segment_T],
        "topr": losses.topr(*token, *lesson.place),
    }
    return {name: lesson.judge(loss_T) for name, loss_T in found.items()}


def _left_out(lesson: Lesson) -> Tensor:
    return advantages.leave_one_out(lesson.reward_B, *lesson.groups)[lesson.segment_T]


def _decoupled(lesson: Lesson, advantage_T: Tensor) -> Tensor:
    version_T = torch.zeros_like(lesson.segment_T)
    proximal_T = ratios.interpolated_proximal(lesson.policy_T, lesson.sampler_T, version_T, version=2)
    weight_T = ratios.importance_weights(proximal_T - lesson.sampler_T, *lesson.place, level="token")
    return weight_T * losses.ppo_clip(lesson.policy_T, proximal_T, advantage_T, low=LOW, high=HIGH)


def _clip_cov(lesson: Lesson, advantage_T: Tensor) -> Tensor:
    def of_batch(segments: slice, tokens: slice) -> Tensor:
        token = (lesson.policy_T[tokens].detach(), lesson.sampler_T[tokens], advantage_T[tokens])
        return ~losses.clip_cov_selection(
            losses.covariance(token[0], token[2]),
            losses.clipped(*token, low=LOW, high=HIGH),
            fraction=1.0,
            low=0.2,
            high=5.0,
            generator=torch.Generator().manual_seed(0),
        )

    return lesson.each(of_batch) * losses.ppo_clip(
        lesson.policy_T, lesson.sampler_T, advantage_T, low=LOW, high=HIGH
    )


def _kl_cov(lesson: Lesson, advantage_T: Tensor) -> Tensor:
    def of_batch(segments: slice, tokens: slice) -> Tensor:
        covariance_T = losses.covariance(lesson.policy_T[tokens], advantage_T[tokens])
        return losses.kl_cov_selection(covariance_T, fraction=0.2)

    selected_T = lesson.each(of_batch)
    return losses.kl_cov(lesson.policy_T, lesson.sampler_T, advantage_T, selected_T, coefficient=0.1)


PARTS: dict[str, Callable[[int], dict[str, Floats]]] = {
    "Advantages (fresh samples, REINFORCE, equal sequences)": of_advantages,
    "Token weights (fresh samples, REINFORCE, leave-one-out)": of_token_weights,
    "Losses and weights (stale samples, leave-one-out)": of_losses,
}


def judged() -> dict[str, dict[str, Floats]]:
    """Angle, length and noise of every estimator of every part, as means over the worlds."""
    found = {}
    for part, of_world in PARTS.items():
        worlds = [of_world(seed) for seed in SEEDS]
        found[part] = {name: np.mean([world[name] for world in worlds], axis=0) for name in worlds[0]}
    return found


def table(found: dict[str, dict[str, Floats]]) -> str:
    """The page's tables, one for each part."""
    parts = []
    for part, numbers in found.items():
        parts.append(f"**{part}**\n\n| estimator | angle | length | noise |\n|---|---:|---:|---:|\n")
        for name, (angle_deg, length, noise) in numbers.items():
            parts.append(f"| {name} | {angle_deg:.1f} | {length:.3f} | {noise:.2f} |\n")
        parts.append("\n")
    return "".join(parts)


def page_with(text: str, found: dict[str, dict[str, Floats]]) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: the page has no place for them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table(found)}{END}{after}"


def picture(found: dict[str, dict[str, Floats]]) -> str:
    """A dot for the angle and one for the noise of each estimator, as SVG."""
    left, width, step = 330, 250, 18
    every = np.stack([one for numbers in found.values() for one in numbers.values()])
    ends = (math.ceil(every[:, 0].max() / 5) * 5, math.ceil(every[:, 2].max()))
    body, y = [], 66
    for part, numbers in found.items():
        body.append(f'<text class="value" x="16" y="{y}">{escape(part)}</text>')
        y += step
        for name, (angle_deg, _, noise) in numbers.items():
            body.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
            for panel, (number, end) in enumerate(zip((angle_deg, noise), ends, strict=True)):
                start = left + panel * (width + 40)
                x = start + width * number / end
                body.append(
                    f'<line class="grid" x1="{start}" x2="{start + width}" y1="{y}" y2="{y}"/>'
                    f'<circle class="dot" style="fill:var(--c{panel + 1})" cx="{x:.1f}" cy="{y}" r="4.5">'
                    f"<title>{escape(name)}: {number:.2f}</title></circle>"
                )
            y += step
        y += step
    for panel, label in enumerate((f"bias: angle, 0 to {ends[0]} degrees", f"noise, 0 to {ends[1]}")):
        body.append(f'<text x="{left + panel * (width + 40)}" y="48">{label}</text>')
    style = f".chart{{{LIGHT}}}@media(prefers-color-scheme:dark){{.chart{{{DARK}}}}}{CHART_STYLE}"
    wide = left + 2 * width + 60
    size = f'width="{wide}" height="{y}" viewBox="0 0 {wide} {y}"'
    title = "Bias and noise of every estimator on the token MDP"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size} role="img" aria-label="{title}">'
        f'<style>{style}</style><rect width="100%" height="100%" rx="10" style="fill:var(--card)"/>'
        f'<text class="title" x="16" y="27">{title}</text>{"".join(body)}</svg>\n'
    )


def main() -> None:
    """Write the tables into docs/algorithms/comparison.md and the picture beside it."""
    torch.set_num_threads(1)  # the batches are tiny
    found = judged()
    page = FOLDER / "comparison.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    (FOLDER / "estimators.svg").write_text(picture(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
