"""The doctor finds nothing where all is well, and says what is wrong where it is not."""

from __future__ import annotations

import re
from collections import namedtuple
from importlib import metadata

import pytest

from millrace.cli import doctor
from millrace.run import build

Usage = namedtuple("Usage", "total used free")


@pytest.mark.slow
@pytest.mark.world
def test_a_healthy_machine_passes(lab):
    result = lab("doctor")
    problems = result.out.partition("\nproblems\n")[2]
    assert (problems, result.code) == ("  none\n", 0), result.out
    assert re.search(r"^  result +passed in \d+\.\d s on c\w+ \(", result.out, re.M)
    assert re.search(rf"^  torch +{re.escape(metadata.version('torch'))} +needs ", result.out, re.M)
    assert list(lab.folder.glob("runs")) == []


def test_a_version_outside_its_range_is_a_problem(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0" if name == "torch" else real(name))
    problems: list[str] = []
    assert dict(doctor.versions(problems))["torch"].startswith("1.0 ")
    (wanted,) = [need for need in metadata.requires(doctor.DISTRIBUTION) or [] if need.startswith("torch")]
    needed = wanted.removeprefix("torch")
    assert problems == [f'torch is 1.0, but millrace needs {needed}; run: pip install "{wanted}"']


def test_a_missing_package_is_a_problem(monkeypatch):
    real = metadata.version

    def version(name: str) -> str:
        if name == "rich":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    problems: list[str] = []
    assert dict(doctor.versions(problems))["rich"] == "missing"
    assert problems == ['rich is not installed; run: pip install "rich>=13"']


def test_extras_are_not_asked_for():
    assert {"wandb", "mlflow", "pytest"}.isdisjoint(dict(doctor.versions([])))


def test_too_little_disk_and_memory_are_problems(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**12, 10**12, 2**29))
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (2**28, 2**34))
    monkeypatch.setattr(doctor, "bubblewrap", lambda: "is not installed")
    problems: list[str] = []
    facts = dict(doctor.machine(problems))
    assert facts["memory"] == "0.2 of 16.0 GiB free"
    assert facts["disk"] == f"0.5 GiB free for runs (in {tmp_path})"
    assert problems == [
        "only 0.2 GiB of memory are free; end other programs",
        f"only 0.5 GiB of disk are free in {tmp_path}; make room, or set output",
    ]


@pytest.mark.parametrize(
    ("found", "path", "fact"),
    [
        (
            "/bin/bwrap",
            "/bin/bwrap",
            "/bin/bwrap: rewards run without network, processes and files of others",
        ),
        (
            None,
            "/bin/bwrap",
            "does not work here, so that programs a reward function starts are not confined",
        ),
        (None, None, "is not installed, so that programs a reward function starts are not confined"),
    ],
)
def test_it_says_whether_bubblewrap_holds_rewards(monkeypatch, found, path, fact):
    monkeypatch.setattr("millrace.processes.bubblewrap.find_bubblewrap", lambda: found)
    monkeypatch.setattr("shutil.which", lambda name: path)
    assert doctor.bubblewrap() == fact


@pytest.mark.parametrize(
    ("cuda", "driver", "why"),
    [
        (None, False, "none: this torch is built without CUDA; the CPU is used"),
        (
            None,
            True,
            "none: there is an NVIDIA driver, but this torch is built without CUDA; the CPU is used",
        ),
        (
            "12.8",
            False,
            "none: this torch is built for CUDA 12.8, but there is no NVIDIA driver; the CPU is used",
        ),
        (
            "12.8",
            True,
            "none: this torch is built for CUDA 12.8, but the driver finds no device; the CPU is used",
        ),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, cuda, driver, why):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: driver)
    assert doctor.gpu_name() == why


def test_a_self_check_that_fails_is_a_problem_and_leaves_with_1(lab):
    def train(*words: object, **options: object) -> None:
        raise OSError("no room")

    lab.patch.setattr("millrace.run.loop.train", train)
    lab.patch.setattr(doctor, "bubblewrap", lambda: "is not installed")
    result = lab("doctor")
    assert result.code == 1
    assert result.out.endswith("problems\n  the self-check failed: OSError: no room\n")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max\n", (3 * 2**30, 8 * 2**30)),
        (f"{2**32}\n", (2**31, 2**32)),
        (f"{2**40}\n", (3 * 2**30, 8 * 2**30)),
    ],
)
def test_memory_is_that_of_the_control_group_where_it_is_less(monkeypatch, limit, expected):
    texts = {
        "meminfo": f"MemTotal: {8 * 2**20} kB\nMemAvailable: {3 * 2**20} kB\n",
        "memory.max": limit,
        "memory.current": f"{2**31}\n",
    }
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: path.name in texts)
    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **options: texts[path.name])
    assert doctor.memory_bytes() == expected


def verdicts(out: str) -> dict[str, str]:
    """The last word of each row of the table."""
    return dict(re.findall(r"^  (\S.*?)  +\d\.\de[-+]\d\d .* allowed \de-\d\d  (\w+)$", out, re.M))


@pytest.mark.slow
def test_a_recipe_whose_numbers_hold_passes(lab):
    result = lab("doctor", "--numerics", "tiny.yaml")
    table, _, problems = result.out.partition("\nproblems\n")
    assert (problems, result.code) == ("  none\n", 0), result.out
    opening = "numerics of tiny.yaml: what must not change a number, and by how much it does"
    assert table.splitlines()[0] == opening
    assert len(table.splitlines()) == 15
    assert len(verdicts(table)) == 14
    assert set(verdicts(table).values()) == {"ok"}
    assert sorted(path.name for path in lab.folder.iterdir()) == ["judges.py", "sums.jsonl", "tiny.yaml"]


@pytest.mark.slow
def test_its_settings_may_be_overridden(lab):
    result = lab("doctor", "--numerics", "tiny.yaml", "policy.kl.coefficient=0.1", "precision=float64")
    assert result.code == 0, result.out
    assert "gradient: those without advantage left out" not in verdicts(result.out)
    assert " allowed 1e-06  ok\n" in result.out
    assert " allowed 1e-04  ok\n" not in result.out


def test_a_loss_that_depends_on_the_layout_is_marked_and_leaves_with_1(lab):
    real = build.build_objective

    def build_objective(*given):
        def per_micro_batch(predicted, batch):
            loss_N, report = real(*given)(predicted, batch)
            return loss_N / len(loss_N), report

        return per_micro_batch

    lab.patch.setattr(build, "build_objective", build_objective)
    result = lab("doctor", "--numerics", "tiny.yaml")
    found = verdicts(result.out)
    assert found["gradient: micro-batches of half the tokens"] == "WRONG"
    assert found["gradient: another packing order"] == "ok"
    assert sorted(found.values()).count("WRONG") == 10
    assert result.out.endswith("problems\n  10 of 14 numbers moved by more than rounding\n")
    assert result.code == 1


@pytest.mark.world
def test_rewards_that_fail_end_the_check_with_a_sentence(lab):
    given = ("rewards=[{kind: function, function: 'judges:raises'}]",)
    result = lab("doctor", "--numerics", "tiny.yaml", *given)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: 100% of the rewards of this batch failed, more than limits.")
    assert "'price'" in result.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope"], "error: there is no recipe nope; there are: "),
        (["tiny.yaml", "stepz=3"], "error: recipe tiny.yaml: unknown key stepz; did you mean steps?\n"),
        (["tiny.yaml", "steps"], "error: 'steps' is not of the form key=value, such as steps=50\n"),
    ],
)
def test_a_recipe_or_a_setting_that_is_not_there_is_named(lab, words, sentence):
    result = lab("doctor", "--numerics", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(sentence)


def test_settings_without_a_recipe_are_refused(lab):
    result = lab("doctor", "steps=1")
    assert (result.code, result.out) == (2, "")
    assert "settings belong to a recipe; name it with --numerics RECIPE" in result.err
