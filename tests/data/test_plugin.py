"""A reference becomes a function that can be called, or one sentence that says what to change."""

from __future__ import annotations

import pytest

from millrace.config.section import is_function
from millrace.data.plugin import Plugin, PluginError
from millrace.errors import SetupError

HERE = "tests.plugin_functions"
INPUTS = ("policy_logprob_T", "sampler_logprob_T", "advantage_T", "segment_T", "num_segments")


def test_a_function_gets_the_inputs_that_it_names_and_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("FACTOR = 10\n")
    (tmp_path / "own" / "loss.py").write_text(
        "from beside import FACTOR\n\ndef weigh(b, *, c, d=3, **more):\n    return FACTOR * b, c, d, more\n"
        "\ndef one(b):\n    return b\n"
    )
    plugin = Plugin.load("policy.loss", "own/loss.py:weigh", ("a", "b"), {"c": 2})
    assert plugin(a=1, b=5) == (50, 2, 3, {"a": 1})
    assert Plugin.load("policy.loss", str(tmp_path / "own/loss.py:one"), ("a", "b"))(a=1, b=5) == 5
    assert is_function("own/loss.py:weigh") and is_function("own.loss:weigh")
    assert not is_function("own/loss:weigh") and not is_function("own/loss.py")


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("gone:f", {}, "policy.loss gone:f: there is no module gone in "),
        ("gone.py:f", {}, "policy.loss gone.py:f: there is no file gone.py in "),
        (
            f"{HERE}:gone",
            {},
            f"policy.loss {HERE}:gone: module {HERE} does not have a function gone; correct it",
        ),
        (f"{HERE}:math", {}, "cannot call a function math"),
        (
            f"{HERE}:foreign_name",
            {},
            "has a parameter ratio_T, and inputs are passed by name: policy_logprob_T, sampler_logprob_T, "
            "advantage_T, segment_T, num_segments; rename it, or give it a default",
        ),
        (f"{HERE}:positional", {}, "has a parameter policy_logprob_T, and inputs are passed by name"),
        (
            f"{HERE}:smooth",
            {"slop": 1},
            "has the option slop, which is no parameter of it; rename or remove it",
        ),
        (f"{HERE}:smooth", {"advantage_T": 1}, "has the option advantage_T, which is an input"),
        (f"{HERE}:without_inputs", {}, "takes none of its inputs; give it some of policy_logprob_T, "),
        (f"{HERE}:waiting", {}, "is an async def, and its result is needed at once; make it a def"),
    ],
)
def test_what_cannot_be_called_is_refused_with_what_to_change(reference, options, message):
    with pytest.raises(SetupError) as caught:
        Plugin.load("policy.loss", reference, INPUTS, options)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"policy.loss {reference}")


def test_a_file_that_fails_is_named_and_tried_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("1 / 0\n")
    with pytest.raises(SetupError, match=r"raised ZeroDivisionError: division by zero \(mine.py line 1\)"):
        Plugin.load("policy.loss", f"{path}:f", INPUTS)
    path.write_text("def f(advantage_T):\n    return 7\n")
    assert Plugin.load("policy.loss", f"{path}:f", INPUTS)(**dict.fromkeys(INPUTS, 0)) == 7


def test_what_it_raises_is_named():
    plugin = Plugin.load("policy.loss", f"{HERE}:raising", INPUTS)
    with pytest.raises(PluginError) as caught:
        plugin(**dict.fromkeys(INPUTS, 0))
    assert f"policy.loss {HERE}:raising raised ZeroDivisionError: by hand (plugin_functions.py line " in str(
        caught.value
    )
