"""A server of the Model Context Protocol by hand, with faults: `python mcp_server.py FAULT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
INVALID_PARAMS, NOT_FOUND, INTERNAL = -32602, -32601, -32603
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": "echo", "description": "Return a text.", "inputSchema": TEXT},
    {"name": "count", "description": "Count the calls.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "large", "inputSchema": {"type": "object"}},
    {"name": "parts", "inputSchema": {"type": "object"}},
    {"name": "reject", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "broken", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "variable", "inputSchema": TEXT},
    {"name": "process", "inputSchema": {"type": "object"}},
    {"name": "half", "inputSchema": TEXT},
]
CALLS = 0


def result(name: str, arguments: dict[str, object]) -> dict[str, object]:
    global CALLS
    CALLS += 1
    if name == "die":
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "reject":
        raise ValueError("no such city")
    if name == "broken":
        raise RuntimeError("the disk is full")
    if name == "parts":
        resource = {"uri": "file:///a.txt", "text": "of a file", "mimeType": "text/plain"}
        blocks = [
            {"type": "text", "text": "first"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": resource},
            {"type": "resource_link", "uri": "file:///b.txt", "name": "b"},
        ]
        return {"content": blocks}
    if name == "process":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return {"content": [], "structuredContent": {"server": os.getpid(), "child": child.pid}}
    texts = {
        "echo": arguments.get("text"),
        "count": str(CALLS),
        "large": "begin" + "x" * 10_000_000 + "end",
        "fail": "the service is closed",
        "half": "<" * (1 + int(arguments["text"]) // 8) if name == "half" else "",
        "variable": os.environ.get(str(arguments.get("text")), "not set"),
    }
    return {"content": [{"type": "text", "text": texts[name]}], "isError": name == "fail"}


def reply(request: dict[str, object]) -> dict[str, object]:
    method, given = request["method"], request.get("params", {})
    if method == "initialize":
        info = {"name": "by hand", "version": "1"}
        return {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list" and FAULT == "tools":
        return {"tools": "none"}
    if method == "tools/list" and FAULT == "schema":
        return {
            "tools": [
                {"name": "odd", "inputSchema": {"type": "object", "properties": {"a": {"type": "date"}}}}
            ]
        }
    if method == "tools/list" and FAULT == "pages":
        return {"tools": [], "nextCursor": "again"}
    if method == "tools/list":
        start = int(given.get("cursor") or 0)
        page = {"tools": TOOLS[start : start + 3]}
        return page | ({"nextCursor": str(start + 3)} if start + 3 < len(TOOLS) else {})
    if method == "tools/call":
        return result(given["name"], given["arguments"])
    raise LookupError(method)


def main() -> None:
    if FAULT == "binary":
        sys.stdout.buffer.write(b"\xff\xfe rubbish\n\x00\n[1, 2]\n{}\n")
    if FAULT == "exit":
        sys.exit("cannot open the database")
    if FAULT == "silent":
        time.sleep(600)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        message: dict[str, object] = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            message["result"] = reply(request)
        except LookupError:
            message["error"] = {"code": NOT_FOUND, "message": "no such method"}
        except ValueError as error:
            message["error"] = {"code": INVALID_PARAMS, "message": str(error)}
        except RuntimeError as error:
            message["error"] = {"code": INTERNAL, "message": str(error)}
        print(json.dumps(message), flush=True)
    if FAULT == "stays":
        time.sleep(600)


main()
