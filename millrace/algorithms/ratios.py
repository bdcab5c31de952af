"""How far the trainer's log-probabilities lie from the sampler's, before the first update of a batch.

With x = log pi_trainer - log mu_sampler on the tokens the sampler drew. N = chosen tokens.
"""

from __future__ import annotations

from torch import Tensor


def mismatch(trainer_logprob_N: Tensor, sampler_logprob_N: Tensor) -> dict[str, float]:
    """k1 = mean(-x) and k3 = mean(e^x - 1 - x), estimates of KL(mu || pi), and the largest |x|.

    All are 0 for equal weights and equal arithmetic; rounding alone leaves about 1e-7 in float32.

    Raises:
        ValueError: there are no tokens.
    """
    if trainer_logprob_N.numel() == 0:
        raise ValueError("mismatch of no tokens is not defined")
    difference_N = (trainer_logprob_N - sampler_logprob_N).double()
    return {
        "k1": float(-difference_N.mean()),
        "k3": float((difference_N.expm1() - difference_N).mean()),
        "max": float(difference_N.abs().max()),
    }
