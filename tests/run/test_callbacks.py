"""Methods of a user's own at the points of a run, and a logger of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.data.plugin import PluginError
from millrace.errors import SetupError
from millrace.run.callbacks import POINTS, Callbacks, RunView
from millrace.run.sink_plugin import SinkPlugin
from tests import plugin_functions as functions

HERE = "tests.plugin_functions"
RUN = RunView(Path("runs/one"), "reinforcement", 2, 9)
STEP, EVALUATION = {"stage": "reinforcement", "step": 2}, {"stage": "evaluation", "step": 2, "accuracy": 0.5}


def test_each_point_calls_the_methods_of_its_name_with_what_they_take(monkeypatch):
    monkeypatch.setattr(functions.Notes, "seen", [])
    callbacks = Callbacks([f"{HERE}:Notes", f"{HERE}:Stops"])
    callbacks.on_start(RUN, None)
    callbacks.after_batch(RUN, ["a group"])
    callbacks.after_record(RUN, EVALUATION)
    assert callbacks.stopped_by == ""
    callbacks.after_record(RUN, STEP)
    callbacks.call("on_end", run=RUN, status="finished")
    assert functions.Notes.seen == [
        ("start", "reinforcement", 2, 9),
        ("batch", 1),
        ("evaluation", 0.5),
        ("end", "finished"),
    ]
    assert callbacks.stopped_by == f"callbacks {HERE}:Stops after_step"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "does not have a function gone"),
        ("Misspelt", "has a method after_steps, and a run has no such point; did you mean after_step?"),
        ("Nothing", f"has no method of a point; there are: {', '.join(POINTS)}"),
        ("WrongInput", "after_step has a parameter reward, and inputs are passed by name: run, metrics"),
        ("Lines", "has a parameter folder, and inputs are passed by name: no inputs"),
    ],
)
def test_a_class_that_cannot_be_called_is_refused_at_the_start(name, message):
    with pytest.raises(SetupError) as caught:
        Callbacks([f"{HERE}:{name}"])
    assert f"callbacks {HERE}:{name}" in str(caught.value) and message in str(caught.value)


def test_gradients_over_several_ranks_are_refused():
    message = "Fails has a method before_optimizer_step, whose gradients are divided over 2 ranks; remove the"
    with pytest.raises(SetupError, match=message):
        Callbacks([f"{HERE}:Fails"], num_ranks=2)


@pytest.mark.parametrize("point", [point for point in POINTS if point != "on_end"])
def test_each_point_names_a_method_that_raises(monkeypatch, point):
    monkeypatch.setattr(functions.Fails, "point", point)
    inputs = {name: RunView(Path("runs/one"), "reinforcement", 4, 9) for name in POINTS[point]}
    with pytest.raises(PluginError, match=rf":Fails {point} raised LookupError: {point} \(plugin_functions"):
        Callbacks([f"{HERE}:Fails"]).call(point, **inputs)


def test_a_method_that_raises_or_returns_what_means_nothing_is_named():
    callbacks = Callbacks([f"{HERE}:Talks"])
    with pytest.raises(PluginError, match=r":Talks after_batch returned 'stop'; return None$"):
        callbacks.after_batch(RUN, [])
    with pytest.raises(
        PluginError, match=r":Talks after_step raised KeyError: 'reward/max' \(plugin_functions.py line"
    ):
        callbacks.after_record(RUN, STEP)


def test_a_logger_gets_the_folder_the_settings_and_every_record(tmp_path):
    logger = SinkPlugin(f"{HERE}:Lines", tmp_path, {"steps": 9})
    logger.write(STEP)
    logger.write(EVALUATION)
    logger.close()
    assert (tmp_path / "lines.txt").read_text() == "reinforcement 2 of 9\nevaluation 2 of 9\n"


def test_a_logger_without_a_method_or_whose_method_raises_is_named(tmp_path):
    with pytest.raises(
        SetupError, match=r"^loggers tests.plugin_functions:WriteOnly has no method close; it needs"
    ):
        SinkPlugin(f"{HERE}:WriteOnly", tmp_path, {})
    with pytest.raises(SetupError, match="Lines raised KeyError: 'steps'"):
        SinkPlugin(f"{HERE}:Lines", tmp_path, {})
    with pytest.raises(
        PluginError, match=r":Full raised OSError: the disk is full \(plugin_functions.py line \d+\) in write"
    ):
        SinkPlugin(f"{HERE}:Full", tmp_path, {}).write(STEP)
