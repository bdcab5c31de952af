"""The referee: small decision problems solved exactly, to judge the estimators of `algorithms` by.

numpy and scipy only. Nothing here imports `algorithms`, because a referee that shares code with a player is
no referee; only tests put the two together.
"""
