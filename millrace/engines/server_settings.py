"""Settings of a server and its worker, which both the trainer and the worker read. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Environment variable of our server with its admin token.
TOKEN = "MILLRACE_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the worker of one server; JSON-compatible.

    Attributes:
        kind: the server's program.
        url: address of a given server; empty to start one.
        token: of the given server; empty if it needs none.
        python: interpreter that runs the started server; empty for this one.
        arguments: further command line arguments of the started server.
        longest: tokens of the longest sequence.
        max_requests: requests that are sent to the server at the same time.
        max_batch_tokens: tokens of one forward.
        top_k: candidates of a token in training; 0 is the vocabulary.
        dtype: of the weights.
        threads: CPU threads of the started server.
        on_gpu: whether the started server computes on a GPU.
        start_s: deadline for the start.
        timeout_s: deadline for replies that need no computation.
        load_s: deadline for a weight update.
        weights_folder: folder for weight updates that trainer and server share; empty for shared memory.
    """

    kind: Literal["server", "vllm", "sglang"]
    url: str = ""
    token: str = ""
    python: str = ""
    arguments: Sequence[str] = ()
    longest: int
    max_requests: int
    max_batch_tokens: int
    top_k: int
    dtype: str
    threads: int
    on_gpu: bool
    start_s: float
    timeout_s: float
    load_s: float
    weights_folder: str = ""

    @property
    def interpreter(self) -> str:
        """Path of the Python that runs the started server."""
        return self.python or sys.executable
