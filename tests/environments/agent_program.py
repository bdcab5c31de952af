"""A program for the environment `program`, on the standard library alone; its task names what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TASK = json.loads(os.environ["MILLRACE_TASK"])
DOES = TASK["row"].get("does", "")


def post(path: str, body: dict, key: str = os.environ["OPENAI_API_KEY"], **headers: str):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    request = Request(os.environ["MILLRACE_URL"] + path, json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        return json.loads(error.read())


def chat(messages: list, **more) -> dict:
    if DOES == "calls anthropic":
        assert os.environ["ANTHROPIC_BASE_URL"] == os.environ["MILLRACE_URL"]
        body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 9, "messages": messages}
        key = os.environ["ANTHROPIC_API_KEY"]
        (block,) = post("/v1/messages", body, key="", **{"Authorization": "", "x-api-key": key})["content"]
        return {"choices": [{"message": {"role": "assistant", "content": block["text"]}}]}
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}
    return post("/v1/chat/completions", body)


def main() -> None:
    """Two turns of a conversation, each with one number more; the reward is whether the second is `b`."""
    if DOES == "never asks":
        print("a line\nof no use", file=sys.stderr)
        raise SystemExit(4)
    messages = [{"role": "user", "content": TASK["prompt"]}]
    for turn in range(2):
        answer = chat(messages)
        messages.append(answer["choices"][0]["message"])
        after_turn(turn, messages)
        messages.append({"role": "user", "content": str(turn)})
    if DOES == "posts":
        print(post("/reward", {"reward": 0.25}))
    elif DOES != "prints nothing":
        print("done")
        print(json.dumps({"reward": float(messages[-2]["content"] == "b")}))


def after_turn(turn: int, messages: list) -> None:
    if DOES == "crashes":
        raise RuntimeError("the tool is \x1b[31m down")
    if DOES == "forgets" and turn == 0:
        print(chat([{"role": "user", "content": "another"}]))
        time.sleep(60)
    if DOES == "branches" and turn == 0:
        with ThreadPoolExecutor() as threads:
            asked = [threads.submit(chat, [{"role": "user", "content": text}]) for text in ("one", "two")]
            found = [one.result() for one in asked]
        found.append(post("/v1/completions", {"model": "policy", "prompt": "Write: "}))
        codes = [one.get("error", {}).get("code") for one in found]
        assert codes in ([None] * 3, ["too_many_branches"] * 3), found
    if DOES == "writes too much" and turn == 0:
        refused = chat([*messages, {"role": "user", "content": "x" * 100}])
        assert refused["error"]["code"] == "context_length_exceeded", refused
    if DOES == "hangs" and turn == 0:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        Path(TASK["row"]["file"]).write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
        time.sleep(600)
    if DOES == "looks around" and turn == 0:
        messages.append({"role": "user", "content": json.dumps(seen())})
        messages.append(chat(messages)["choices"][0]["message"])


def seen() -> dict:
    """What it finds of the machine."""
    reached = ""
    try:
        urlopen(TASK["row"]["host"], timeout=5)
    except OSError as error:
        reached = str(error)
    return {
        "shadow": os.path.exists("/etc/shadow"),
        "variables": sorted(name for name in os.environ if name.startswith(("MILLRACE", "OPENAI", "SECRET"))),
        "host": reached,
        "wrong key": post("/v1/chat/completions", {}, key="other")["error"]["code"],
    }


if __name__ == "__main__":
    main()
