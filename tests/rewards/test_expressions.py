"""Expressions and literals are read as SymPy and Python read them, and nothing is evaluated."""

from __future__ import annotations

import ast

import pytest
import sympy
import sympy.parsing.sympy_parser

from millrace.rewards.expressions import (
    UnreadableError,
    disarm_sympy,
    read_expression,
    read_integers,
    read_literal,
)

CODE = [
    "__import__('os').system('true')",
    "[__import__('os').system('true')]",
    "open('canary', 'w')",
    "(lambda: 1)()",
    "().__class__.__base__.__subclasses__()",
    "[x for x in (1,)]",
    "x.y",
    "x if y else z",
    "f'{1}'",
    "(x := 3)",
    "exec('1')",
    "print(1)",
    "sin(x, y, z)",
    "sin(*x)",
    "Rational(p=1)",
]
HUGE = [
    "9**9**9",
    "2**(2**40)",
    "(2**10000)**100",
    "factorial(10**6)",
    "binomial(10**9, 5*10**8)",
    "exp(10**9)",
    "1" * 20_000,
    "(" * 500 + "1" + ")" * 500,
    "-" * 9_000 + "1",
    "1" + "+1" * 4_000,
]


@pytest.mark.parametrize(
    "text",
    [
        "1/2 + 3",
        "x**2 + C",
        "-5*x**(3/2) + sin(2*x)/3",
        "exp(-x)*log(x, 2)",
        "0.1 + 0.2",
        "2**-3",
        "7 // 2 + 7 % 4",
        "sqrt(8) * pi",
        "E**x * I",
        "Abs(-3) + factorial(5)",
        "(6 - 2) * (4 + 2)",
        "1_000 + 1e3",
        " 3 ",
    ],
)
def test_an_expression_is_what_sympy_reads(text):
    assert read_expression(text) == sympy.parse_expr(text.strip())


def test_names_mean_what_they_are_said_to_mean():
    x = sympy.Symbol("x", positive=True)
    assert read_expression("x + E", {"x": x}) == x + sympy.E
    assert read_expression("E", {"E": x}) == x


@pytest.fixture
def disarmed(monkeypatch):
    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        monkeypatch.setattr(module, "parse_expr", None)
    disarm_sympy()


@pytest.mark.usefixtures("disarmed")
def test_sympy_itself_reads_text_so():
    assert sympy.sympify("x**2 + 1") == sympy.Symbol("x") ** 2 + 1
    assert sympy.Number("1/2") == sympy.S("1/2") == sympy.Rational(1, 2)
    assert sympy.Number("0.25") == sympy.Float("0.25")
    assert str(sympy.parse_expr("6 * 7", evaluate=False)) == "6*7"
    for text in CODE:
        with pytest.raises(sympy.SympifyError):
            sympy.sympify(text)


@pytest.mark.attack("a completion is code, in an expression")
@pytest.mark.parametrize("text", CODE + HUGE + ["", "x +", "'a'", "True", "None", "1; 2", "\0"])
def test_nothing_else_is_read_as_an_expression(text):
    with pytest.raises(UnreadableError):
        read_expression(text)


@pytest.mark.parametrize("text", ["[['Q', '_'], ['_', 'Q']]", "(1, 2.5, -3)", "{'a': None}", "'text'", "7"])
def test_a_literal_is_what_python_reads(text):
    assert read_literal(text) == ast.literal_eval(text)


@pytest.mark.attack("a completion is code, in an expression")
@pytest.mark.parametrize("text", [*CODE, "x", "[x]", "[1, f(2)]", "", "[" * 500 + "]" * 500, "1" * 20_000])
def test_nothing_else_is_read_as_a_literal(text):
    with pytest.raises(UnreadableError):
        read_literal(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("(0x1f << 2) - (0xa * 0x3)", 94), ("0b101 | 2 ^ 1", 7), ("-(~5) & 0xff >> 1", 6), ("+7", 7)],
)
def test_integers_and_their_operators_are_computed(text, value):
    assert read_integers(text) == value


@pytest.mark.attack("a completion is code, in an expression")
@pytest.mark.parametrize(
    "text",
    [
        *CODE,
        "1 << 10**9",
        "(1 << 15000) * (1 << 15000)",
        "2 ** 3",
        "1.5",
        "1 / 2",
        "True",
        "1+" * 3_000 + "1",
    ],
)
def test_nothing_else_is_computed(text):
    with pytest.raises(UnreadableError):
        read_integers(text)
