"""No estimator without a judge: every public function of `algorithms` stands in a test of this folder."""

from __future__ import annotations

import ast
from pathlib import Path

from millrace.foundations.enumerate import TokenTree
from tests.house.source import PACKAGE, Source, python_files, scan

MODULES = ("advantages", "credit", "returns", "losses", "kl", "ratios", "weights")
# These are held elsewhere: what they give is no estimate of a gradient, a value or a divergence.
OTHERS = {
    "adaptive_coefficient",  # a controller
    "group_std",  # part of group_normalised
    "returns_to_go",  # part of anchor
    "mismatch",  # part of mismatch_metrics
    "log_ratio",  # part of every ratio
    "sequence_log_ratio",
    "dppo_tv_clipped",  # metrics: which tokens a loss gives no gradient
    "dppo_kl_clipped",
    "value_clipped",
    "token_selection",  # which function has the name that a recipe gives
    "divergence",
    "turn_advantages",
    "token_weights",
    "correction",
    "out_of_bounds",  # a metric: which tokens a correction bounds
    "typical",  # a metric: how far sampler and trainer are apart
}


@scan
def public_functions(source: Source) -> set[str]:
    return {
        node.name for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
    }


@scan
def words(source: Source) -> set[str]:
    attributes = {node.attr for node in source.nodes(ast.Attribute)}
    return attributes | {node.id for node in source.nodes(ast.Name)}


def test_every_public_function_of_the_algorithms_is_judged_here() -> None:
    used = set().union(*(words(path) for path in python_files(Path(__file__).parent)))
    defined = set().union(*(public_functions(PACKAGE / "algorithms" / f"{name}.py") for name in MODULES))
    assert sorted(defined - used - OTHERS) == []
    assert sorted(OTHERS - defined) == []
    assert TokenTree.__module__ == "millrace.foundations.enumerate"
