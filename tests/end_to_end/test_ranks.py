"""A run on two ranks learns what a run of one process learns, and ends when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from millrace import train
from millrace.run.offline import evaluate_checkpoint
from tests.close import close_fp64
from tests.end_to_end.rank_runs import LIMIT_S, OVERRIDES, begun, command, numbers, ranks_below, resumed, run
from tests.end_to_end.runs import check_equal, contents
from tests.end_to_end.tiny import tiny_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `alone`, and `spread` over two ranks by millrace itself."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_recipe(folder)
    with (folder / "alone.txt").open("w") as alone, redirect_stdout(alone):
        train_here(folder, "alone")
    done = run(command(folder, "spread", "mesh.dp_shard=2"))
    assert done.returncode == 0, done.stderr
    (folder / "spread.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def train_here(folder: Path, name: str, *more: str) -> None:
    """The run of one process in this one, which has imported everything."""
    words = dict(word.split("=", 1) for word in [*OVERRIDES, *more])
    train(tiny_recipe(folder, {"name": name, **{key: yaml.safe_load(value) for key, value in words.items()}}))


def check_alike(folder: Path, one: str, other: str) -> None:
    """That two runs have the same records up to the first batch of reinforcement."""
    alone, spread = numbers(folder / "runs" / one), numbers(folder / "runs" / other)
    assert len(alone) == len(spread) > 6
    assert [record["stage"] for record in alone] == [record["stage"] for record in spread]
    # Warm-up, evaluations and the first batch of reinforcement. Where a gradient is nothing but rounding, as
    # most of it is then, Adam makes whole steps of it: neither they nor later batches are the same any more.
    first = next(n for n, record in enumerate(alone) if record["stage"] == "reinforcement")
    for one, other in zip(alone[: first + 1], spread[: first + 1], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if "update_norm" in key:
                continue
            close_fp64(other[key], value, rtol=1e-4, atol=1e-6) if isinstance(value, float) else None
            assert isinstance(value, float) or other[key] == value
    assert [record.get("version") for record in alone] == [record.get("version") for record in spread]


@pytest.mark.world
def test_two_ranks_learn_what_one_process_learns(folder: Path) -> None:
    check_alike(folder, "alone", "spread")


def mixture(folder: Path) -> str:
    """Two sources, as a word of a command."""
    rows = [{"question": f"{a + b}-{b}=", "answer": str(a)} for a in range(10) for b in range(10 - a)]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"name": "sums", "data": str(folder / "sums.jsonl"), "weight": 0.75},
        {"name": "differences", "data": str(folder / "more.jsonl"), "weight": 0.25},
    ]
    return f"data.sources={json.dumps(sources)}"


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Path:
    """The finished run of two ranks that read two sources from disk."""
    words = [mixture(folder), "data.train=null", "mesh.dp_shard=2", "data.streaming=true"]
    done = run(command(folder, "mixed", *words))
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "mixed"


@pytest.mark.slow
@pytest.mark.world
def test_two_ranks_read_sources_from_disk_as_one_process_has_them_in_memory(
    folder: Path, mixed: Path
) -> None:
    train_here(folder, "mixed-alone", mixture(folder), "data.train=null")
    check_alike(folder, "mixed-alone", "mixed")
    alone, spread = (contents(run)["prompts"] for run in (folder / "runs" / "mixed-alone", mixed))
    assert alone == spread
    assert len(set(alone)) > 10
    batch = next(one for one in numbers(mixed) if one["stage"] == "reinforcement")
    assert batch["source/differences/fraction"] == 0.25


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "more"), [("memory", ()), ("engine", ("data.streaming=true", "engine.num_engines=1"))]
)
def test_memory_and_an_engine_in_a_process_give_two_ranks_the_same_bits(
    folder: Path, mixed: Path, name: str, more: tuple[str, ...]
) -> None:
    words = [mixture(folder), "data.train=null", "mesh.dp_shard=2", *more]
    done = run(command(folder, f"mixed-{name}", *words))
    assert done.returncode == 0, done.stderr
    check_equal(folder / "runs" / f"mixed-{name}", mixed)


@pytest.mark.world
def test_the_first_rank_tells_the_layout_before_the_run(folder: Path) -> None:
    shown = (folder / "spread.txt").read_text(encoding="utf-8")
    table = "\nrank  dp_shard\n   0         0\n   1         1\n"
    assert shown.count(table) == 1
    assert shown.index(table) < shown.index("SFT: ")
    alone = (folder / "alone.txt").read_text(encoding="utf-8")
    assert "SFT: " in alone and "\nrank" not in alone


@pytest.mark.world
def test_what_they_save_is_an_ordinary_model(folder: Path) -> None:
    checkpoint = json.loads((folder / "runs" / "spread" / "best.json").read_text())["checkpoint"]
    saved = folder / "runs" / "spread" / "checkpoints" / checkpoint
    ours, theirs = (
        {
            name: tensor.shape
            for path in (where / "model").glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for where in (saved, folder / "runs" / "alone" / "checkpoints" / checkpoint)
    )
    # Each rank wrote its share.
    assert len(list(saved.glob("model/*.safetensors"))) == 2
    assert ours == theirs
    told = json.loads((folder / "runs" / "spread" / "best.json").read_text())
    assert evaluate_checkpoint(folder / "runs" / "spread").metrics[told["measure"]] == told["value"]


@pytest.mark.slow
@pytest.mark.world
def test_two_ranks_that_share_an_engine_learn_from_its_answers(folder: Path) -> None:
    words = [
        "train",
        str(folder / "tiny.yaml"),
        f"output={folder / 'runs'}",
        "name=shared",
        "mesh.dp_shard=2",
    ]
    # Both must be even: a rank has half of the vocabulary and of the key heads.
    words += ["tokenizer={alphabet: seen}", "model.shape.num_key_value_heads=2"]
    done = run([*words, "engine.tensor_parallel_size=2", "engine.colocated=true"])
    assert done.returncode == 0, done.stderr
    learned = [one for one in numbers(folder / "runs" / "shared") if one["stage"] == "reinforcement"]
    trained = [one for one in learned if "mismatch/max" in one]
    assert len(trained) == 4
    for record in trained:
        # The engine computes with the weights that the trainer has after each step.
        assert record["mismatch/max"] < 1e-5
        assert record["policy/update_norm_matrices"] > 0


@pytest.mark.slow
def test_in_turns_with_their_engines_they_learn_the_same(folder: Path) -> None:
    done = run(command(folder, "turns", "mesh.dp_shard=2", "engine.colocated=true"))
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "runs" / "turns") == numbers(folder / "runs" / "spread")


@pytest.mark.slow
def test_torchrun_starts_the_same_ranks(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "millrace.cli.main"]
    words = command(folder, "torchrun", "mesh.dp_shard=2")
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "runs" / "torchrun") == numbers(folder / "runs" / "spread")
    # The first rank says what came of it, and the others nothing.
    assert done.stdout.count("report: ") == done.stdout.count("next: ") == 1


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_ends_soon_and_resumes_to_the_same_numbers(folder: Path) -> None:
    launcher = begun(folder, "killed", "mesh.dp_shard=2")
    os.kill(ranks_below(launcher.pid)[1], signal.SIGKILL)
    killed_s = time.monotonic()
    _, told = launcher.communicate(timeout=60)
    assert time.monotonic() - killed_s < 20
    assert launcher.returncode == 1
    assert "rank 1 of 2 ended with signal SIGKILL" in told
    assert resumed(folder, "killed") == numbers(folder / "runs" / "spread")


@pytest.mark.slow
def test_a_mesh_of_another_size_than_the_ranks_is_refused(folder: Path) -> None:
    done = run(command(folder, "wrong", "mesh.dp_shard=2"), RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert "asks for 2 ranks, and 3 were started" in done.stderr
