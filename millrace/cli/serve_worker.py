"""`millrace serve-worker`: a prefill or decode worker of `millrace serve` on another machine."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated

import typer

Host = Annotated[str, typer.Option(help="Address to listen on; any but this machine's needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="MILLRACE_WORKER_TOKEN",
        help="That millrace serve has to know. By default a new one is made and printed.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one for each core.")]


def serve_worker(
    *, host: Host = "127.0.0.1", port: Port = 7000, token: Token = None, threads: Threads = None
) -> None:
    """Compute prompts or tokens for a server that has --worker with this address, until Ctrl-C."""
    import os

    from millrace.config.recipe import ConfigError
    from millrace.inference.server.address import bind, require_loopback

    try:
        if not token:
            require_loopback(host, "MILLRACE_WORKER_TOKEN")
        listening = bind(host, port)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with listening:
        from millrace.engines.remote_workers import serve_workers

        listening.listen()
        own, port = listening.getsockname()[:2]
        typer.echo(f"a worker listens at {own}:{port}; Ctrl-C ends it")
        if not token:
            token = secrets.token_urlsafe(24)
            typer.echo(
                f"token for millrace serve: {token} (new at each start; MILLRACE_WORKER_TOKEN sets one)"
            )
        cores = len(os.sched_getaffinity(0))
        serve_workers(listening, token, threads=threads or cores, tell=partial(typer.echo, err=True))
