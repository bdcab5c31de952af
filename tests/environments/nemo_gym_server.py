"""A resources server with NeMo Gym's contract: a counter for each session, and replies that break it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from millrace.rewards.chat_endpoint import HttpReply


class Counter:
    """Seed a count, add to it, and have it verified; `broken` replaces the replies of a path."""

    def __init__(self, **broken: Any) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.broken = broken

    def reply(self, path: str, session: str, body: Any) -> HttpReply:
        """The reply to a POST."""
        if path in self.broken:
            return self.broken[path]
        if path == "seed_session":
            self.counts[session] = body["initial_count"]
            found: Any = {}
        elif path == "increment_counter":
            self.counts[session] += body["count"]
            found = {"success": True}
        elif path == "get_counter_value":
            found = {"count": self.counts[session]}
        elif path == "verify":
            self.verified.append(body)
            found = {**body, "reward": float(self.counts[session] == body["expected_count"])}
        else:
            return HttpReply(404, b"no such tool")
        return HttpReply(200, json.dumps(found).encode())

    def exchange(self, opener, request, timeout_s, **more) -> HttpReply:
        """In the place of `chat_endpoint.exchange`: the opener is the session."""
        path = request.selector.strip("/")
        return self.reply(path, str(id(opener)), json.loads(request.data) if request.data else None)


@contextmanager
def serving(counter):
    """Serve on a free port of loopback, with a cookie for each session; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            session = cookies["session"].value if "session" in cookies else f"s{len(counter.counts)}"
            found = counter.reply(self.path.strip("/"), session, body)
            self.send_response(found.status)
            # As Starlette sends it.
            self.send_header(
                "Set-Cookie", f"session={session}; path=/; Max-Age=1209600; httponly; samesite=lax"
            )
            self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
