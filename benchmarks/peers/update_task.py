"""The policy update that every side of train_step.py makes. Plain Python, so that a peer can import it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SHAPE, QUICK_SHAPE, VOCAB_SIZE = "rollout", "small", 8192
GROUPS, SAMPLES, LONGEST = 2, 8, 256
CLIP, LEARNING_RATE, BETAS, MAX_GRAD_NORM = 0.2, 1e-4, (0.9, 0.999), 1.0


@dataclass(frozen=True)
class Sample:
    """A prompt, what was drawn after it, and how good that was.

    Attributes:
        prompt: its tokens, the same for all samples of a group.
        drawn: the tokens drawn.
        logprobs: of the drawn tokens, under the weights that drew them.
        advantage: of every drawn token.
    """

    prompt: list[int]
    drawn: list[int]
    logprobs: list[float]
    advantage: float

    @property
    def tokens(self) -> list[int]:
        """All of them in order."""
        return self.prompt + self.drawn


def batch() -> list[Sample]:
    """The samples of one step: most are short, one has LONGEST tokens, four times the mean."""
    draw = random.Random("update")
    samples = []
    for _ in range(GROUPS):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(8, 24))]
        room = LONGEST - len(prompt)
        for _ in range(SAMPLES):
            count = room if not samples else min(room, max(4, round(draw.lognormvariate(3.2, 0.8))))
            drawn = [draw.randrange(VOCAB_SIZE) for _ in range(count)]
            # Fresh weights are near the uniform distribution; with this spread some ratios are clipped.
            logprobs = [draw.gauss(-math.log(VOCAB_SIZE), 0.2) for _ in drawn]
            samples.append(Sample(prompt, drawn, logprobs, draw.gauss(0, 1)))
    return samples
