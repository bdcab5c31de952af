"""Whatever is flipped, cut or replaced in a run's files: a command recovers, or says so in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from millrace.eventlog.file import MARK
from millrace.observability.files import FileError
from millrace.observability.report import write_report
from tests.cli.damage import Told, check_told, copy_of, damage, files_of, make_run, millrace

# Commands that only look, some milliseconds each; then those that load weights, and those that train.
LOOKING = ("status", "json", "trace", "simulate", "report")
LOADING = ("best", "last", "named", "generate", "plan")
TRAINING = ("finished", "resume", "replay", "train")
# A checkpoint that the newest one does not stand for.
OLDER, NEWEST = "step-000002", "step-000004"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("damaged"))


def call(name: str, run: Path) -> Told:
    """One way to read a run."""
    base, at = run.parents[1], str(run)
    model = [f"model={{path: {run}/checkpoints/{OLDER}/model}}", "tokenizer={}"]
    words = {
        "status": ("status", at),
        "json": ("status", at, "--json"),
        "trace": ("trace", at, "--output", str(base / "trace.json")),
        "simulate": ("simulate", "--from", at),
        "best": ("evaluate", at, "--json"),
        "last": ("evaluate", at, "--checkpoint", "last"),
        "named": ("evaluate", at, "--checkpoint", OLDER),
        "generate": ("generate", at, "1+2="),
        "plan": ("plan", str(base / "tiny.yaml"), "--gpus", "1xH100", *model),
        "finished": ("resume", at, "--quiet"),
        "resume": ("resume", at, "--quiet"),
        "replay": ("replay", at, "--quiet"),
        "train": ("train", str(base / "tiny.yaml"), "--quiet", f"output={base}/more", "steps=1", *model),
    }
    if name != "report":
        return millrace(*words[name])
    try:
        write_report(run)
    except (FileError, FileNotFoundError) as error:
        return Told(1, "", f"error: {error}\n")
    return Told(0, "", "")


def weights(run: Path, checkpoint: str) -> bytes:
    return (run / "checkpoints" / checkpoint / "model" / "model.safetensors").read_bytes()


def check_damaged(run: Path, seed: int, names: tuple[str, ...]) -> None:
    """Damage one file of a copy, read it by one command, and fail unless that recovers or says so."""
    draw = random.Random(seed)
    name = draw.choice(names)
    killed = name == "resume" or (name == "replay" and draw.random() < 0.5)
    copy = copy_of(run.with_name("killed") if killed else run, "copy")
    shutil.rmtree(run.parents[1] / "more", ignore_errors=True)
    every = files_of(copy)
    # As often one of the few above the checkpoints as one in them.
    file = draw.choice([one for one in every if "/" not in one] if draw.random() < 0.5 else every)
    how = damage(copy / file, seed)
    changed = not (copy / file).is_file() or (copy / file).read_bytes() != (run / file).read_bytes()
    try:
        told = call(name, copy)
        check_told(told)
        if told.code == 0 and changed and file != "recipe.yaml":
            check_same(name, file, run, copy)
    except BaseException as error:
        error.add_note(f"seed {seed}: {name} after {how} of {file}")
        raise


def check_same(name: str, file: str, run: Path, copy: Path) -> None:
    """Fail if a command went on with weights that are not those of the run."""
    if name == "resume":
        assert weights(copy, NEWEST) == weights(run, NEWEST)
    if name == "named":
        assert not file.startswith(f"checkpoints/{OLDER}/")
    if name == "train":
        assert not file.startswith(f"checkpoints/{OLDER}/model/")


@pytest.mark.slow_beyond(10)
@pytest.mark.attack("a damaged file of a run or a model")
@pytest.mark.parametrize("seed", range(40))
def test_commands_that_look_bear_any_damage(run, seed):
    check_damaged(run, seed, LOOKING)


@pytest.mark.attack("a damaged file of a run or a model")
@pytest.mark.parametrize("seed", range(6))
def test_commands_that_load_bear_any_damage(run, seed):
    check_damaged(run, seed, LOADING)


@pytest.mark.slow_beyond(1)
@pytest.mark.attack("a damaged file of a run or a model")
@pytest.mark.parametrize("seed", range(3))
def test_commands_that_train_bear_any_damage(run, seed):
    check_damaged(run, seed, TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(16))
def test_every_command_bears_any_damage(run, block):
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        check_damaged(run, seed, LOOKING + LOADING + TRAINING)


@pytest.mark.attack("a damaged file of a run or a model")
@pytest.mark.parametrize("file", ["model/model.safetensors", "optimizer/model/rank-00000.safetensors"])
def test_one_flipped_bit_of_weights_or_optimizer_is_found(run, file):
    copy = copy_of(run, "copy")
    path = copy / "checkpoints" / OLDER / file
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    told = millrace("evaluate", str(copy), "--checkpoint", OLDER)
    where = f"checkpoint {copy}/checkpoints/{OLDER} is damaged: {file} is not what was saved"
    assert told.err == f"error: {where}; {NEWEST} is whole: use --checkpoint {NEWEST}\n"
    assert told.code == 1


@pytest.mark.attack("a damaged file of a run or a model")
def test_a_damaged_best_json_is_made_good_from_the_newest_checkpoint(run):
    copy = copy_of(run, "copy")
    answers = str(copy / "answers.parquet")
    before = millrace("evaluate", str(copy), "--json", "--answers", answers)
    best = json.loads((copy / "best.json").read_text())["checkpoint"]
    (copy / "best.json").write_text('{"checkpoint": 3')
    after = millrace("evaluate", str(copy), "--json", "--answers", answers)
    assert (after.code, after.out) == (0, before.out)
    assert after.err == (
        f"note: {copy}/best.json is damaged: not JSON: Expecting ',' delimiter at line 1, column 17; "
        f"the best checkpoint is {best}, as {NEWEST} says\n"
    )


@pytest.mark.attack("a damaged file of a run or a model")
def test_a_best_json_that_names_a_file_elsewhere_is_not_followed(run):
    copy = copy_of(run, "copy")
    shutil.copytree(copy / "checkpoints" / OLDER, copy.with_name("copy-elsewhere"))
    (copy / "best.json").write_text('{"checkpoint": "../../copy-elsewhere"}')
    told = millrace("evaluate", str(copy))
    assert "best.json is damaged: checkpoint: string should match pattern" in told.err
    assert told.code == 0


@pytest.mark.attack("a damaged file of a run or a model")
def test_a_finished_run_whose_summary_is_damaged_can_be_resumed_and_has_one_again(run):
    copy = copy_of(run, "copy")
    (copy / "summary.json").write_text("[]")
    told = millrace("resume", str(copy), "--quiet")
    assert told.code == 0
    assert f"{copy}/summary.json is damaged" in told.err
    assert json.loads((copy / "summary.json").read_text())["status"] == "finished"
    assert weights(copy, NEWEST) == weights(run, NEWEST)


@pytest.mark.attack("a damaged file of a run or a model")
def test_a_damaged_block_is_left_out_of_a_trace_and_refused_by_a_replay(run):
    copy = copy_of(run, "copy")
    path = copy / "events.log"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content + MARK + b"\x09")
    seen = millrace("trace", str(copy), "--output", str(copy / "t.json"))
    assert seen.code == 0
    first, last = seen.err.splitlines()
    assert first == f"note: {path}: block 1 is damaged; left out"
    assert last == f"note: {path}: the last block is not whole; left out"
    told = millrace("replay", str(copy), "--quiet")
    assert told.code == 1
    assert told.err == f"error: run {copy}: {path}: block 1 is damaged; restore it from a copy\n"


@pytest.mark.attack("a damaged file of a run or a model")
def test_sizes_that_cannot_be_are_refused_before_memory_is_asked_for(run):
    base = run.parents[1]
    mine = base / "mine"
    for field, value, told in (
        ("hidden_size", 2_000_000_000, "makes a model of "),
        (
            "num_hidden_layers",
            2_000_000_000,
            "num_hidden_layers is 2000000000, and its weights allow",
        ),
        ("vocab_size", 10**40, "cannot be loaded"),
    ):
        shutil.rmtree(mine, ignore_errors=True)
        shutil.copytree(run / "checkpoints" / NEWEST / "model", mine)
        config = json.loads((mine / "config.json").read_text()) | {field: value}
        (mine / "config.json").write_text(json.dumps(config))
        result = millrace("train", str(base / "tiny.yaml"), f"model={{path: {mine}}}", "tokenizer={}")
        check_told(result)
        assert result.code == 1
        assert told in result.err and result.err.endswith("; restore it from a copy\n"), result.err


@pytest.mark.attack("control characters for the terminal")
def test_what_a_run_wrote_reaches_the_terminal_without_control_characters(run):
    copy = copy_of(run, "copy")
    summary = json.loads((copy / "summary.json").read_text())
    summary |= {"status": "failed", "warnings": ["a\x1b]0;title\x07\u202eb\nc"]}
    (copy / "summary.json").write_text(json.dumps(summary))
    told = millrace("status", str(copy))
    assert told.out.splitlines()[2] == r"  a\x1b]0;title\x07\u202eb\nc"
