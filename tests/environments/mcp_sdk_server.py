"""A server made with the protocol's SDK: `python mcp_sdk_server.py`, or `... http`, which prints its port."""

from __future__ import annotations

import socket
import sys

import uvicorn
from mcp.server import MCPServer
from starlette.responses import PlainTextResponse

server = MCPServer("shop")
TOTAL = {"items": 0}


@server.tool()
def add(count: int, fruit: str = "apples") -> str:
    """Put fruit into the basket.

    Args:
        count: how many
    """
    if count < 0:
        raise ValueError("take none less")
    TOTAL["items"] += count
    return f"{TOTAL['items']} {fruit}"


def guarded(app, token):
    async def run(scope, receive, send):
        if (
            scope["type"] == "http"
            and dict(scope["headers"]).get(b"authorization") != f"Bearer {token}".encode()
        ):
            await PlainTextResponse("no", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return run


if __name__ == "__main__":
    if sys.argv[1:2] != ["http"]:
        server.run()
    else:
        app = server.streamable_http_app()
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(guarded(app, sys.argv[2]) if len(sys.argv) > 2 else app, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])
