"""Train the policy behind agent.py, as `millrace train recipe.yaml` does from this folder.

python examples/agent_program/train.py            # 30 steps, some ten minutes: each episode starts Python
python examples/agent_program/train.py --quick    # one step of 8 episodes
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from millrace import load_recipe, train

QUICK: dict[str, Any] = {
    "steps": 1,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "data.eval_size": 2,
}


def main() -> None:
    """Train in a temporary folder, and print what an evaluation scores before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one step")
    quick = parser.parse_args().quick
    os.chdir(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("recipe.yaml", {"output": folder, "loggers": [], **(QUICK if quick else {})})
        report = train(recipe, quiet=True)
    won = f"{report.eval_before} -> {report.eval_after}"
    print(f"{report.steps} steps in {report.wall_s:.0f} s: games won {won}")


if __name__ == "__main__":
    main()
