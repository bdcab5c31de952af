"""Parse model output without evaluating it: arithmetic as SymPy expressions, integers, and literals.

SymPy's own `parse_expr` and Python's `eval` execute any Python code in the text. Here Python's parser builds
a syntax tree, which executes nothing, and an allowlist maps its nodes to SymPy operations.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import sympy.parsing.sympy_parser

MAX_CHARACTERS = 10_000
MAX_NODES = 2_000
MAX_BITS = 20_000
MAX_FACTORIAL = 1_000
LARGE = frozenset({"factorial", "binomial"})
GROWING = frozenset({"exp", "sinh", "cosh"})
INTEGER_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo}
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int]] = {
    name: (getattr(sympy, name), most)
    for most, names in (
        (1, "sin cos tan cot sec csc asin acos atan acot asec acsc"),
        (1, "sinh cosh tanh coth sech csch asinh acosh atanh exp sqrt cbrt factorial"),
        (1, "Abs sign floor ceiling erf erfi Ei Si Ci re im conjugate"),
        (2, "log ln atan2 Rational Min Max binomial"),
    )
    for name in names.split()
} | {"abs": (sympy.Abs, 1)}


class UnreadableError(ValueError):
    """The text is not an expression, or exceeds the size limits of this module."""


def read_expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Parse a SymPy expression of numbers, names, `+ - * / // % **`, and the functions of FUNCTIONS.

    Decimals become `sympy.Float`; quotients of integers stay exact. A name is looked up in `local_dict`,
    then among pi, E, I and oo, and is a symbol otherwise. Raises UnreadableError for anything else, more than
    10,000 characters, more than 2,000 syntax nodes, or a power of more than 20,000 bits.
    """
    text = text.strip()
    return _expression(_tree(text, MAX_NODES), text, local_dict or {})


def disarm_sympy() -> None:
    """Replace SymPy's parser by `read_expression` in this process: `parse_expr`, `sympify`, `Number`, `S`.

    SymPy's own parser evaluates the text, and SymPy calls it wherever a string is passed for a number.
    """
    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        module.parse_expr = _parse_expr


def _parse_expr(
    text: str, local_dict: Mapping[str, Any] | None = None, evaluate: bool = True, **_: Any
) -> Any:
    """Replace SymPy's `parse_expr`; `sympify` converts this SyntaxError into its own error."""
    try:
        with sympy.evaluate(evaluate):
            return read_expression(text, local_dict)
    except UnreadableError as error:
        raise SyntaxError(str(error)) from error


def read_literal(text: str) -> Any:
    """Parse a Python literal: numbers, strings, booleans, None, and lists, tuples and dicts of them.

    Raises UnreadableError for anything else, or more than 10,000 characters.
    """
    tree = _tree(text.strip())
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableError("the text is not a literal") from error


def read_integers(text: str) -> int:
    """Evaluate an integer expression of `+ - * << >> & | ^ ~`, as in a bitwise problem.

    Raises UnreadableError for anything else, or a value of more than 20,000 bits.
    """
    return _integer(_tree(text.strip(), MAX_NODES))


def _tree(text: str, max_nodes: float = math.inf) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UnreadableError("the text is not an expression") from error
    if sum(1 for _ in ast.walk(tree)) > max_nodes:
        raise UnreadableError(f"the expression has more than {max_nodes} parts")
    return tree


def _expression(node: ast.expr, text: str, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return sympy.Integer(value)
        case ast.Constant(value=float()):
            # Use the source text: Python's float is already rounded.
            return sympy.Float((ast.get_source_segment(text, node) or "").replace("_", ""))
        case ast.Name(id=name):
            return names[name] if name in names else CONSTANTS.get(name, sympy.Symbol(name))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _expression(operand, text, names)
            return value if isinstance(sign, ast.UAdd) else -value
        case ast.BinOp(left=left, op=sign, right=right):
            one, other = _expression(left, text, names), _expression(right, text, names)
            if type(sign) not in OPERATORS:
                raise UnreadableError("the expression holds another operator than + - * / // % **")
            return OPERATORS[type(sign)](one, other)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            values = [_expression(argument, text, names) for argument in arguments]
            return _applied(name, values)
    raise UnreadableError("the expression holds something else than arithmetic")


def _applied(name: str, values: list[Any]) -> Any:
    function, most = FUNCTIONS[name]
    if not 1 <= len(values) <= most:
        raise UnreadableError(f"{name} takes 1 to {most} values and was given {len(values)}")
    numbers = [value for value in values if value.is_number]
    if name in LARGE and not all(value.is_finite and abs(value) <= MAX_FACTORIAL for value in numbers):
        raise UnreadableError(f"{name} of a number above {MAX_FACTORIAL}")
    if name in GROWING and any(value.is_finite and abs(value) > MAX_BITS for value in numbers):
        raise UnreadableError(f"{name} of a number above {MAX_BITS}")
    return function(*values)


def _power(base: Any, exponent: Any) -> Any:
    """Return base**exponent if the result stays below MAX_BITS bits and the exponent below MAX_BITS."""
    if exponent.is_number:
        if not exponent.is_finite or abs(exponent) > MAX_BITS:
            raise UnreadableError(f"a power above {MAX_BITS}")
        if base.is_Rational:
            bits = max(int(base.p).bit_length(), int(base.q).bit_length())
            if bits * abs(exponent) > MAX_BITS:
                raise UnreadableError(f"a power of more than {MAX_BITS} bits")
    return base**exponent


OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() | ast.Invert() as sign, operand=operand):
            value = _integer(operand)
            return value if isinstance(sign, ast.UAdd) else -value if isinstance(sign, ast.USub) else ~value
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in INTEGER_OPERATORS:
            one, other = _integer(left), _integer(right)
            shifts = isinstance(operator, ast.LShift)
            if one.bit_length() + (other if shifts else other.bit_length()) > MAX_BITS:
                raise UnreadableError(f"a number of more than {MAX_BITS} bits")
            return INTEGER_OPERATORS[type(operator)](one, other)
    raise UnreadableError("the text holds something else than integers and their operators")
