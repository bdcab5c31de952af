"""One place where errors become sentences and exit codes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from importlib import import_module

import pytest

from millrace.cli.main import KNOWN, exit_code
from millrace.version import __version__
from tests.house.source import ROOT


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--learning_rate", "1e-5"],
            "settings are given without dashes: policy.optimizer.learning_rate=1e-5",
        ),
        (["x=1", "--learning-rate=3"], "settings are given without dashes: policy.optimizer.learning_rate=3"),
        (["--lr", "--quiet"], "settings are given without dashes: policy.optimizer.learning_rate=VALUE"),
        (["--rollout.n"], "settings are given without dashes: rollout.samples_per_prompt=VALUE"),
        (["--steps", "5"], "settings are given without dashes: steps=5"),
        (["--balance_batch"], "leave it out: batches are always balanced"),
    ],
)
def test_a_setting_given_as_an_option_is_told_how_to_give_it(lab, words, told):
    for command in (["train", "tiny.yaml"], ["config", "tiny.yaml"], ["doctor", "--numerics", "tiny.yaml"]):
        result = lab(*command, *words)
        option = next(word for word in words if word.startswith("--")).partition("=")[0]
        assert (result.code, result.err) == (2, f"error: there is no option {option}; {told}\n")


def test_an_option_that_is_no_setting_is_left_to_typer(lab):
    for words in (["train", "tiny.yaml", "--foo", "3"], ["recipes", "--beta", "3"]):
        result = lab(*words)
        assert result.code == 2 and "No such option" in result.err


@pytest.fixture
def failing(lab):
    """`millrace train tiny.yaml`, where training raises what it is given."""

    def run(error: BaseException):
        def train(*words: object, **options: object) -> None:
            raise error

        lab.patch.setattr("millrace.run.loop.train", train)
        return lab.train()

    return run


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_error_exists_and_is_recognised(name):
    module, _, kind = name.rpartition(".")
    error = getattr(import_module(module), kind)("sentence")
    assert exit_code(error) == KNOWN[name]


@pytest.mark.parametrize("error", [ValueError("bug"), RuntimeError("bug"), KeyError("bug"), AssertionError()])
def test_an_error_of_the_program_keeps_its_traceback(failing, error):
    assert exit_code(error) is None
    with pytest.raises(type(error)) as raised:
        failing(error)
    assert raised.value is error


@pytest.mark.world
def test_a_traceback_leaves_with_1(lab):
    code = (
        "import sys; sys.argv = ['millrace', 'recipes']\n"
        "import millrace.config.recipe as r\n"
        "def broken(): raise ValueError('a bug')\n"
        "r.recipe_names = broken\n"
        "from millrace.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.endswith("ValueError: a bug\n")


def test_an_error_of_the_system_names_its_file(failing):
    result = failing(OSError(28, "No space left on device", "runs/a/recipe.yaml"))
    assert (result.code, result.err) == (1, "error: runs/a/recipe.yaml: No space left on device\n")


def test_an_error_of_the_system_without_a_number_says_what_it_says(failing):
    assert failing(OSError("the cable is out")).err == "error: the cable is out\n"


def test_ctrl_c_before_a_run_began_is_one_line(failing):
    result = failing(KeyboardInterrupt())
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_ctrl_c_while_something_is_closed_is_no_traceback(failing):
    error = ValueError("half open")
    error.__context__ = OSError("the file")
    error.__context__.__context__ = KeyboardInterrupt("left at once")
    result = failing(error)
    assert (result.code, result.out, result.err) == (130, "", "left at once\n")


def test_a_library_that_makes_another_error_of_ctrl_c_is_no_traceback(lab):
    def run(config, controller, checkpoint):
        controller.progress.step = 1
        controller.record("reinforcement", {})
        signal.raise_signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise IndexError("list assignment index out of range")

    lab.patch.setattr("millrace.run.loop.run", run)
    result = lab.train()
    said = "left at once; continue from the last checkpoint with: millrace resume runs/tiny-1\n"
    assert (result.code, result.err) == (130, said)


@pytest.mark.world
def test_a_reader_that_leaves_early_gets_no_traceback(lab):
    process = lab.start("config", "--schema")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    shown = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), shown) == (1, "")


def test_an_unknown_command_names_the_nearest(lab):
    result = lab("evalute")
    assert result.code == 2
    assert "Did you mean 'evaluate'?" in result.err


def test_the_version_is_printed(lab):
    assert lab("--version").out == f"millrace {__version__}\n"


@pytest.mark.world
def test_a_character_the_terminal_lacks_does_not_end_the_program(lab):
    lab.write("arrow.yaml", ["# a → b"])
    lab.patch.setenv("PYTHONIOENCODING", "latin-1")
    process = lab.start("recipes", "arrow.yaml")
    assert process.communicate(timeout=60) == ("# a \\u2192 b\n", "")


def test_no_words_at_all_show_the_commands(lab):
    result = lab()
    for command in ("train", "resume", "replay", "evaluate", "generate", "recipes", "config", "doctor"):
        assert command in result.out + result.err
