"""The page of endpoints: complete, and without anything from elsewhere."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from millrace.inference.server.app import create_app
from millrace.inference.server.limits import Limits
from millrace.inference.server.service import GenerationService
from tests.inference.server.running import fake_served


@pytest.fixture(scope="module")
def page() -> httpx.Response:
    app = create_app(GenerationService(fake_served(), max_samples=1), Limits(token="asks"))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
        ) as client:
            return await client.get("/docs")

    return asyncio.run(get())


def section(page: httpx.Response, title: str) -> str:
    found = re.search(rf"<h2><code>{re.escape(title)}</code></h2>(.*?)(<h2>|</body>)", page.text)
    assert found, title
    return found[1]


def test_it_needs_no_token_and_shows_every_endpoint_with_its_fields(page):
    assert page.status_code == 200
    completions = section(page, "POST /v1/completions")
    assert "Continue texts. Needs the token." in completions
    assert "<td><code>max_tokens</code></td><td>integer or null</td><td>None</td>" in completions
    assert "<td><code>prompt</code></td>" in completions
    assert "<td>required</td>" in completions
    assert "Needs the admin token." in section(page, "POST /update_weights")
    assert "one of &#x27;finish&#x27;, &#x27;abort&#x27;, &#x27;keep&#x27;" in section(page, "POST /pause")
    assert "Needs no token." in section(page, "GET /health")
    assert "object with role, content, name" in section(page, "POST /v1/chat/completions")


def test_it_loads_and_runs_nothing(page):
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|<iframe|src=|href=|https?://|url\(", page.text)
    # It is the same for every server: nothing of the model is in it.
    assert "mill" not in page.text.replace("millrace", "")
