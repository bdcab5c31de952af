"""Settings of the arithmetic: what is better than expected, the loss of a token, what keeps the policy close.

Each `kind` is one function of `millrace.algorithms`; `run/build_algorithm.py` passes the values on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from millrace.config.section import Section, check_function, given_in

Share = Annotated[float, Field(ge=0, le=1)]
FunctionName = Annotated[str, AfterValidator(check_function)]
FunctionReference = Annotated[
    FunctionName,
    Field(description="module:function or path/to/file.py:function; docs/plugins.md has its inputs"),
]
FunctionOptions = Annotated[
    dict[str, Any], Field(default_factory=dict, description="further arguments of the function")
]


GroupCredit = Annotated[
    Literal["episode", "return_to_go", "turn_index", "anchor", "progress"],
    Field(
        description="what a turn is credited with: the episode's advantage; the rewards from that turn on; "
        "each reward against its group's at the same turn index (biased); the episode's advantage and a "
        "comparison among turns of its group in equal states (GiGPO), or changes of progress (biased)"
    ),
]
GaeCredit = Annotated[
    Literal["episode", "gae_turn"],
    Field(description="the steps of lam: the tokens of the episode, or its turns (gae_turn)"),
]
TurnDiscount = Annotated[
    Share, Field(description="discount per turn of later turns' rewards; a group's outcome has none")
]
StateWeight = Annotated[
    PositiveFloat,
    Field(
        description="weight of what is added to the episode's advantage: with credit anchor the comparison "
        "among equal states, with progress its changes"
    ),
]


class GroupAdvantage(Section):
    """Reward minus the mean of the prompt's group: GRPO, and Dr. GRPO without the division."""

    kind: Literal["group"] = "group"
    baseline: Literal["mean", "others"] = Field(
        "mean", description="mean of the whole group, or of the other samples (with their deviation)"
    )
    divide_by_std: bool = Field(
        True, description="divide by the group's standard deviation (GRPO); false is Dr. GRPO"
    )
    epsilon: PositiveFloat = Field(1e-6, description="added to the standard deviation")
    lone_reward: bool = Field(
        False, description="a group with one usable sample gets its raw reward, as in verl; false gives it 0"
    )
    whiten: bool = Field(False, description="then mean 0 and variance 1 over the batch's tokens, as in AReaL")
    credit: GroupCredit = "episode"
    turn_discount: TurnDiscount = 1.0
    state_weight: StateWeight = 1.0


class LeaveOneOutAdvantage(Section):
    """Reward minus the mean of the group's other samples: RLOO."""

    kind: Literal["leave_one_out"]
    credit: GroupCredit = "episode"
    turn_discount: TurnDiscount = 1.0
    state_weight: StateWeight = 1.0


class ReinforcePlusPlusAdvantage(Section):
    """Discounted returns of each token, whitened over the batch: REINFORCE++."""

    kind: Literal["reinforce_plus_plus"]
    gamma: Share = Field(1.0, description="discount per token")


class ReinforcePlusPlusBaselineAdvantage(Section):
    """Reward minus the mean of the group, whitened over the batch's tokens."""

    kind: Literal["reinforce_plus_plus_baseline"]


class GreedyBaselineAdvantage(Section):
    """Reward minus that of the greedy answer, which is sampled besides: ReMax."""

    kind: Literal["greedy_baseline"]


class LengthWeightedAdvantage(Section):
    """Reward minus the group's mean weighted by length: OPO."""

    kind: Literal["length_weighted"]


class GpgAdvantage(Section):
    """Reward minus the mean of the group, scaled up where samples earn nothing: GPG."""

    kind: Literal["gpg"]


class PassAtKAdvantage(Section):
    """Only the best sample of a group is rewarded, by its lead over the second: pass@k."""

    kind: Literal["pass_at_k"]
    divide_by_std: bool = Field(True, description="divide by the group's standard deviation")


class GroupDecoupledAdvantage(Section):
    """GRPO for each reward apart, summed by the rewards' weights and whitened: GDPO."""

    kind: Literal["group_decoupled"]


class TokenBaselineAdvantage(Section):
    """Return minus the baseline of least variance at each position of the group."""

    kind: Literal["token_baseline"]
    align: Literal["position", "action"] = Field(
        "position",
        description="which tokens of a group share a baseline: equal place in the answer, or equal count of "
        "the policy's own tokens (several turns)",
    )


class ReturnsAdvantage(Section):
    """Discounted returns of each token, without any baseline: REINFORCE."""

    kind: Literal["returns"]
    gamma: Share = Field(1.0, description="discount per token")


class GaeAdvantage(Section):
    """Generalised advantage estimation from the critic's values: PPO; with two lambdas VAPO."""

    kind: Literal["gae"]
    gamma: Share = Field(1.0, description="discount per token")
    lam: Share = Field(1.0, description="0 trusts the critic, 1 the returns")
    length_adaptive: PositiveFloat | None = Field(
        None, description="lam becomes 1 - 1 / (this x length) for each answer (VAPO: 0.05); null keeps lam"
    )
    critic_lam: Share | None = Field(
        None, description="lambda of the returns the critic learns; null takes the policy's"
    )
    bootstrap_truncated: bool = Field(
        False, description="an answer that ran out of tokens goes on with the critic's value, not with 0"
    )
    whiten: bool = Field(True, description="mean 0 and variance 1 over the batch's tokens")
    credit: GaeCredit = "episode"
    turn_discount: TurnDiscount = 1.0


class NStepAdvantage(Section):
    """The rewards of n tokens and the critic's value after them, minus the value before."""

    kind: Literal["n_step"]
    gamma: Share = Field(1.0, description="discount per token")
    num_steps: PositiveInt = Field(description="n, the rewards summed before the critic's value")
    whiten: bool = Field(True, description="mean 0 and variance 1 over the batch's tokens")


class VTraceAdvantage(Section):
    """Returns corrected for the distance between sampler and policy, from the critic's values: V-trace."""

    kind: Literal["v_trace"]
    gamma: Share = Field(1.0, description="discount per token")
    lam: Share = Field(1.0, description="0 trusts the critic, 1 the returns")
    max_rho: PositiveFloat = Field(1.0, description="bound of the weight of a token's own error")
    max_c: PositiveFloat = Field(1.0, description="bound of the weight that carries later errors back")
    whiten: bool = Field(True, description="mean 0 and variance 1 over the batch's tokens")

    @model_validator(mode="after")
    def _bounds(self) -> VTraceAdvantage:
        if self.max_c > self.max_rho:
            raise ValueError(f"max_c {self.max_c:g} must not be above max_rho {self.max_rho:g}")
        return self


class TeacherAdvantage(Section):
    """The teacher's log-probability of each token minus the sampler's: on-policy distillation."""

    kind: Literal["teacher"]
    path: str = Field(description="the teacher: a model folder, a checkpoint, or a run (its best checkpoint)")
    gamma: Share = Field(0.0, description="how much of what later tokens cost is charged to this one")


class FunctionAdvantage(Section):
    """Your own function of rewards and groups."""

    kind: Literal["function"]
    function: FunctionReference
    options: FunctionOptions


AdvantageConfig = Annotated[
    GroupAdvantage
    | LeaveOneOutAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | GreedyBaselineAdvantage
    | LengthWeightedAdvantage
    | GpgAdvantage
    | PassAtKAdvantage
    | GroupDecoupledAdvantage
    | TokenBaselineAdvantage
    | ReturnsAdvantage
    | GaeAdvantage
    | NStepAdvantage
    | VTraceAdvantage
    | TeacherAdvantage
    | FunctionAdvantage,
    Field(discriminator="kind"),
]
# Advantages that compare the samples of one prompt.
COMPARING = (
    *("group", "leave_one_out", "reinforce_plus_plus_baseline", "length_weighted", "gpg", "pass_at_k"),
    *("group_decoupled", "token_baseline"),
)
# Sections of advantages that can credit single turns with a comparison of the group.
TURN_SECTIONS = (GroupAdvantage, LeaveOneOutAdvantage)
# The words of `credit` besides `episode`, and the kinds of advantage that have them.
CREDITS = {
    **dict.fromkeys(("return_to_go", "turn_index", "anchor", "progress"), ("group", "leave_one_out")),
    "gae_turn": ("gae",),
}
# Advantages that need a critic.
VALUED = ("gae", "n_step", "v_trace")
# Advantages made by a scan over the tokens.
SCANNED = (*VALUED, "reinforce_plus_plus", "greedy_baseline", "token_baseline", "returns", "teacher")


class PpoClipLoss(Section):
    """The clipped surrogate objective of PPO."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="the ratio is clipped at 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="bound of the loss for negative advantages; null is off"
    )


class ReinforceLoss(Section):
    """Minus advantage times log-probability, without a ratio."""

    kind: Literal["reinforce"]


class GspoLoss(Section):
    """PPO's clipped objective on the ratio of whole sequences: GSPO."""

    kind: Literal["gspo"]
    clip_low: float = Field(3e-4, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
    clip_high: PositiveFloat = Field(4e-4, description="the ratio is clipped at 1 + clip_high")
    gradient: Literal["sequence", "token"] = Field(
        "sequence", description="through the sequence's mean, or through each token alone (GSPO-token)"
    )


class GmpoLoss(Section):
    """The geometric mean of a sequence's ratios, each clipped before: GMPO."""

    kind: Literal["gmpo"]
    clip_low: PositiveFloat = Field(0.4, description="the log-ratio is clipped at -clip_low")
    clip_high: PositiveFloat = Field(0.4, description="the log-ratio is clipped at clip_high")


class CispoLoss(Section):
    """Clipped importance weights that keep every token's gradient: CISPO."""

    kind: Literal["cispo"]
    clip_low: float = Field(0.2, gt=0, le=1, description="the weight is at least 1 - clip_low")
    clip_high: PositiveFloat = Field(0.28, description="the weight is at most 1 + clip_high")


class SapoLoss(Section):
    """A smooth gate in place of the clip: SAPO."""

    kind: Literal["sapo"]
    positive: PositiveFloat = Field(1.0, description="steepness of the gate for positive advantages")
    negative: PositiveFloat = Field(1.05, description="steepness of the gate for negative advantages")


class DppoLoss(Section):
    """A trust region in probability, not in ratio: DPPO."""

    kind: Literal["dppo"]
    divergence: Literal["tv", "kl"] = Field("tv", description="difference of probabilities, or binary KL")
    clip_low: float = Field(0.2, gt=0, lt=1, description="bound where the advantage is negative")
    clip_high: float = Field(0.2, gt=0, lt=1, description="bound where the advantage is positive")
    cap: PositiveFloat = Field(20.0, description="bound of the importance weight")


class DroLoss(Section):
    """Log-probability with a quadratic pull to the sampler: DRO."""

    kind: Literal["dro"]
    beta: PositiveFloat = Field(0.1, description="strength of the pull")


class ToprLoss(Section):
    """Positive examples as they are, negative ones by a truncated sequence ratio: TOPR."""

    kind: Literal["topr"]


class ClipCovLoss(Section):
    """PPO's clipped objective without some tokens that would lower the entropy most: Clip-Cov."""

    kind: Literal["clip_cov"]
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="the ratio is clipped at 1 + clip_high")
    fraction: float = Field(2e-4, gt=0, le=1, description="fraction of tokens left out")
    covariance_low: float = Field(1.0, description="tokens are chosen from above this covariance")
    covariance_high: float = Field(5.0, description="tokens are chosen from below this covariance")

    @model_validator(mode="after")
    def _band(self) -> ClipCovLoss:
        if not self.covariance_low < self.covariance_high:
            raise ValueError(
                f"covariance_low {self.covariance_low:g} must lie below covariance_high "
                f"{self.covariance_high:g}"
            )
        return self


class KlCovLoss(Section):
    """The plain surrogate with a penalty on the tokens that would lower the entropy most: KL-Cov."""

    kind: Literal["kl_cov"]
    fraction: float = Field(2e-4, gt=0, le=1, description="fraction of tokens penalised")
    coefficient: PositiveFloat = Field(0.1, description="strength of the penalty")


class FunctionLoss(Section):
    """Your own function of log-probabilities and advantages, for each token."""

    kind: Literal["function"]
    function: FunctionReference
    options: FunctionOptions


LossConfig = Annotated[
    PpoClipLoss
    | ReinforceLoss
    | GspoLoss
    | GmpoLoss
    | CispoLoss
    | SapoLoss
    | DppoLoss
    | DroLoss
    | ToprLoss
    | ClipCovLoss
    | KlCovLoss
    | FunctionLoss,
    Field(discriminator="kind"),
]

# Settings of a loss that act at a ratio of 1 too.
ACTING = {
    "clip_cov": ("fraction", "covariance_low", "covariance_high"),
    "gspo": ("gradient",),
    "function": ("function", "options"),
}


class RejectionConfig(Section):
    """Leave out what lies too far from the sampler, by an estimate of the divergence."""

    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="minus the log-ratio, half its square, or ratio - 1 - log-ratio"
    )
    level: Literal["token", "sum", "mean", "max"] = Field(
        "token", description="each token alone, or the sequence by its sum, mean or largest"
    )
    low: PositiveFloat | None = Field(None, description="k1 only: lower bound of the ratio; null is 1 / high")
    high: PositiveFloat = Field(description="upper bound: of the ratio for k1, of the estimate for k2 and k3")

    @model_validator(mode="after")
    def _bounds(self) -> RejectionConfig:
        if self.low is not None and self.estimator != "k1":
            raise ValueError(f"low has no effect with estimator {self.estimator}; remove it")
        if self.estimator == "k1" and (self.low or 1 / self.high) >= self.high:
            raise ValueError(f"low {self.low or 1 / self.high:g} must lie below high {self.high:g}")
        if self.estimator == "k1" and self.level == "max":
            raise ValueError("the largest of a sequence is taken of k2 or k3; set estimator to one of them")
        return self


class ImportanceCorrection(Section):
    """A weight of a token's loss by its importance ratio, and rejection of what is too far off."""

    kind: Literal["importance"] = "importance"
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="one weight a token, or one a sequence (product, or geometric mean)"
    )
    action: Literal["truncate", "mask", "none"] = Field(
        "truncate",
        description="weights above high become high (TIS), those outside become 0 (IcePop), or all are 1, "
        "for reject alone",
    )
    low: NonNegativeFloat = Field(0.0, description="lower bound of the weight")
    high: PositiveFloat = Field(2.0, description="upper bound of the weight")
    normalise: bool = Field(False, description="divide by the mean weight of the optimizer step")
    reject: RejectionConfig | None = Field(
        None, description="leave out tokens or sequences that are too far off; null keeps them"
    )

    @model_validator(mode="after")
    def _effects(self) -> ImportanceCorrection:
        idle = given_in(self) & {"level", "low", "high", "normalise"}
        if self.action == "none" and idle:
            raise ValueError(f"{min(idle)} has no effect with action none, where weights are 1; remove it")
        if self.action == "none" and self.reject is None:
            raise ValueError("action none corrects nothing without reject; set reject, or another action")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must lie below high {self.high:g}")
        if self.action == "truncate" and self.low:
            raise ValueError("low has no effect with action truncate; remove it, or set action: mask")
        return self


class FunctionCorrection(Section):
    """Your own function of log-probabilities, a weight for each token."""

    kind: Literal["function"]
    function: FunctionReference
    options: FunctionOptions


CorrectionConfig = Annotated[ImportanceCorrection | FunctionCorrection, Field(discriminator="kind")]


class KlConfig(Section):
    """A penalty on the distance from the reference policy."""

    coefficient: PositiveFloat = Field(description="factor of the penalty")
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "full"] = Field(
        "k3",
        description="estimator of the divergence, per token; + has the gradient of k2; full sums over the "
        "vocabulary",
    )
    place: Literal["loss", "reward"] = Field(
        "loss", description="added to the loss, or taken off each token's reward"
    )
    target: PositiveFloat | None = Field(
        None, description="divergence the coefficient is steered to; null keeps the coefficient"
    )
    horizon: PositiveInt = Field(
        10_000, description="sequences over which a deviation of 20 % would move the coefficient by as much"
    )
    path: str | None = Field(
        None,
        description="the reference policy: a model folder, a checkpoint, or a run (its best checkpoint); "
        "null is the weights reinforcement starts from",
    )
    offload: bool = Field(
        False,
        description="keep the reference out of the device's memory but while it scores (on a CPU in a file "
        "of the run folder)",
    )


class CriticConfig(Section):
    """The value of each state, learned beside the policy."""

    learning_rate: PositiveFloat = Field(1e-5, description="peak learning rate of the critic's own optimizer")
    clip: PositiveFloat | None = Field(
        0.5, description="a value moves at most so far from the last one; null does not clip"
    )
    coefficient: PositiveFloat = Field(0.5, description="factor of the squared error")
    warmup_steps: NonNegativeInt = Field(
        0, description="batches the critic learns from before the policy moves"
    )
    path: str | None = Field(
        None,
        description="what the critic starts from: the folder of a reward model or a language model, or a "
        "checkpoint or run (its critic if it has one); null is the weights reinforcement starts from",
    )


# The kind of a section that names none.
DEFAULT_KIND = {"advantage": "group", "policy.loss": "ppo_clip", "policy.correction": "importance"}
# Losses without a ratio to the sampler, which an importance weight of the policy over it can multiply.
WITHOUT_RATIO = ("reinforce", "function")


def with_default_kind(value: Any, key: str) -> Any:
    """A section given without its `kind` is of the default one."""
    return {"kind": DEFAULT_KIND[key], **value} if isinstance(value, dict) and "kind" not in value else value


def refuse_credit(value: Any) -> None:
    """Raise ValueError for an `advantage` section whose kind does not have the credit it names."""
    credit = value.get("credit") if isinstance(value, dict) else None
    kinds = CREDITS.get(credit) if isinstance(credit, str) else None
    if kinds and value["kind"] not in kinds:
        raise ValueError(
            f"credit {credit} goes with kind {' or '.join(kinds)}, not with {value['kind']}; change one"
        )
