"""Policy and value losses, per token, to be minimised. Token weights are computed in `weights`.

T = packed tokens, here only those the policy chose. Common arguments: policy_logprob_T, the token's
log-probability under the current policy; sampler_logprob_T, that under the behaviour policy (the sampler);
advantage_T, its advantage. Logarithms are natural. In the decoupled form the proximal log-probabilities
replace the sampler's, and the loss is multiplied by the importance weight of proximal against sampler
(`ratios`).

Losses with one ratio per segment also take segment_T, the segment of each token, ids in [0, num_segments);
B = segments, of which some may have no token. A micro-batch holds whole segments, so they do not depend on
the split. The papers have one advantage per segment; the functions take one per token.

Every function raises ValueError for tensors of different shapes and for a setting outside its range, which
is above 0 where no other is named. A NaN in an input stays NaN in the loss of its token (of its segment,
where the ratio is the segment's) and affects no other, so the trainer detects it and skips the step; a
log-probability of minus infinity counts as a ratio of e^-20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.algorithms.checks import check_shapes, require
from millrace.algorithms.masked import segment_mean, segment_sum

# Ratios beyond e^20 carry no information; without a bound one token overflows the whole loss.
MAX_LOG_RATIO = 20.0
# verl's bound on the log of GSPO's token ratio.
MAX_TOKEN_LOG_RATIO = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The inputs of a policy loss, one entry for each chosen token (N of them).

    Attributes:
        policy_N: log-probability under the weights being trained, with gradient.
        start_N: log-probability that the ratio is taken to.
        advantage_N: advantage.
        segment_N: segment.
        num_segments: number of segments.
        selected_N: tokens to treat apart, where the method selects some.
    """

    policy_N: Tensor
    start_N: Tensor
    advantage_N: Tensor
    segment_N: Tensor
    num_segments: int
    selected_N: Tensor | None


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss of this file by name, with its options: `PolicyLoss("dro", {"beta": 0.1})`.

    `policy.loss` of a recipe names the kinds and their options.
    """

    kind: str
    options: Mapping[str, Any]

    def __call__(self, t: LossTerms) -> tuple[Tensor, Tensor | None]:
        """Return the loss, [N], and the tokens that its bounds leave without gradient, bool [N] or None.

        Raises:
            ValueError: there is no such kind.
        """
        ratio, by_sequence = (t.policy_N, t.start_N, t.advantage_N), (t.segment_N, t.num_segments)
        options = self.options
        match self.kind:
            case "ppo_clip" | "clip_cov":
                return _with_clipped(*ratio, options)
            case "reinforce":
                return reinforce(t.policy_N, t.advantage_N), None
            case "topr":
                return topr(*ratio, *by_sequence), None
            case "gspo":
                return _gspo_with_clipped(t, options)
            case "gmpo":
                return gmpo(*ratio, *by_sequence, low=options["clip_low"], high=options["clip_high"]), None
            case "cispo":
                return cispo(*ratio, low=options["clip_low"], high=options["clip_high"]), None
            case "sapo":
                return sapo(*ratio, positive=options["positive"], negative=options["negative"]), None
            case "dppo":
                return _dppo_with_clipped(*ratio, options)
            case "dro":
                return dro(*ratio, beta=options["beta"]), None
            case "kl_cov":
                assert t.selected_N is not None
                return kl_cov(*ratio, t.selected_N, coefficient=options["coefficient"]), None
        raise ValueError(f"there is no policy loss {self.kind!r}")


def token_selection(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    seed: int,
    *,
    kind: str,
    **settings: Any,
) -> Tensor:
    """Select the tokens that `clip_cov` leaves out, or that `kl_cov` penalises, bool [T].

    Pass the whole optimizer step. `seed` is of the random choice of `clip_cov`.

    Raises:
        ValueError: the kind selects no tokens, or a setting is outside its range.
    """
    covariance_T = covariance(policy_logprob_T, advantage_T)
    if kind == "kl_cov":
        return kl_cov_selection(covariance_T, fraction=settings["fraction"])
    require(kind == "clip_cov", "kind", kind, "clip_cov or kl_cov, which select tokens")
    low, high = settings["clip_low"], settings["clip_high"]
    return clip_cov_selection(
        covariance_T,
        clipped(policy_logprob_T, sampler_logprob_T, advantage_T, low=low, high=high),
        fraction=settings["fraction"],
        low=settings["covariance_low"],
        high=settings["covariance_high"],
        generator=torch.Generator().manual_seed(seed),
    )


def log_ratio(policy_logprob_T: Tensor, sampler_logprob_T: Tensor) -> Tensor:
    """log(pi / mu) per token, clamped to +-20."""
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T)
    return (policy_logprob_T - sampler_logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def reinforce(policy_logprob_T: Tensor, advantage_T: Tensor) -> Tensor:
    """L_t = -A log pi: the plain policy gradient, for on-policy tokens.

    GPG has the same loss; its advantage differs (`advantages.gpg`).
    Source: Williams 1992; GPG: Chu et al. 2025.
    """
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T)
    return -advantage_T * policy_logprob_T


def ppo_clip(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """L_t = max(-A r, -A clip(r, 1 - low, 1 + high)) with r = pi / mu; at most |A| dual; low in [0, 1).

    `dual` > 1 bounds the ratio for negative advantages; for positive ones the loss is negative, so it never
    acts.
    Source: Schulman et al. 2017; separate bounds: Yu et al. 2025 (DAPO); dual clip: Ye et al. 2020.
    """
    ratio_T = _ratio(policy_logprob_T, sampler_logprob_T, advantage_T)
    _check_clip(low, high)
    loss_T = torch.maximum(-advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - low, 1 + high))
    if dual is not None:
        require(dual > 1, "dual", dual, "above 1")
        loss_T = torch.minimum(loss_T, advantage_T.abs() * dual)
    return loss_T


def clipped(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Find the tokens without gradient from `ppo_clip`, their ratio clipped, bool [T]."""
    ratio_T = _ratio(policy_logprob_T, sampler_logprob_T, advantage_T)
    _check_clip(low, high)
    return ((advantage_T > 0) & (ratio_T > 1 + high)) | ((advantage_T < 0) & (ratio_T < 1 - low))


def cispo(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, low: float, high: float
) -> Tensor:
    """L_t = -sg(clip(r, 1 - low, 1 + high)) A log pi: the ratio is clipped, but no gradient is dropped.

    low is in [0, 1]; 1 sets no lower bound, as in the paper.
    Source: MiniMax 2025, "MiniMax-M1" (CISPO).
    """
    ratio_T = _ratio(policy_logprob_T, sampler_logprob_T, advantage_T)
    require(0 <= low <= 1, "low", low, "between 0 and 1")
    require(high > 0, "high", high, "above 0")
    return ratio_T.detach().clamp(1 - low, 1 + high) * reinforce(policy_logprob_T, advantage_T)


def sapo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    positive: float,
    negative: float,
) -> Tensor:
    """L_t = -A (4 / tau) sigmoid(tau (r - 1)), a soft gate; tau by the advantage's sign.

    At r = 1 its gradient is that of REINFORCE, whatever tau: `positive` where A > 0 (verl's default is 1.0),
    `negative` elsewhere (1.05).
    Source: Gao et al. 2025, "Soft adaptive policy optimization".
    """
    require(positive > 0, "positive", positive, "above 0")
    require(negative > 0, "negative", negative, "above 0")
    ratio_T = _ratio(policy_logprob_T, sampler_logprob_T, advantage_T)
    tau_T = _by_sign(advantage_T, positive, negative)
    return -advantage_T * torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T


def dppo_tv(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    low: float,
    high: float,
    cap: float,
) -> Tensor:
    """L_t = -sg(min(r, cap)) A log pi where |pi - mu| is inside the bound or shrinks, else 0.

    The bound is on the change of the token's probability (its part of the total variation), not on the ratio,
    which is noisy for rare tokens: high where A > 0, low >= 0 where A < 0. The paper recommends cap = 20;
    verl's default is in effect 3.
    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (DPPO).
    """
    clipped_T = dppo_tv_clipped(policy_logprob_T, sampler_logprob_T, advantage_T, low=low, high=high)
    return _dppo(policy_logprob_T, sampler_logprob_T, advantage_T, clipped_T, cap)


def dppo_kl(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    low: float,
    high: float,
    cap: float,
) -> Tensor:
    """As `dppo_tv`, with mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)): KL of this token or not."""
    clipped_T = dppo_kl_clipped(policy_logprob_T, sampler_logprob_T, advantage_T, low=low, high=high)
    return _dppo(policy_logprob_T, sampler_logprob_T, advantage_T, clipped_T, cap)


def dppo_tv_clipped(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Find the tokens that get no gradient from `dppo_tv`: outside the bound and moving away, bool [T]."""
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T)
    divergence_T = (policy_logprob_T.detach().exp() - sampler_logprob_T.exp()).abs()
    return _moves_out(policy_logprob_T, sampler_logprob_T, advantage_T, divergence_T, low=low, high=high)


def dppo_kl_clipped(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Find the tokens that get no gradient from `dppo_kl`: outside the bound and moving away, bool [T]."""
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T)
    policy_T, sampler_T = policy_logprob_T.detach().exp(), sampler_logprob_T.exp()
    # verl's 1e-8: the other tokens have probability 0 if this one is certain.
    other_T = ((1 - sampler_T + 1e-8) / (1 - policy_T + 1e-8)).log()
    divergence_T = sampler_T * (sampler_logprob_T - policy_logprob_T.detach()) + (1 - sampler_T) * other_T
    return _moves_out(policy_logprob_T, sampler_logprob_T, advantage_T, divergence_T, low=low, high=high)


def dro(policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, beta: float) -> Tensor:
    """L_t = -A log pi + beta / 2 (log pi - log mu)^2.

    Source: Richemond et al. 2024, "Offline regularised reinforcement learning" (DRO).
    """
    require(beta > 0, "beta", beta, "above 0")
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T)
    square_T = (policy_logprob_T - sampler_logprob_T).square()
    return reinforce(policy_logprob_T, advantage_T) + 0.5 * beta * square_T


def covariance(policy_logprob_T: Tensor, advantage_T: Tensor) -> Tensor:
    """(A - mean A) (log pi - mean log pi) per token, without gradient.

    The means are over the given tokens: pass the whole optimizer step, never one micro-batch, or the
    selections below depend on the split.
    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models".
    """
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T)
    logprob_T = policy_logprob_T.detach()
    return (advantage_T - advantage_T.mean()) * (logprob_T - logprob_T.mean())


def clip_cov_selection(
    covariance_T: Tensor,
    clipped_T: Tensor,
    *,
    fraction: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> Tensor:
    """Clip-Cov: the tokens to exclude from `ppo_clip` to preserve entropy, bool [T].

    max(1, int(fraction T)) tokens, or all candidates if fewer, sampled uniformly from the tokens that are not
    clipped and have a covariance strictly between low and high. The covariance is that of the whole optimizer
    step. verl's defaults: fraction 2e-4, at most 1, low 1, high 5, with torch's global generator.
    """
    check_shapes(covariance_T=covariance_T, clipped_T=clipped_T)
    require(low < high, "low", low, f"below high, which is {high}")
    inside_T = (covariance_T > low) & (covariance_T < high) & ~clipped_T
    candidate_N = inside_T.nonzero()[:, 0]
    order_N = torch.randperm(len(candidate_N), generator=generator, device=generator.device)
    return _marked(inside_T, candidate_N[order_N.to(candidate_N.device)], fraction)


def kl_cov_selection(covariance_T: Tensor, *, fraction: float) -> Tensor:
    """KL-Cov: the max(1, int(fraction T)) tokens of largest covariance, bool [T]; of equal ones the first.

    The covariance is that of the whole optimizer step; verl's default fraction is 2e-4, and it is at most 1.
    """
    return _marked(covariance_T, covariance_T.argsort(descending=True, stable=True), fraction)


def kl_cov(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    selected_T: Tensor,
    *,
    coefficient: float,
) -> Tensor:
    """L_t = -A r, plus coefficient |log r| for the selected tokens; coefficient >= 0.

    The selection is that of `kl_cov_selection`; verl's default coefficient is 0.1.
    Source: as `covariance`.
    """
    require(coefficient >= 0, "coefficient", coefficient, "at least 0")
    check_shapes(policy_logprob_T=policy_logprob_T, selected_T=selected_T)
    ratio_T = _ratio(policy_logprob_T, sampler_logprob_T, advantage_T)
    distance_T = (policy_logprob_T - sampler_logprob_T).abs()
    return -advantage_T * ratio_T + coefficient * distance_T * selected_T


def sequence_log_ratio(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, segment_T: Tensor, num_segments: int
) -> Tensor:
    """Mean of log(pi / mu) over each token's segment, [T]: the log of GSPO's ratio."""
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T, segment_T=segment_T)
    return segment_mean(policy_logprob_T - sampler_logprob_T, segment_T, num_segments)[segment_T]


def gspo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """L_t = max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean over the segment of log(pi / mu)).

    The gradient flows through the mean. The paper's bounds are about 3e-4, since a mean moves little; low is
    in [0, 1).
    Source: Zheng et al. 2025, "Group sequence policy optimization".
    """
    mean_T = sequence_log_ratio(policy_logprob_T, sampler_logprob_T, segment_T, num_segments)
    return ppo_clip(mean_T, torch.zeros_like(mean_T), advantage_T, low=low, high=high)


def gspo_token(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """As `gspo` in value, with s_t = sg(s) pi / sg(pi): each token's gradient is its own.

    The same gradient as `gspo` where a segment has one advantage and one weight per token; verl's form. The
    log of s_t is at most 10, as there.
    """
    mean_T = sequence_log_ratio(policy_logprob_T, sampler_logprob_T, segment_T, num_segments)
    log_T = policy_logprob_T - policy_logprob_T.detach() + mean_T.detach()
    bounded_T = log_T.clamp(max=MAX_TOKEN_LOG_RATIO)
    return ppo_clip(bounded_T, torch.zeros_like(mean_T), advantage_T, low=low, high=high)


def gmpo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """L_b = -mean(A) exp(mean of d'), the geometric mean of ratios clipped per token; each token has its L_b.

    d = log(pi / mu); d' = min(d, high) where A > 0, max(d, -low) where A < 0, and 0 where A = 0. With
    `weights.sequence_mean` the sum is the mean over segments, as in verl (`geo_mean`). The paper's bounds are
    0.4 each; low is at least 0.
    Source: Zhao et al. 2025, "Geometric-mean policy optimization".
    """
    require(low >= 0, "low", low, "at least 0")
    require(high > 0, "high", high, "above 0")
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T, segment_T=segment_T)
    log_T, sign_T = log_ratio(policy_logprob_T, sampler_logprob_T), advantage_T.sign()
    kept_T = sign_T * torch.minimum(sign_T * log_T, sign_T * log_T.clamp(-low, high))
    ratio_B = segment_mean(kept_T, segment_T, num_segments).exp()
    return -(segment_mean(advantage_T, segment_T, num_segments) * ratio_B)[segment_T]


def topr(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
) -> Tensor:
    """L_t = -w A log pi; w = 1 for A > 0, and for A < 0 the segment's ratio, at most 1, without gradient.

    Good sequences are imitated however off-policy they are; bad ones are pushed down only while the policy
    still samples them, so neither sign needs on-policy data.
    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE".
    """
    check_shapes(
        policy_logprob_T=policy_logprob_T,
        sampler_logprob_T=sampler_logprob_T,
        advantage_T=advantage_T,
        segment_T=segment_T,
    )
    total_B = segment_sum(policy_logprob_T.detach() - sampler_logprob_T, segment_T, num_segments)
    weight_T = total_B.clamp(max=0).exp()[segment_T]
    tapered_T = advantage_T.clamp(min=0) + weight_T * advantage_T.clamp(max=0)
    return reinforce(policy_logprob_T, tapered_T)


def value_loss(
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    *,
    clip: float | None,
    coefficient: float = 0.5,
) -> Tensor:
    """L_t = coefficient max((v - R)^2, (clip(v, V - c, V + c) - R)^2); the first alone without a clip.

    V = `old_value_T`, from when the advantages were estimated. verl's clip is 0.5; slime's coefficient is 1.
    Source: Schulman et al. 2017, in the form of their code.
    """
    require(coefficient > 0, "coefficient", coefficient, "above 0")
    check_shapes(value_T=value_T, old_value_T=old_value_T, return_T=return_T)
    square_T = (value_T - return_T).square()
    if clip is not None:
        square_T = torch.maximum(square_T, _clipped_square(value_T, old_value_T, return_T, clip))
    return coefficient * square_T


def value_clipped(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float) -> Tensor:
    """Find the tokens without gradient from `value_loss`, their value clipped, bool [T]."""
    check_shapes(value_T=value_T, old_value_T=old_value_T, return_T=return_T)
    return _clipped_square(value_T, old_value_T, return_T, clip) > (value_T - return_T).square()


def _clipped_square(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, clip: float) -> Tensor:
    require(clip > 0, "clip", clip, "above 0")
    return (value_T.clamp(old_value_T - clip, old_value_T + clip) - return_T).square()


def _with_clipped(
    policy_N: Tensor, start_N: Tensor, advantage_N: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    low, high, dual = options["clip_low"], options["clip_high"], options.get("dual_clip")
    loss_N = ppo_clip(policy_N, start_N, advantage_N, low=low, high=high, dual=dual)
    return loss_N, clipped(policy_N.detach(), start_N, advantage_N, low=low, high=high)


def _gspo_with_clipped(t: LossTerms, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    function = gspo_token if options["gradient"] == "token" else gspo
    bounds = {"low": options["clip_low"], "high": options["clip_high"]}
    loss_N = function(t.policy_N, t.start_N, t.advantage_N, t.segment_N, t.num_segments, **bounds)
    mean_N = sequence_log_ratio(t.policy_N.detach(), t.start_N, t.segment_N, t.num_segments)
    return loss_N, clipped(mean_N, torch.zeros_like(mean_N), t.advantage_N, **bounds)


def _dppo_with_clipped(
    policy_N: Tensor, start_N: Tensor, advantage_N: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    tv = options["divergence"] == "tv"
    loss, outside = (dppo_tv, dppo_tv_clipped) if tv else (dppo_kl, dppo_kl_clipped)
    low, high = options["clip_low"], options["clip_high"]
    loss_N = loss(policy_N, start_N, advantage_N, low=low, high=high, cap=options["cap"])
    return loss_N, outside(policy_N.detach(), start_N, advantage_N, low=low, high=high)


def _ratio(policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor) -> Tensor:
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T)
    return log_ratio(policy_logprob_T, sampler_logprob_T).exp()


def _check_clip(low: float, high: float) -> None:
    require(0 <= low < 1, "low", low, "at least 0 and below 1")
    require(high > 0, "high", high, "above 0")


def _by_sign(advantage_T: Tensor, positive: float, negative: float) -> Tensor:
    return torch.full_like(advantage_T, negative).masked_fill(advantage_T > 0, positive)


def _dppo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    clipped_T: Tensor,
    cap: float,
) -> Tensor:
    require(cap > 0, "cap", cap, "above 0")
    ratio_T = log_ratio(policy_logprob_T.detach(), sampler_logprob_T).exp()
    return ratio_T.clamp(max=cap) * ~clipped_T * reinforce(policy_logprob_T, advantage_T)


def _moves_out(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    divergence_T: Tensor,
    *,
    low: float,
    high: float,
) -> Tensor:
    require(low >= 0, "low", low, "at least 0")
    require(high > 0, "high", high, "above 0")
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T)
    back_T = advantage_T * (policy_logprob_T.detach() - sampler_logprob_T) <= 0
    # Not `>`: rounding can leave a probability above 1, with a divergence of NaN; verl clips it, too.
    return ~(back_T | (divergence_T <= _by_sign(advantage_T, high, low)))


def _marked(like_T: Tensor, order_N: Tensor, fraction: float) -> Tensor:
    """True at the first max(1, int(fraction T)) of some positions, or at all if there are fewer."""
    require(0 < fraction <= 1, "fraction", fraction, "above 0 and at most 1")
    count = max(int(fraction * len(like_T)), 1)
    return torch.zeros_like(like_T, dtype=torch.bool).index_fill(0, order_N[:count], True)
