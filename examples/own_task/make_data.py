"""Writes words.jsonl: three letters and the same letters backwards. Your own data looks like this."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path


def main() -> None:
    """600 of the 1000 words of three letters out of ten; of a quick run nothing is written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="compare with what lies there; nothing is written"
    )
    quick = parser.parse_args().quick
    words = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    random.Random(0).shuffle(words)
    rows = [{"question": word, "answer": word[::-1]} for word in words[:600]]
    path = Path(__file__).with_name("words.jsonl")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if quick and path.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{path} is not what this script writes; run it without --quick")
    if not quick:
        path.write_text(text, encoding="utf-8")
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
