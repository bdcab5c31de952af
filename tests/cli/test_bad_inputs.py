"""Every row of docs/errors.md: the mistake is made, and what is printed is what the page says."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.lab import Lab, Result
from tests.cli.preferences import language_model, pair_lines
from tests.cli.test_engines import ENGINES
from tests.cli.test_stopped_runs import STOPPED
from tests.event_logs import change_events
from tests.house.source import ROOT

ROW = re.compile(r"^\| (?P<wrong>.+?) \| `(?P<seen>[^`]+)` \| (?P<code>\d+) \|$", re.M)
PAGE = {
    row["wrong"]: (row["seen"], int(row["code"]))
    for row in ROW.finditer((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
}
DEADLINE_S = 60
GAMES = """
from pathlib import Path
from millrace.types import Reply

def echo(task, actions):
    reply = Path("reply.txt").read_text() if task.sample else "<"
    return Reply(reply if actions else None, done=len(actions) == 2, score=0.0)
"""
LONG = json.dumps({"question": "1+" * 40 + "1", "answer": "41"})


def overridden(*words: str) -> Callable[[Lab], Result]:
    return lambda lab: lab.train(*words)


def with_rows(change: Callable[[list[str]], list[str]], *words: str) -> Callable[[Lab], Result]:
    def run(lab: Lab) -> Result:
        lab.write("sums.jsonl", change(lab.lines))
        return lab.train(*words)

    return run


def judged_by(name: str, *words: str, timeout_s: float = 60.0) -> Callable[[Lab], Result]:
    reward = f"rewards=[{{kind: function, function: 'judges:{name}', timeout_s: {timeout_s}}}]"
    return overridden(reward, "data.answer_column=null", "data.eval_size=1", *words)


def model_folder(*missing: str, own_tokenizer: bool = False) -> Callable[[Lab], Result]:
    def run(lab: Lab) -> Result:
        lab.train("steps=1")
        shutil.copytree("runs/tiny-1/checkpoints/step-000000/model", "mine")
        for name in missing:
            Path("mine", name).unlink()
        tokenizer = "tokenizer={}"
        if own_tokenizer:
            from millrace.data.tokenizers import train_tokenizer

            texts = ["a larger vocabulary than that of the model"] * 9
            train_tokenizer(texts, vocab_size=277, across_words=True).save_pretrained("other")
            tokenizer = "tokenizer={path: other}"
        return lab.train("model={path: mine}", tokenizer)

    return run


def after_a_run(*words: str, damaged: bool = False) -> Callable[[Lab], Result]:
    def run(lab: Lab) -> Result:
        lab.train()
        if damaged:
            damage()
        return lab(*words)

    return run


def damage() -> None:
    """One bit of the last byte, as a bad disk flips it."""
    file = Path("runs/tiny-1/checkpoints/step-000002/model/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def too_large_a_batch(lab: Lab) -> Result:
    lab.patch.setattr("millrace.run.build.total_memory", lambda: 10**9)
    return lab.train("rollout.samples_per_prompt=40000")


def taken_name(lab: Lab) -> Result:
    lab.train("name=mine", "steps=1")
    return lab.train("name=mine")


def resumed_after(change: Callable[[], None]) -> Callable[[Lab], Result]:
    def run(lab: Lab) -> Result:
        lab.train()
        Path("runs/tiny-1/summary.json").unlink()  # a process that was killed writes none
        change()
        return lab("resume", "runs/tiny-1")

    return run


def two_processes(lab: Lab) -> Result:
    lab.train()
    with open("runs/tiny-1/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lab("resume", "runs/tiny-1")


def one_bad_gradient(lab: Lab) -> Result:
    """The first of two batches moves the weights so far that the second has no finite gradient."""
    return judged_by("varied", "policy.optimizer.learning_rate=1e30")(lab)


def no_cuda(lab: Lab) -> Result:
    lab.patch.setattr("torch.cuda.is_available", lambda: False)
    return lab.train("device=cuda")


def loopback_of_several_machines(lab: Lab) -> Result:
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in given.items():
        lab.patch.setenv(name, value)
    return lab.train("mesh.dp_shard=2")


def too_large_a_cache(lab: Lab) -> Result:
    # In a process of its own, where no other test's tensors are.
    return lab.run_apart("train", "tiny.yaml", "engine.cache_tokens=1000000000000", limit_s=DEADLINE_S)


def interrupted(lab: Lab, *, twice: bool) -> Result:
    words = ["steps=200", "data.answer_column=null", "data.eval_size=1", "rollout.prompts_per_step=1"]
    reward = "rewards=[{kind: function, function: 'judges:slow', timeout_s: 60}]"
    process = lab.start("train", "tiny.yaml", reward, *words)
    assert process.stdout is not None
    # Before the first batch is done, once is enough.
    out, signs = (
        "",
        ("reinforcement 1/200", "finishing this step") if twice else ("reinforcement: 200 steps",),
    )
    for line in process.stdout:
        out += line
        if line.startswith(signs):
            process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    return Result(process.returncode, out, err)


def limited_file_size(lab: Lab) -> Result:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        return lab.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def changed(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[], None]:
    def do() -> None:
        path = Path("runs/tiny-1", name)
        if path.suffix == ".log":
            change_events(path, change)
            return
        lines = change(path.read_text().splitlines())
        path.write_text("".join(f"{line}\n" for line in lines))

    return do


def flipped() -> None:
    """A byte of the first block of the event log."""
    path = Path("runs/tiny-1/events.log")
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)


def older_log() -> None:
    """The event log has the name and the words of version 1."""
    path = Path("runs/tiny-1/events.log")
    path.rename(path.with_name("events.jsonl"))


def without(text: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if text not in line]


def instead(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line.replace(old, new) for line in lines]


def with_a_better_reward(lines: list[str]) -> list[str]:
    first = next(place for place, line in enumerate(lines) if '"stage": "reinforcement"' in line)
    lines[first] = lines[first].replace('"reward/mean": 0.0', '"reward/mean": 0.75')
    return lines


def replayed(before: Callable[[], None] | None, *words: str) -> Callable[[Lab], Result]:
    def run(lab: Lab) -> Result:
        lab.train()
        if before is not None:
            before()
        return lab("replay", "runs/tiny-1", *words)

    return run


def replayed_live(lab: Lab, *options: str) -> Result:
    """Its environment replies otherwise to all samples but the first, which evaluations play."""
    lab.write("games.py", GAMES.splitlines())
    Path("reply.txt").write_text("<")
    lab.train("environment={kind: function, function: 'games:echo', max_turns: 2, on_length: continue}")
    Path("reply.txt").write_text(">")
    return lab("replay", "runs/tiny-1", "--live", *options)


def replayed_branch(lab: Lab) -> Result:
    lab.train()
    lab("replay", "runs/tiny-1", "--from-step=1")
    return lab("replay", "runs/tiny-1-replay-1")


def refused(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def full_disk(lab: Lab) -> Result:
    real = os.fsync

    def fsync(handle: int) -> None:
        if "/checkpoints/" in os.readlink(f"/proc/self/fd/{handle}"):
            raise refused(errno.ENOSPC, "")
        real(handle)

    lab.patch.setattr(os, "fsync", fsync)
    return lab.train()


def read_only(lab: Lab) -> Result:
    real = os.mkdir

    def mkdir(path, *rest, **options) -> None:
        if str(path) == "runs":
            raise refused(errno.EROFS, path)
        real(path, *rest, **options)

    lab.patch.setattr(os, "mkdir", mkdir)
    return lab.train()


def judged_pairs(change: Callable[[list[str]], list[str]], *words: str) -> Callable[[Lab], Result]:
    """`millrace reward-model` on changed pairs, with options that come last and so win."""

    def run(lab: Lab) -> Result:
        language_model("mine")
        lab.write("pairs.jsonl", change(pair_lines()))
        return lab("reward-model", "pairs.jsonl", "--model", "mine", "--output", "made", *words)

    return run


def second_pair(**columns: str) -> Callable[[Lab], Result]:
    return judged_pairs(lambda rows: [rows[0], json.dumps(columns), *rows[1:]])


def contradicting(rows: list[str]) -> list[str]:
    """Every second pair the other way round, so that no step is right about all."""
    swapped = [
        row.replace("chosen", "-").replace("rejected", "chosen").replace("-", "rejected") for row in rows
    ]
    return [*rows[::2], *swapped[1::2]]


def many_labels(lab: Lab) -> Result:
    language_model("mine")
    config = json.loads(Path("mine/config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "A", "1": "B", "2": "C"},
    }
    Path("mine/config.json").write_text(json.dumps(config))
    lab.write("pairs.jsonl", pair_lines())
    return lab("reward-model", "pairs.jsonl", "--model", "mine", "--output", "made")


def simulated(*words: str) -> Callable[[Lab], Result]:
    return lambda lab: lab("simulate", "tiny.yaml", *words)


def simulated_from_a_short_run(lab: Lab) -> Result:
    lab.train("steps=1")
    return lab("simulate", "--from", "runs/tiny-1")


def imported(*words: str, rows: bool = True) -> Callable[[Lab], Result]:
    """`millrace import-config` on a script of three lines."""

    def run(lab: Lab) -> Result:
        lab.write(
            "grpo.sh", ["python3 -m verl.trainer.main_ppo \\", *(f"  {word} \\" for word in words), '  "$@"']
        )
        fixed = [
            "data.train_files=gsm8k.parquet",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=8",
        ]
        return lab("import-config", "grpo.sh", *fixed, *(["--rows", "7473"] if rows else []))

    return run


def no_model(lab: Lab) -> Result:
    Path("judged").mkdir()
    return lab("evaluate", "judged", "--data", "sums.jsonl", "--reward", "exact")


def hub_folder(lab: Lab) -> Result:
    Path("hub").mkdir()
    Path("hub/README.md").write_text("---\nconfigs:\n- data_files: sums.jsonl\n---\n", encoding="utf-8")
    return lab.train("data.train=hub/test")


CASES: dict[str, Callable[[Lab], Result]] = {
    "a row is not JSON": with_rows(lambda rows: [*rows[:2], '{"question": "1+1=", answer: "2"}', *rows[2:]]),
    "a row is not an object": with_rows(lambda rows: [*rows[:2], "[1, 2]", *rows[2:]]),
    "a column is missing": overridden("data.answer_column=result"),
    "the data set is empty": with_rows(lambda rows: []),
    "the data file does not exist": overridden("data.train=gone.jsonl"),
    "the data set's folder has no such split": hub_folder,
    "a prompt is too long, `data.too_long` is filter": with_rows(lambda rows: [*rows, LONG]),
    "a prompt is too long, `data.too_long` is refuse": with_rows(
        lambda rows: [*rows, LONG], "data.too_long=refuse"
    ),
    "every prompt is too long": overridden("data.max_prompt_tokens=2"),
    "the curriculum function does not exist": overridden("data.curriculum={chance: 'judges:gone'}"),
    "the recipe does not exist": lambda lab: lab("train", "quickstrat"),
    "an environment of tools has none": overridden("environment={kind: tools}"),
    "an MCP server does not start": overridden(
        "environment={kind: tools, mcp_servers: [{command: [no-such-program]}], tool_format: pattern, "
        "tool_pattern: '(?P<argument>.)', tool: f}"
    ),
    "an environment of gymnasium does not exist": overridden("environment={kind: gymnasium, id: Maze-v9}"),
    "a model without a chat template gets tools without a pattern": overridden(
        "environment={kind: tools, tools: ['judges:right']}"
    ),
    "a method has no task": lambda lab: lab("train", "ppo"),
    "a key has another system's name": overridden("num_generations=8"),
    "a setting is given as an option": lambda lab: lab("train", "tiny.yaml", "--learning_rate", "1e-5"),
    "YAML reads text as something else": overridden("data.template={prompt}"),
    "there is nothing to train": overridden("steps=0"),
    "the ranks cannot be divided into engines": overridden(
        "mesh.dp_shard=3", "engine.tensor_parallel_size=2"
    ),
    "a server has workers on other machines and not their token": lambda lab: lab(
        "serve", "mine", "--prefill", "1", "--decode", "1", "--worker", "10.0.0.2:7000"
    ),
    "a worker is to be reached from other machines without a token": lambda lab: lab(
        "serve-worker", "--host", "0.0.0.0"
    ),
    "an engine has prefill workers alone": overridden("engine.disaggregation={prefill: 1}"),
    "an engine in worker processes has another kind": overridden(
        "engine.disaggregation={prefill: 1, decode: 1}", "engine.kind=vllm"
    ),
    "a batch has more prompts than the data": overridden("rollout.prompts_per_step=64"),
    "a batch is larger than the memory": too_large_a_batch,
    "no model is named": overridden("model={}"),
    "a reward needs reference answers that are missing": overridden("data.answer_column=null"),
    "a key is unknown": overridden("policy.optimizer.learning_rat=1e-3"),
    "a value has the wrong type": overridden("steps=many"),
    "a setting can have no effect": overridden("data.task_size=5"),
    "replay of experts in a dense model": overridden("policy.router_replay=true"),
    "8-bit moments for a model that is too small": overridden(
        "policy.optimizer.kind=adamw_8bit", "model.shape.hidden_size=8"
    ),
    "CUDA is set and not available": no_cuda,
    "ranks of several machines are to meet at a loopback address": loopback_of_several_machines,
    "a prompt of `millrace generate` is too long": after_a_run("generate", "runs/tiny-1", "1+" * 40),
    "`millrace evaluate` gets no questions": lambda lab: lab("evaluate", "mine"),
    "`millrace evaluate` gets no reward": lambda lab: lab("evaluate", "mine", "--data", "sums.jsonl"),
    "`millrace evaluate` is given a folder that is no model": no_model,
    "`millrace import-config` meets a variable without a value": imported("data.seed=$SEED"),
    "it meets a command in a script": imported("trainer.experiment_name=$(date)"),
    "it meets a key that is unknown": imported("actor_rollout_ref.actor.entropy_coef=0.01"),
    "it meets sizes that contradict each other": imported(
        "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=256"
    ),
    "it does not know the rows of the data": imported("data.train_batch_size=256", rows=False),
    "the model folder lacks its config": model_folder("config.json"),
    "the model folder lacks its weights": model_folder("model.safetensors"),
    "the tokenizer does not fit the model": model_folder(own_tokenizer=True),
    "a reward function raises": judged_by("raises"),
    "a reward function hangs": judged_by("hangs", "rollout.prompts_per_step=1", timeout_s=0.2),
    "a reward function returns NaN": judged_by("nan"),
    "the reward function does not exist": judged_by("gone"),
    "a gradient is not finite, once": one_bad_gradient,
    "a gradient is not finite, repeatedly": judged_by(
        "varied", "policy.optimizer.learning_rate=1e30", "steps=8"
    ),
    "there is not enough memory": too_large_a_cache,
    **STOPPED,
    "Ctrl-C once": partial(interrupted, twice=False),
    "Ctrl-C twice": partial(interrupted, twice=True),
    "the time limit, `timeouts.walltime_s`, is nearly reached": overridden("timeouts.walltime_s=0.001"),
    "the name of the run is taken": taken_name,
    "it is not a run folder": after_a_run("resume", "runs"),
    "the run is finished": after_a_run("resume", "runs/tiny-1"),
    "another process trains the run": two_processes,
    "the checkpoint is damaged": after_a_run(
        "evaluate", "runs/tiny-1", "--checkpoint", "step-000002", damaged=True
    ),
    "the newest checkpoint is damaged, on resume": resumed_after(damage),
    "the checkpoint is of another model than the recipe's": resumed_after(
        changed("recipe.yaml", instead("hidden_size: 16", "hidden_size: 32"))
    ),
    "the event log was changed since the checkpoint": resumed_after(flipped),
    "the checkpoint does not exist": after_a_run("evaluate", "runs/tiny-1", "--checkpoint", "step-9"),
    "the disk is full": full_disk,
    "a file exceeds the size limit of the system": limited_file_size,
    "the folder is read-only": read_only,
    **ENGINES,
    "the run to replay has no event log": replayed(changed("events.log", lambda lines: [])),
    "a line of its event log is gone": replayed(
        changed("events.log", without('"number": 3, "oldest_steps"'))
    ),
    "its event log is of an older version": replayed(older_log),
    "its event log has no received events": replayed(changed("events.log", without('"events_received"'))),
    "its event log has no thread counts": replayed(changed("events.log", without('"threads"'))),
    "its mesh was changed on resume": replayed(
        changed("events.log", instead('"ranks": [1]', '"ranks": [1, 1]'))
    ),
    "the replay differs from the run": replayed(changed("metrics.jsonl", with_a_better_reward)),
    "a live environment replies otherwise": replayed_live,
    "`--live` without an environment": replayed(None, "--live"),
    "a branch starts after the last whole batch": replayed(None, "--from-step=3", "--set=steps=9"),
    "a branch has nothing left to do": replayed(None, "--from-step=2"),
    "a setting cannot change in a branch": replayed(None, "--from-step=1", "--set=rollout.temperature=0.5"),
    "a branch is shorter than its run": replayed(None, "--from-step=1", "--set=steps=1"),
    "a branch is replayed": replayed_branch,
    "a setting changes, and no step is given": replayed(None, "--set=policy.optimizer.learning_rate=0.1"),
    "the accelerator is unknown": simulated("--gpus", "8xH20"),
    "the accelerators are missing": simulated(),
    "the split leaves no accelerator to train": simulated("--gpus", "8xH100", "--split", "8"),
    "a setting is not simulated": simulated("--gpus", "8xH100", "rollout.dynamic_sampling_rounds=1"),
    "the run has too few finished batches": simulated_from_a_short_run,
    "the run has no durations of an engine": after_a_run("simulate", "--from", "runs/tiny-1"),
    "the MDP is unknown": lambda lab: lab("foundations", "gridwrld"),
    "the policy is unknown": lambda lab: lab("foundations", "chain", "--policy", "best"),
    "the file of pairs does not exist": lambda lab: lab(
        "reward-model", "gone.jsonl", "--model", "mine", "--output", "made"
    ),
    "the file of pairs is empty": judged_pairs(lambda rows: []),
    "a pair is not JSON": judged_pairs(lambda rows: [rows[0], '{"prompt" 3}', *rows[1:]]),
    "a pair lacks a column": second_pair(prompt="1+1=", chosen="2"),
    "the two answers of a pair are the same": second_pair(prompt="1+1=", chosen="2", rejected="2"),
    "a pair is too long": second_pair(prompt="1+1=", chosen="2", rejected="2" * 76),
    "all pairs have one prompt": judged_pairs(lambda rows: rows[:1] * 2),
    "the reward model's folder is taken": judged_pairs(lambda rows: rows, "--output", "mine"),
    "the model gives several labels": many_labels,
    "a number is not above 0": judged_pairs(lambda rows: rows, "--learning-rate", "0"),
    "a step has no finite gradient": judged_pairs(contradicting, "--learning-rate", "1e30"),
}


# A run that trains and is stopped.
STOPPED_WHILE_TRAINING = {"Ctrl-C once", "Ctrl-C twice"}


def test_the_page_and_the_cases_name_the_same_mistakes():
    assert list(PAGE) == list(CASES)


@pytest.mark.slow_beyond(25)
@pytest.mark.world
@pytest.mark.parametrize(
    "wrong",
    [pytest.param(case, marks=pytest.mark.slow if case in STOPPED_WHILE_TRAINING else ()) for case in CASES],
)
def test_what_the_page_says_is_printed(wrong, lab):
    seen, code = PAGE[wrong]
    result = CASES[wrong](lab)
    assert seen in f"{result.out}{result.err}".splitlines() or seen in result.out, result
    assert result.code == code
    assert "Traceback" not in result.err


def test_an_error_is_one_line_on_standard_error_and_nothing_else(lab):
    result = lab.train("data.answer_column=result", "--quiet")
    assert result.out == ""
    assert result.err.count("\n") == 1


def test_two_mistakes_are_two_sentences(lab):
    result = lab.train("steps=many", "sed=1")
    assert [line.split(":")[0] for line in result.err.splitlines()] == ["error", "error"]
    assert result.code == 2


@pytest.mark.slow
def test_sft_without_finite_gradients_stops_too(lab):
    result = lab.train("sft={steps: 8, learning_rate: 1e30}")
    seen, code = PAGE["a gradient is not finite, repeatedly"]
    assert result.err == f"{seen}\n"
    assert result.code == code


@pytest.mark.slow
def test_what_was_saved_before_a_full_disk_can_be_resumed(lab):
    full_disk(lab)
    lab.patch.undo()
    lab.patch.chdir(lab.folder)
    assert lab("resume", "runs/tiny-1", "--quiet").code == 0
