"""The command and the environment of an SGLang server."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from millrace.engines.server_settings import ServerSettings

SERVER = "sglang.launch_server"
# What every server must be started with.
DETERMINISTIC = "--enable-deterministic-inference"
METRICS = "--enable-metrics"
# Tokens of its context length that SGLang uses for no sequence.
SPARE = 8
# Candidates of a token that a server returns at most, by its own default.
MAX_CANDIDATES = 4096
# With this variable, log-probabilities are those before the temperature.
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback address that was free a moment ago."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        return int(bound.getsockname()[1])


def command(settings: ServerSettings, model: Path, port: int, config: Path) -> list[str]:
    """Return the command of a server on a port of the loopback address; SGLang listens on no local socket.

    Args:
        settings: of the worker; its arguments come last and therefore win.
        model: folder with the policy's config and tokenizer; the weights come later.
        port: from `free_port`.
        config: from `write_config`.
    """
    options = {
        "--config": str(config),
        "--model-path": str(model),
        "--load-format": "dummy",
        "--served-model-name": "policy",
        "--dtype": settings.dtype,
        "--context-length": str(settings.longest + SPARE),
        "--max-running-requests": str(settings.max_requests),
        "--chunked-prefill-size": str(settings.max_batch_tokens),
        # Equal probabilities at the border are all candidates.
        "--sampling-mask-max-tokens": str(max(MAX_CANDIDATES, 2 * settings.top_k)),
        "--log-level": "warning",
        "--host": LOOPBACK,
        "--port": str(port),
    }
    pairs = [word for pair in options.items() for word in pair]
    return [settings.interpreter, "-P", "-m", SERVER, *pairs, DETERMINISTIC, METRICS, *settings.arguments]


def write_config(path: Path, token: str) -> Path:
    """Write the token to a file (JSON, which is YAML), since every user can read a command line."""
    path.touch(mode=0o600)
    path.write_text(json.dumps({"api-key": token}), encoding="utf-8")
    return path


def environment(threads: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment.

    Args:
        threads: CPU threads, unless `own` sets the variable for that.
        own: environment of this process.
    """
    changes = {ORIGINAL_LOGPROB: "false", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true"}
    return {"OMP_NUM_THREADS": str(threads), **own, **changes}
