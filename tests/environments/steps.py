"""Steps of an episode for hosts of environments."""

from __future__ import annotations

from millrace.environments.reply_tokens import ReplyTokens
from millrace.environments.running_episodes import StepEnvironment
from millrace.types import Action, Prompt, Task

PROMPT = Prompt("train:0", (7, 8), "prompt", "answer", {"number": 3})
TASK = Task("prompt", "answer", {"number": 3}, 5, 0, 8)


class Letters:
    """A tokenizer whose tokens are the code points of characters."""

    unk_token_id = eos_token_id = None

    def __len__(self):
        return 0x110000

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}


ENCODE = ReplyTokens(Letters(), max_tokens=100, is_chat=lambda prompt: False)


def step(*texts, episode="0.0.0"):
    """The step that follows these actions."""
    actions = tuple(Action(text, (1,), "stop") for text in texts)
    return StepEnvironment(f"{episode}.{len(texts)}", episode, PROMPT, TASK, actions)


def letters(text):
    return tuple(ord(letter) for letter in text)
