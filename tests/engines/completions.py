"""Completions of a server against those of our engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.types import Completion
from tests.close import close_fp32


def same_completions(found: Sequence[Completion], expected: Sequence[Completion], version: int) -> None:
    """Compare tokens, texts and candidates; log-probabilities up to rounding, all of one policy version."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
        )
        close_fp32(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs))
        assert ours.versions.tolist() == [version] * len(ours.token_ids)
        assert (ours.support is None) == (theirs.support is None)
        if ours.support is not None and theirs.support is not None:
            assert ours.support.token_ids.tolist() == theirs.support.token_ids.tolist()
            assert ours.support.counts.tolist() == theirs.support.counts.tolist()
            close_fp32(torch.tensor(ours.support.logprobs), torch.tensor(theirs.support.logprobs))
