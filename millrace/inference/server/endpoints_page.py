"""`/docs`: all endpoints on one page without scripts, generated from the OpenAPI schema."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from millrace.inference.server.limits import OPEN, STEERING

# The browser loads nothing and runs no script, whatever the page contains.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}"
)


def endpoints_page(app: FastAPI) -> Callable[[], HTMLResponse]:
    """Return a route that serves the page of `app`, generated at the first request."""
    written: list[str] = []

    def page() -> HTMLResponse:
        if not written:
            written.append(write(app.openapi()))
        return HTMLResponse(written[0], headers=HEADERS)

    return page


def write(schema: dict[str, Any]) -> str:
    """Generate the page of an OpenAPI schema."""
    sections = [
        _section(method.upper(), path, operation, schema)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>millrace: endpoints</title>'
        f"<style>{STYLE}</style></head><body><h1>Endpoints</h1>"
        "<p>Bodies are JSON, sent with <code>Content-Type: application/json</code>. A token is sent as "
        "<code>Authorization: Bearer TOKEN</code>. The same as a schema: <code>/openapi.json</code>.</p>"
        f"{''.join(sections)}</body></html>"
    )


def _section(method: str, path: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    needs = "no token" if path in OPEN else "the admin token" if path in STEERING else "the token"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    rows = "".join(_rows(_resolve(body, schema), schema)) if body else ""
    table = f"<table><tr><th>field</th><th>type</th><th>default</th></tr>{rows}</table>" if rows else ""
    about = escape(operation.get("description", ""))
    return f"<h2><code>{method} {escape(path)}</code></h2><p>{about} Needs {needs}.</p>{table}"


def _rows(body: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    required = body.get("required", [])
    rows = []
    for name, field in body.get("properties", {}).items():
        default = "required" if name in required else escape(repr(field.get("default")))
        kind = escape(_kind(field, schema))
        rows.append(f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{default}</td></tr>")
    return rows


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """A type in few words: `integer or null`, `list of string`, `one of 'keep', 'recompute'`."""
    field = _resolve(field, schema)
    if "anyOf" in field:
        return " or ".join(_kind(one, schema) for one in field["anyOf"])
    if "enum" in field:
        return "one of " + ", ".join(map(repr, field["enum"]))
    if "const" in field:
        return repr(field["const"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'], schema)}"
    if field.get("type") == "object" and "properties" in field:
        return "object with " + ", ".join(field["properties"])
    return str(field.get("type", "any"))


def _resolve(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in field:
        return field
    found: dict[str, Any] = schema["components"]["schemas"][field["$ref"].rsplit("/", 1)[1]]
    return found
