"""An agent program whose episodes have branches, on the standard library alone."""

import json
import os
from urllib.request import Request, urlopen

TASK = json.loads(os.environ["MILLRACE_TASK"])


def post(path: str, body: dict) -> dict:
    """Post to the policy; return what it answers."""
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]


def chat(*messages: dict) -> dict:
    """Ask for one more message."""
    return post("/chat/completions", {"messages": list(messages)})["message"]


first = {"role": "user", "content": TASK["prompt"]}
less, more = {"role": "user", "content": "<"}, {"role": "user", "content": ">"}
said = chat(first)
second = chat(first, said, less)
chat(first, said, more)  # the history before the second turn was edited
text = TASK["prompt"] + post("/completions", {"prompt": TASK["prompt"]})["text"] + "<"
post("/completions", {"prompt": text})
last = chat(first, said, less, second, more)
print(json.dumps({"reward": float(last["content"].strip() == TASK["row"]["answer"])}))
