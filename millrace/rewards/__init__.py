"""Rewards: from a completion to an `Outcome`.

`text` judges in this process, `isolated` hands completions to judges in child processes (`process`,
`worker`, `judges`, `wire`), `combine` adds several rewards up. An outcome is a score, an invalid answer or a
failure of the reward itself; a failure is never a score of zero.
"""
