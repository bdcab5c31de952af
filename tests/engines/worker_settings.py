"""Settings of the worker of a server."""

from __future__ import annotations

from millrace.engines.server_settings import ServerSettings

SETTINGS = ServerSettings(
    kind="server",
    longest=64,
    max_requests=2,
    max_batch_tokens=64,
    top_k=0,
    dtype="float32",
    threads=1,
    on_gpu=False,
    start_s=60,
    timeout_s=60,
    load_s=60,
)
