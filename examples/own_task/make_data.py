"""Writes words.jsonl: three letters and the same letters backwards. Your own data looks like this."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path


def main() -> None:
    """600 of the 1000 words of three letters out of ten."""
    words = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    random.Random(0).shuffle(words)
    rows = [{"question": word, "answer": word[::-1]} for word in words[:600]]
    path = Path(__file__).with_name("words.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
