"""A server that speaks OpenEnv's protocol, as far as a session needs it, and fails as the action says."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

from websockets.sync.server import serve

SESSIONS = []


class Higher:
    """Guess a number below 8; `code` is a field that the action has to have."""

    def reset(self, seed=None, low=0, **more):
        self.number, self.left = low + seed % 8, 3
        return {"text": "Guess.", "left": 3}, None, False

    def step(self, guess):
        self.left -= 1
        if guess == self.number:
            return {"text": "right", "left": self.left}, 1.0, True
        text = "higher" if guess < self.number else "lower"
        return {"text": text, "left": self.left}, -0.1, self.left == 0


def answer(game, message):
    """The reply to a message as a value of JSON, or as text."""
    if message["type"] == "reset":
        reply = game.reset(**message["data"])
    else:
        action = message["data"]
        if "guess" not in action or action.get("code") != 7:
            return invalid("missing", ["code"], "Field required")
        how = action["guess"]
        if how in BAD:
            return BAD[how]
        if not how.isdigit():
            return invalid("int_parsing", ["guess"], "Input should be a valid integer")
        reply = game.step(int(how))
    return observation(*reply)


def observation(text, reward, done):
    return {"type": "observation", "data": {"observation": text, "reward": reward, "done": done}}


def invalid(kind, where, text):
    errors = [{"type": kind, "loc": where, "msg": text}]
    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
    return {"type": "error", "data": data}


BAD = {
    "raise": {"type": "error", "data": {"message": "the board is gone", "code": "EXECUTION_ERROR"}},
    "text": "{",
    "list": [1],
    "other": {"type": "state", "data": {}},
    "reward": observation({"text": ""}, "1", False),
    "field": observation({"words": "Guess."}, None, False),
}


@contextmanager
def serving(reply=answer):
    """Serve on a free port of loopback; yields the address."""

    def session(connection):
        SESSIONS.append(connection.request.headers.get("Authorization"))
        game = Higher()
        for message in connection:
            found = reply(game, json.loads(message))
            connection.send(found if isinstance(found, str) else json.dumps(found))

    with serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
