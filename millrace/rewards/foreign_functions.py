"""Reward functions with the signatures of other trainers, recognised by their parameters. No torch.

Each is called for one completion; those that take lists get lists of one. A row's columns have the names that
its trainer gives them: `data_source`, `reward_model.ground_truth` and `extra_info` of verl, for example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any

Row = Mapping[str, Any]
# From prompt, completion, answer and row to the arguments by name.
Arguments = Callable[[str, str, str, Row], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ForeignSignature:
    """The signature of another trainer.

    Attributes:
        trainer: its name.
        needed: parameters by which it is recognised.
        arguments: builds all arguments it may take.
        takes_columns: whether `**kwargs` gets the columns of the row, each as a list.
    """

    trainer: str
    needed: frozenset[str]
    arguments: Arguments
    takes_columns: bool = False


def _verl(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": completion,
        "ground_truth": _ground_truth(answer, row),
        "extra_info": row.get("extra_info"),
    }


def _verl_batch(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    one = _verl(prompt, completion, answer, row)
    plural = {"solution_str": "solution_strs", "ground_truth": "ground_truths", "extra_info": "extra_infos"}
    return {plural.get(name, f"{name}s"): [value] for name, value in one.items()}


def _trl(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    messages = row.get("prompt")
    is_chat = isinstance(messages, list)
    said: object = [{"role": "assistant", "content": completion}] if is_chat else completion
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    return {**columns, "prompts": [messages if is_chat else prompt], "completions": [said]}


def _openrlhf(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    return {"queries": [prompt + completion], "prompts": [prompt], "labels": [row.get("label", answer)]}


def _slime(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    sample = SimpleNamespace(
        prompt=prompt,
        response=completion,
        label=row.get("label", answer),
        metadata=row.get("metadata") or {},
        reward=None,
    )
    return {"args": SimpleNamespace(), "sample": sample}


def _verifiers(prompt: str, completion: str, answer: str, row: Row) -> dict[str, Any]:
    asked = row.get("prompt")
    question = asked if isinstance(asked, list) else [{"role": "user", "content": prompt}]
    said = [{"role": "assistant", "content": completion}]
    info, task = row.get("info") or {}, row.get("task", "default")
    state = {"prompt": question, "completion": said, "answer": answer, "task": task, "info": info}
    return {**state, "state": state}


def _ground_truth(answer: str, row: Row) -> Any:
    model = row.get("reward_model")
    return model.get("ground_truth", answer) if isinstance(model, Mapping) else answer


# Of prime-rl, whose environments are those of verifiers, the functions of a rubric.
SIGNATURES = (
    ForeignSignature("verl", frozenset(("solution_str", "ground_truth")), _verl),
    ForeignSignature("verl, in batches", frozenset(("solution_strs", "ground_truths")), _verl_batch),
    ForeignSignature("OpenRLHF", frozenset(("queries", "labels")), _openrlhf),
    ForeignSignature("TRL", frozenset(("completions",)), _trl, takes_columns=True),
    ForeignSignature("slime", frozenset(("args", "sample")), _slime),
    ForeignSignature("verifiers and prime-rl", frozenset(("completion",)), _verifiers),
)
NAMES = "verl, TRL, OpenRLHF, slime or verifiers"


def foreign_signature(function: Callable[..., Any]) -> ForeignSignature | None:
    """Return the signature of another trainer that a function has; None if it has none of them.

    Functions that can be called with prompt, completion, answer and row are millrace's own.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(prompt="", completion="", answer="", row={})
    except TypeError:
        names = signature.parameters.keys()
        # With a row it is one of millrace's own that cannot be called.
        return None if "row" in names else next((one for one in SIGNATURES if one.needed <= names), None)
    return None


def arguments_of(
    function: Callable[..., Any], foreign: ForeignSignature, given: tuple[str, str, str, Row]
) -> dict[str, Any]:
    """Return the arguments that a function takes, of those its trainer gives.

    Raises:
        TypeError: it needs a parameter that is not among them.
    """
    signature, offered = inspect.signature(function), foreign.arguments(*given)
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    if not (takes_all and foreign.takes_columns):
        offered = {name: value for name, value in offered.items() if name in signature.parameters}
    signature.bind(**offered)
    return offered


def single_score(found: object) -> object:
    """Return the score of one completion from what a function of another trainer returned.

    A list, array or tensor of one is its number; in OpenRLHF's mapping `rewards` is the score. Of what else a
    mapping has, numbers and texts stay.

    Raises:
        ValueError: there are several scores.
    """
    if isinstance(found, Mapping):
        if "score" not in found and "rewards" in found:
            return single_score(found["rewards"])
        return {name: one for name, one in found.items() if name == "score" or isinstance(one, str | Real)}
    if hasattr(found, "tolist"):
        found = found.tolist()
    if isinstance(found, list | tuple):
        if len(found) != 1:
            raise ValueError(f"it returned {len(found)} scores for one completion")
        return single_score(found[0])
    return found
