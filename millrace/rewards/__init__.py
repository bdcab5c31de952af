"""Rewards: map a completion to an `Outcome`.

`text` scores in this process, `isolated` in worker processes (`process`, `reward_worker`, `verifiers`).
`combine` computes the weighted sum of several rewards. An outcome is a score, an invalid answer or a failure
of the reward itself; a failure is never a score of zero.
"""
