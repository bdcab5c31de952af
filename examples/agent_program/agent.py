"""Guess my number, written for OpenAI's API: an agent program that knows nothing of how it is trained."""

import json
import os

from openai import OpenAI

DIGITS = "0123456789abcdef"

client = OpenAI()
task = json.loads(os.environ["MILLRACE_TASK"])
number = DIGITS.index(task["row"]["answer"])
messages = [{"role": "user", "content": task["prompt"]}]
won = False
for _ in range(task["max_turns"]):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    text = answer.strip()
    guess = DIGITS.find(text) if len(text) == 1 else -1
    won = guess == number
    if won:
        break
    reply = "?" if guess < 1 else ">" if guess < number else "<"
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
print(json.dumps({"reward": float(won)}))
