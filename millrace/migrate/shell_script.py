"""The words that a shell script starts a training with: its variables followed, nothing executed.

Assignments, `${VAR:-default}`, sums of whole numbers, arrays, `$1`, `$@`, `shift`, comparisons of texts, `&&`
and `||` are evaluated. What depends on a command has no value; to use it is an error that names the line.
"""

from __future__ import annotations

import ast
import glob
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from millrace.config.recipe import ConfigError
from millrace.migrate.shell_lexer import NAME, Lexer, Piece, Substitution, Sum, Text, Variable, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DECLARES = ("export", "local", "declare", "readonly", "typeset")
# Variables of the environment that a script may use without an assignment.
INHERITED = ("HOME", "USER", "PWD")
SKIPPED = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Unknown:
    """The value of a variable that cannot be known without running the script."""

    why: str


Value = str | list[str] | Unknown


@dataclass(frozen=True, slots=True)
class Given:
    """A word of a command after expansion, and its line; `problem` is why its value is unknown, if it is."""

    text: str
    line: int
    problem: str = ""


@dataclass(slots=True)
class _Block:
    """A branch of an if, or a group in braces. None stands for unknown.

    Attributes:
        before: whether an earlier branch ran.
        holds: whether its own condition holds.
        in_condition: its condition is not read to the end yet.
    """

    before: bool | None
    holds: bool | None
    in_condition: bool = False

    @property
    def runs(self) -> bool | None:
        return _both(_inverse(self.before), self.holds)


@dataclass
class Script:
    """Runs through a script and collects the commands that `wanted` accepts.

    Args:
        wanted: decides by the literal texts of a command's words.
        arguments: `$1`, `$2`, ...
        variables: values that replace those of the script.
    """

    name: str
    wanted: Callable[[Sequence[str]], bool]
    arguments: list[str]
    variables: Mapping[str, str]
    commands: list[list[Given]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values: dict[str, Value] = {**self.variables}
        self._blocks: list[_Block] = []
        self._until: list[str] = []
        self._succeeded: bool | None = True  # the last command
        self._assigned = ""  # the variable whose value is read

    def read(self, text: str) -> list[list[Given]]:
        """The wanted commands of a script. ConfigError if one cannot be read or uses an unknown value."""
        for statement in Lexer(text, self.name).statements():
            words = statement.words
            while words and self._is_keyword(words, statement.operator):
                words = words[1:] if words[0].literal in ("then", "else", "do", "{", "time") else []
            if not words:
                continue
            if self._until:
                self._unknown_assignments(words, "is set in a loop, a function or a case")
            elif self._blocks and self._blocks[-1].in_condition:
                block, holds = self._blocks[-1], self._holds(words)
                is_or = statement.operator == "||"
                block.holds = (_either if is_or else _both)(block.holds, holds)
            else:
                self._simple(words, statement.operator)
        return self.commands

    def _is_keyword(self, words: list[Word], operator: str) -> bool:
        """Enter or leave a block; return whether the statement began with a keyword."""
        first = words[0].literal if words[0].head else None
        if self._until:
            if first == self._until[-1]:
                self._until.pop()
                return True
            if first in SKIPPED:
                self._until.append(SKIPPED[first])
                return True
            return first in ("then", "do", "else", "{")
        if first in SKIPPED:
            self._until.append(SKIPPED[first])
            return True
        if first == "function" or (first == "{" and operator == ")"):
            self._until.append("}")
            return True
        if first == "{":
            self._blocks.append(_Block(False, self._follows(operator)))
        elif first == "if":
            self._blocks.append(_Block(False, self._holds(words[1:]), in_condition=True))
        elif first in ("elif", "else", "fi"):
            if not self._blocks:
                raise ConfigError(f"{self.name} line {words[0].line}: {first} without an if; remove it")
            last = self._blocks.pop()
            before = _either(last.before, last.holds)
            if first == "elif":
                self._blocks.append(_Block(before, self._holds(words[1:]), in_condition=True))
            elif first == "else":
                self._blocks.append(_Block(before, True))
        elif first == "then" and self._blocks:
            self._blocks[-1].in_condition = False
        elif first == "}" and self._blocks:
            self._blocks.pop()
        return first in ("if", "elif", "else", "fi", "then", "do", "time", "{", "}")

    def _follows(self, operator: str) -> bool | None:
        """Whether a command runs, by what is between the one before and it."""
        return {"&&": self._succeeded, "||": _inverse(self._succeeded)}.get(operator, True)

    def _holds(self, words: Sequence[Word]) -> bool | None:
        """Whether a test holds; None if it is another command, or has an unknown value."""
        first, last = (words[0].literal, words[-1].literal) if words else ("", "")
        if first == "!":
            return _inverse(self._holds(words[1:]))
        if len(words) == 1:
            return {"true": True, ":": True, "false": False}.get(first or "")
        if (first, last) in (("[", "]"), ("[[", "]]")):
            words = words[1:-1]
        elif first == "test":
            words = words[1:]
        else:
            return None
        try:
            if first == "[[" and words:  # which splits no words, and compares with a pattern
                texts = [" ".join(self._fields(word)) for word in words]
                return _compare(texts, self._pattern(words[-1]))
            texts = [each.text for each in self._expand(words)]
            return _compare(texts, glob.escape(texts[-1])) if texts else False
        except ConfigError:
            return None

    def _pattern(self, word: Word) -> str:
        """The pattern of a word, in which what is quoted stands for itself."""
        found = ""
        for piece in word.pieces:
            made = self._piece(piece, word.line, 0)
            text = made if isinstance(made, str) else " ".join(made)
            is_plain = isinstance(piece, Text | Variable) and not piece.quoted
            found += text if is_plain else glob.escape(text)
        return found

    def _simple(self, words: list[Word], operator: str) -> None:
        """An assignment or a command."""
        follows = self._follows(operator)
        if follows is None and operator == "&&" and self._is_wanted(words):
            follows = True  # `cd folder && python3 ...`
        states = [follows, *(block.runs for block in self._blocks)]
        if False in states:
            return
        if None in states:
            self._unknown_assignments(words, "depends on a condition that a command decides")
            if self._is_wanted(words):
                raise ConfigError(
                    f"{self.name} line {words[0].line}: whether the training starts depends on a command; "
                    "take it out of the if"
                )
            self._succeeded = None
            return
        while words and words[0].literal in DECLARES:
            words = words[1:]
        before, self._succeeded = dict(self._values), True
        while words and self._assign(words[0]):
            words = words[1:]
        if not words:
            return
        self._values = before  # the assignments before a command are its own
        self._succeeded = self._holds(words)
        first = words[0].literal
        if first == "shift":
            self._shift(words)
        elif first == "set" and len(words) > 1 and words[1].literal == "--":
            self.arguments = [each.text for each in self._expand(words[2:])]
        elif first in ("exit", "return"):
            raise ConfigError(
                f"{self.name} line {words[0].line}: the script ends here with these arguments; give those "
                "that it needs after its name"
            )
        elif self._is_wanted(words):
            self.commands.append(self._known(words))

    def _shift(self, words: list[Word]) -> None:
        count = "".join(each.text for each in self._expand(words[1:])) or "1"
        if not count.isdecimal():
            raise ConfigError(f"{self.name} line {words[0].line}: shift {count} is no number; correct it")
        if int(count) <= len(self.arguments):
            self.arguments = self.arguments[int(count) :]

    def _is_wanted(self, words: list[Word]) -> bool:
        return self.wanted([each.text for each in self._known(words)])

    def _known(self, words: list[Word]) -> list[Given]:
        """The words expanded; one whose value is unknown has its literal characters and the problem."""
        found = []
        for word in words:
            try:
                found += self._expand([word])
            except ConfigError as error:
                text = "".join(piece.text for piece in word.pieces if isinstance(piece, Text))
                found.append(Given(text, word.line, str(error)))
        return found

    def _assign(self, word: Word) -> bool:
        found = ASSIGNMENT.match(word.head)
        if found is None:
            return False
        name, append = found.groups()
        if name in self.variables:
            return True
        self._assigned = name
        try:
            value: Value
            if word.array is not None:
                value = [each.text for each in self._expand(word.array)]
            else:
                rest = Word(word.line, [Text(word.head[found.end() :]), *word.pieces[1:]])
                value = " ".join(self._fields(rest))
        except ConfigError as error:
            value = Unknown(str(error))
            self._succeeded = None
        self._assigned = ""
        before = self._values.get(name)
        if append and before is not None and not isinstance(value, Unknown):
            if isinstance(before, list) and isinstance(value, list):
                value = [*before, *value]
            elif isinstance(before, str) and isinstance(value, str):
                value = before + value
        self._values[name] = value
        return True

    def _unknown_assignments(self, words: list[Word], why: str) -> None:
        for word in words:
            found = ASSIGNMENT.match(word.head)
            if found is None and word.literal not in DECLARES:
                return
            if found is not None and found[1] not in self.variables:
                self._values[found[1]] = Unknown(
                    f"{self.name} line {word.line}: {found[1]} {why}; {_fix(found[1])}"
                )

    def _expand(self, words: Sequence[Word]) -> list[Given]:
        return [Given(text, word.line) for word in words for text in self._fields(word)]

    def _fields(self, word: Word, depth: int = 0) -> list[str]:
        """The fields that a word becomes: none for an empty unquoted one, several for an array."""
        fields = [""]
        is_quoted = False
        for piece in word.pieces:
            is_quoted |= isinstance(piece, Text) and piece.quoted
            made = self._piece(piece, word.line, depth)
            if isinstance(made, list):
                joined = made or [""]
                fields = [*fields[:-1], fields[-1] + joined[0], *joined[1:]]
            else:
                fields[-1] += made
        if fields == [""] and not is_quoted:
            return []
        many = any(isinstance(piece, Variable) and piece.name in "@*" for piece in word.pieces)
        return [] if many and fields == [""] else fields

    def _piece(self, piece: Piece, line: int, depth: int) -> str | list[str]:
        if isinstance(piece, Text):
            return piece.text
        if isinstance(piece, Sum):
            return str(self._sum(piece.expression, line))
        if isinstance(piece, Substitution):
            if piece.text.strip() == "pwd":
                return os.getcwd()
            raise ConfigError(
                f"{self.name} line {line}: $({piece.text}) runs a command, and a script is only read; "
                + (_fix(self._assigned) if self._assigned else "write its value instead")
            )
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{self.name} line {line}: the defaults of variables nest too deep; write their values"
            )
        value = self._value(piece, line, depth)
        if isinstance(value, Unknown):
            raise ConfigError(value.why)
        if isinstance(value, list):
            return value if "@" in piece.rest or piece.name == "@" else " ".join(value)
        if not piece.quoted and piece.name not in self.variables and len(value.split()) > 1:
            return value.split()
        return value

    def _value(self, piece: Variable, line: int, depth: int) -> Value:
        name, rest = piece.name, piece.rest
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit():
            value: Value | None = (
                self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else None
            )
        else:
            value = self._values.get(name)
            if value is None and name in INHERITED:
                value = os.getcwd() if name == "PWD" else os.environ.get(name)
        if rest in ("", "[@]", "[*]"):
            if value is None:
                raise ConfigError(
                    f"{self.name} line {line}: ${name} has no value in the script; {_fix(name)}"
                )
            return value
        default = re.match(r":?([-=])", rest)
        if default is not None:
            if value is None or (value == "" and rest[0] == ":"):
                inner = Lexer(
                    f'"{rest[default.end() :]}"' if '"' not in rest else rest[default.end() :],
                    self.name,
                    line,
                )
                return " ".join(field for word in inner.words() for field in self._fields(word, depth + 1))
            return value
        if re.match(r":?\+", rest):
            return "" if value is None or (value == "" and rest[0] == ":") else rest.partition("+")[2]
        if re.match(r":?\?", rest) and value is not None:
            return value
        raise ConfigError(f"{self.name} line {line}: ${{{name}{rest}}} is not read; {_fix(name)}")

    def _sum(self, expression: str, line: int) -> int:
        def value_of(found: re.Match[str]) -> str:
            text = self._piece(Variable(found[1] or found[2]), line, 0)
            return f"({text})" if isinstance(text, str) else "?"

        written = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)", value_of, expression)
        try:
            return _arithmetic(ast.parse(written.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            raise ConfigError(
                f"{self.name} line {line}: $(({expression})) is not a sum of whole numbers; write its value"
            ) from None


def _inverse(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def _either(one: bool | None, other: bool | None) -> bool | None:
    return _inverse(_both(_inverse(one), _inverse(other)))


def _compare(words: list[str], pattern: str) -> bool | None:
    """Whether a comparison holds, or None if it is none that is known; `pattern` is that of the last word."""
    match words:
        case ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case ["-z"]:
            return True
        case [left, "=" | "==", _]:
            return fnmatchcase(left, pattern)
        case [left, "!=", _]:
            return not fnmatchcase(left, pattern)
        case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as word, right]:
            if all(re.fullmatch(r"-?\d+", each) for each in (left, right)):
                compare: Callable[[int, int], bool] = getattr(operator, word[1:])
                return compare(int(left), int(right))
    return None


def _fix(name: str) -> str:
    return (
        f"give it: --set {name}=VALUE" if NAME.fullmatch(name) else "give it as an argument after the script"
    )


def _arithmetic(node: ast.expr) -> int:
    """Whole numbers and + - * / % with shell rounding; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return abs(left) // abs(right) * (1 if left * right >= 0 else -1)
            case ast.Mod():
                return abs(left) % abs(right) * (1 if left >= 0 else -1)
    raise ValueError("not arithmetic")
