"""Compare lm-eval-harness through `millrace serve` with lm-eval's own backend, on two local tasks.

Its own backend is transformers. The script makes an environment with lm-eval beside the project's
(`.venv-lm-eval`), where there is none, and trains the quickstart's warm-up, which answers half of the sums,
where no model is given: some minutes on two cores.
Exit code 1: a metric, an answer or a choice differs, or a log-probability by more than rounding.

    python scripts/lm_eval_harness.py                           # everything
    python scripts/lm_eval_harness.py --model my-model --python /opt/lm-eval/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import ROOT, environment
from killed_run import MILLRACE
from served_model import served_model

VERSION = "0.4.13"
TASKS = ("millrace_sums", "millrace_sums_choice")
TASK_FOLDER = "scripts/lm_eval_tasks"
TOKEN = "lm-eval"
# The quickstart's model has no more positions; questions and answers have at most 20 tokens.
LONGEST = 64
# Of a sum of float32 log-probabilities, between batches that are padded and batches that are not.
ROUNDING = 1e-4
LIMIT_S = 1800.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def environment_python() -> str:
    """Return the interpreter of an environment with lm-eval, and the packages that decide numbers as here."""
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = dict(line.split("==") for line in lines if "==" in line)
    same = [f"{name}=={pins[name]}" for name in ("torch", "transformers", "tokenizers")]
    # Torch first: with another package, pip may choose a build for CUDA, which is gigabytes.
    commands = (["install", same[0]], ["install", f"lm_eval[api,hf]=={VERSION}", *same])
    return str(environment("lm-eval", *commands) / "python")


def trained_model(folder: Path) -> Path:
    """Train the quickstart's warm-up below a folder and return the model."""
    print("training the quickstart's warm-up (some minutes)", flush=True)
    subprocess.run([*MILLRACE, "train", "quickstart", "steps=1", "--quiet"], cwd=folder, check=True)
    (run,) = (folder / "runs").iterdir()
    best = json.loads((run / "best.json").read_text())
    return Path(run / "checkpoints" / best["checkpoint"] / "model")


def lm_eval(python: str, model: str, arguments: str, output: Path) -> dict[str, Any]:
    """Run lm-eval on both tasks; return its results and samples by task."""
    words = ["--model", model, "--model_args", arguments, "--tasks", ",".join(TASKS), "--batch_size", "8"]
    words += ["--device", "cpu"] if model == "hf" else []
    words += ["--include_path", TASK_FOLDER, "--log_samples", "--output_path", str(output)]
    variables = os.environ | OFFLINE | {"OPENAI_API_KEY": TOKEN, "HF_HOME": str(output / "cache")}
    subprocess.run(
        [python, "-m", "lm_eval", "run", *words], cwd=ROOT, env=variables, check=True, timeout=LIMIT_S
    )
    (results,) = output.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text())["results"]}
    for task in TASKS:
        (samples,) = output.rglob(f"samples_{task}_2*.jsonl")
        found[task] = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[tuple[str, str, float, float]], str]:
    """Return the metrics as (task, metric, ours, theirs), and the first difference, empty without one."""
    rows, problem = [], ""
    for task in TASKS:
        for name, value in ours["results"][task].items():
            metric = name.removesuffix(",none")
            if metric != name and "stderr" not in metric:
                rows.append((task, metric, value, theirs["results"][task][name]))
                if value != rows[-1][3]:
                    problem = problem or f"{task}: {metric} is {value} and {rows[-1][3]}"
        for doc, (mine, other) in enumerate(zip(ours[task], theirs[task], strict=True)):
            if not same(mine, other):
                problem = problem or f"{task}, question {doc}: {mine} and {other}"
    return rows, problem


def same(mine: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two answers are equal, or two log-probabilities, with whether the choice is greedy, nearly."""
    for (one,), (two,) in zip(mine, other, strict=True):
        if isinstance(one, str) or isinstance(two, str):
            if one != two:
                return False
        elif one[1] != two[1] or abs(float(one[0]) - float(two[0])) > ROUNDING:
            return False
    return True


def main() -> None:
    """Run both backends and print a table; exit with 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="model folder; by default the quickstart's warm-up is trained"
    )
    parser.add_argument("--python", help="interpreter with lm-eval; by default .venv-lm-eval's")
    given = parser.parse_args()
    python = given.python or environment_python()
    with tempfile.TemporaryDirectory(prefix="millrace-lm-eval-") as name:
        folder = Path(name)
        model = (given.model or trained_model(folder)).absolute()
        local = f"pretrained={model},dtype=float32,max_length={LONGEST}"
        theirs = lm_eval(python, "hf", local, folder / "hf")
        words = ("--served-name", "sums", "--precision", "float32")
        with served_model(str(model), TOKEN, *words) as server:
            remote = f"model=sums,base_url={server.url}/v1/completions"
            remote += f",tokenizer={model},tokenizer_backend=huggingface"
            found = {
                "": lm_eval(python, "local-completions", f"{remote},max_length={LONGEST}", folder / "tokens"),
                " (text)": lm_eval(
                    python,
                    "local-completions",
                    f"{remote},max_length={LONGEST},tokenized_requests=False,num_concurrent=4",
                    folder / "texts",
                ),
            }
    problems = []
    print("\n| task | metric | millrace serve | lm-eval's hf | |\n|---|---|---|---|---|")
    for kind, ours in found.items():
        rows, problem = compare(ours, theirs)
        problems += [problem] if problem else []
        for task, metric, mine, other in rows:
            verdict = "ok" if mine == other else "DIFFERS"
            print(f"| {task}{kind} | {metric} | {mine:.3f} | {other:.3f} | {verdict} |")
    for problem in problems:
        print(f"DIFFERS: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
