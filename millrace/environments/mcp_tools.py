"""Tools of servers that speak the Model Context Protocol, over stdin and stdout or HTTP. No torch.

Uses the package `mcp`, the protocol's Python SDK. It resolves no reference of a schema outside the schema,
follows redirects within a server's own origin only, and gives a server no capability of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.config.environment_section import McpServerSection
from millrace.config.section import api_key
from millrace.data.functions import explain
from millrace.data.rows import DataError
from millrace.data.tool_schema import read_tools
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.tool_functions import Tool
from millrace.errors import SetupError
from millrace.observability.plain import plain_text

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import CallToolResult

# Until a server has started and listed its tools, in seconds.
START_S = 60.0
MAX_PAGES = 100
_MAX_NAME = 80
_MAX_REASON = 300


class McpConnection:
    """A connection that the first call opens, and with it a server given by its command.

    All methods are called on one event loop. A connection that was lost is opened again by the next call.
    """

    def __init__(self, server: McpServerSection) -> None:
        self._server = server
        self._open: _OpenConnection | None = None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool as text; it begins with `error:` if the server rejects the call.

        Raises:
            EnvironmentFailed: the server did not start, is lost or replied nonsense.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        try:  # half a character and NaN, which a policy may write, end the SDK's connection
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            return f"error: {error}"
        given = json.loads(text.encode("utf-8", "replace"))
        if self._open is None or self._open.has_ended:
            self._open = _OpenConnection(self._server)
        connection = self._open
        try:
            return _text(await connection.run(lambda client: client.call_tool(tool, given)))
        except Exception as error:
            code = error.code if isinstance(error, MCPError) else None
            if code == INVALID_PARAMS:
                return f"error: {plain_text(str(error), _MAX_REASON)}"
            if code == CONNECTION_CLOSED:
                connection.close()  # other failures leave it to the calls in progress
            raise EnvironmentFailed(f"MCP server {server_name(self._server)}: {_reason(error)}") from error

    async def close(self) -> None:
        """Close the connection, if there was a call; a server given by its command ends soon afterwards."""
        if self._open is not None:
            self._open.close()


_TASKS: set[asyncio.Task[None]] = set()
_T = TypeVar("_T")


def _ended(task: asyncio.Task[None]) -> None:
    _TASKS.discard(task)
    if not task.cancelled():
        task.exception()  # calls in progress raise it; without one it has no consequence


class _OpenConnection:
    """A connection in a task of its own: it has to be closed by the task that opened it."""

    def __init__(self, server: McpServerSection) -> None:
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold(server))
        # The event loop itself does not keep tasks.
        _TASKS.add(self._task)
        self._task.add_done_callback(_ended)

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or lost."""
        return self._closing.is_set() or self._task.done()

    async def run(self, work: Callable[[Client], Coroutine[Any, Any, _T]]) -> _T:
        """Return what a function of the client does, or raise why the connection ended before."""
        opened: asyncio.Future[Any] = self._client
        await asyncio.wait({opened, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            raise self._end()
        running = asyncio.ensure_future(work(self._client.result()))
        try:
            await asyncio.wait({running, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise self._end()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def close(self) -> None:
        """Close it; a server given by its command is killed if it has not ended some seconds later."""
        self._closing.set()
        if not self._client.done():  # it still opens
            self._task.cancel()

    async def closed(self) -> None:
        """Close it, and wait until it is closed."""
        self.close()
        await asyncio.wait({self._task})

    async def _hold(self, server: McpServerSection) -> None:
        async with _client(server) as client:
            self._client.set_result(client)
            await self._closing.wait()

    def _end(self) -> Exception:
        """Why the task ended."""
        error = None if self._task.cancelled() else self._task.exception()
        return error if isinstance(error, Exception) else ConnectionError("the connection was closed")


def mcp_tools(server: McpServerSection, listed: Sequence[Mapping[str, Any]]) -> Callable[[], list[Tool]]:
    """Return what makes the tools of a server for one episode; `listed` is of `list_tools`."""
    if server.shared:
        shared = _tools(listed, McpConnection(server), owns=False)
        return lambda: shared
    return lambda: _tools(listed, McpConnection(server), owns=True)


def _tools(listed: Sequence[Mapping[str, Any]], connection: McpConnection, *, owns: bool) -> list[Tool]:
    """The tools of a connection, which the first of them closes if the episode owns it."""
    return [
        Tool(definition, _call(definition, connection), connection.close if owns and not number else None)
        for number, definition in enumerate(listed)
    ]


def _call(definition: Mapping[str, Any], connection: McpConnection) -> Callable[..., Any]:
    async def call(**arguments: Any) -> str:
        return await connection.call(str(definition["function"]["name"]), arguments)

    return call


def list_tools(servers: Sequence[McpServerSection], limit_s: float = START_S) -> list[list[dict[str, Any]]]:
    """Connect to every server once, and return the tools of each as `read_tools` does.

    Raises:
        SetupError: the package `mcp` is not installed, or a server does not start, does not reply within
            `limit_s` seconds, or lacks a tool that the recipe names.
    """

    async def every() -> list[list[dict[str, Any]]]:
        return list(await asyncio.gather(*(_listed(server, limit_s) for server in servers)))

    return asyncio.run(every())


async def _listed(server: McpServerSection, limit_s: float) -> list[dict[str, Any]]:
    name = server_name(server)
    connection = _OpenConnection(server)
    try:
        async with asyncio.timeout(limit_s):
            found = await connection.run(_pages)
    except ImportError:
        raise SetupError(
            'environment.mcp_servers needs the package mcp; install it with pip install "millrace-rl[mcp]"'
        ) from None
    except SetupError:  # of its key
        raise
    except TimeoutError:
        raise SetupError(f"MCP server {name} did not list its tools within {limit_s:g} s") from None
    except Exception as error:
        raise SetupError(f"MCP server {name} did not start: {_reason(error)}") from error
    finally:
        await connection.closed()
    try:
        tools = list(read_tools(found, f"MCP server {name}"))
    except DataError as error:
        raise SetupError(f"{error}; choose others with environment.mcp_servers.tools") from error
    named = {tool["function"]["name"]: tool for tool in tools}
    if server.tools is None:
        return tools
    for wanted in server.tools:
        if wanted not in named:
            raise SetupError(
                f"MCP server {name} has no tool {wanted}, which environment.mcp_servers.tools names; it has: "
                f"{plain_text(', '.join(named), _MAX_REASON) or 'none'}"
            )
    return [named[wanted] for wanted in server.tools]


async def _pages(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ValueError(f"it listed more than {MAX_PAGES} pages of tools")


@asynccontextmanager
async def _client(server: McpServerSection) -> AsyncIterator[Client]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url is None:
        program, *arguments = server.command
        if program == "python":
            program = sys.executable
        # What the worker sees is what the recipe lets through; replies with half a character are read.
        started = StdioServerParameters(
            command=program, args=arguments, env=dict(os.environ), encoding_error_handler="replace"
        )
        async with Client(stdio_client(started), cache=None) as client:
            yield client
        return
    import httpx2

    headers = {}
    if server.api_key_env is not None:
        key = api_key(server.api_key_env, f"MCP server {server_name(server)}")
        headers["Authorization"] = f"Bearer {key}"
    # Steps have deadlines, so reading has none.
    async with (
        httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(START_S, read=None),
            event_hooks={"response": [_check_access]},
        ) as http,
        Client(streamable_http_client(server.url, http_client=http), cache=None) as client,
    ):
        yield client


async def _check_access(response: httpx2.Response) -> None:
    """Name the status of a refused request, which the SDK does not."""
    if response.status_code in (401, 403):
        raise ConnectionError(
            f"it replied {response.status_code}; set api_key_env to a variable with the token"
        )


def server_name(server: McpServerSection) -> str:
    """Return the address or the command line of a server, for messages."""
    return plain_text(server.url or " ".join(server.command), _MAX_NAME)


def _text(result: CallToolResult) -> str:
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


def _shown(block: Any) -> str:
    """A part of a result as text; what is no text is named with its size."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        resource = block.resource
        return resource.text if hasattr(resource, "text") else f"[{resource.uri}, not text]"
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return f"[{block.type} {block.mime_type}, {len(block.data)} characters of base64]"


def _reason(error: BaseException) -> str:
    """The first cause of an error in a line: the SDK raises groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    from mcp import MCPError

    if isinstance(error, MCPError | OSError):
        return plain_text(str(error), _MAX_REASON)
    return plain_text(explain(error), _MAX_REASON) if isinstance(error, Exception) else "it was cancelled"
