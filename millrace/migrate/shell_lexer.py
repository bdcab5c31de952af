"""Statements and words of a shell script, without a shell: quotes, continuations, comments, expansions.

It reads the subset of bash that launch scripts use. Nothing is executed: a command substitution stays what it
is, a `Substitution` of its text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from millrace.config.recipe import ConfigError

NAME = re.compile(r"[A-Za-z_]\w*")
SEPARATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")")
AFTER_BACKSLASH = re.compile(r"\\[ \t]+(#.*)?\n")
REDIRECTION = re.compile(r"\d*(>>|>&|>|<<<|<<|<)(&?\d)?|&>")


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """`$name`, or `${name:-default}`; `rest` is what follows the name within the braces."""

    name: str
    rest: str = ""
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """`$((expression))`."""

    expression: str


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(command)`: its text."""

    text: str


Piece = Text | Variable | Sum | Substitution


@dataclass(slots=True)
class Word:
    """One word before its expansion, and its line. `array` is what the parentheses of NAME=(...) hold."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def literal(self) -> str | None:
        """Its text, if it has no expansion."""
        if self.array is not None or not all(isinstance(piece, Text) for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Text))

    @property
    def head(self) -> str:
        """The unquoted characters that it begins with."""
        first = self.pieces[0] if self.pieces else None
        return first.text if isinstance(first, Text) and not first.quoted else ""


@dataclass(frozen=True, slots=True)
class Statement:
    """A simple command or keyword with its words, and the separator between the one before and it."""

    words: list[Word]
    operator: str = ""


class Lexer:
    """Reads a text from front to back."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        self._text = text.replace("\r\n", "\n")
        self._name = name
        self._at = 0
        self._line = line

    def statements(self) -> list[Statement]:
        """Every simple command and keyword, in order; ConfigError for a quote or bracket that never ends."""
        found: list[Statement] = []
        current = Statement([])
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if ended := self._end():
                if current.words:
                    found.append(current)
                    current = Statement([], ended)
                elif ended != "\n":  # a line break after && continues the list
                    current = Statement([], ended)
                continue
            redirection = REDIRECTION.match(self._text, self._at)
            if redirection:
                self._redirect(redirection)
                continue
            current.words.append(self._word())
        return [*found, current] if current.words else found

    def words(self) -> list[Word]:
        """All words, a line break between them or not."""
        return [word for statement in self.statements() for word in statement.words]

    def _error(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self._name} line {line}: {what}")

    def _starts(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _advance(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += count
        self._line += taken.count("\n")
        return taken

    def _skip_blank(self) -> bool:
        """Skip white space, a continued line or a comment; return whether there was any."""
        if self._starts("\\\n"):
            self._advance(2)
        elif AFTER_BACKSLASH.match(self._text, self._at):
            raise self._error(
                self._line, "something follows the backslash, which so continues no line; remove what follows"
            )
        elif self._text[self._at] in " \t":
            self._advance(1)
        elif self._text[self._at] == "#":
            end = self._text.find("\n", self._at)
            self._advance((len(self._text) if end < 0 else end) - self._at)
        else:
            return False
        return True

    def _end(self) -> str:
        """Read the separator that ends a statement; empty if none is here."""
        separator = next((each for each in ("\n", *SEPARATORS) if self._starts(each)), "")
        if REDIRECTION.match(self._text, self._at):
            return ""
        return self._advance(len(separator))

    def _redirect(self, found: re.Match[str]) -> None:
        """Leave out a redirection with its file; a here-document up to its end."""
        line = self._line
        self._advance(len(found[0]))
        if found[2]:
            return
        while self._at < len(self._text) and self._text[self._at] in " \t-":
            self._advance(1)
        target = self._word()
        if found[1] != "<<":
            return
        end = re.compile(rf"^\s*{re.escape(target.literal or '')}\s*$", re.M).search(self._text, self._at)
        if end is None:
            raise self._error(line, f"the here-document does not end with {target.literal}; end it")
        self._advance(end.end() - self._at)

    def _word(self) -> Word:
        word = Word(self._line)
        while self._at < len(self._text):
            here = self._text[self._at]
            is_value = word.head.endswith("=") and len(word.pieces) == 1
            if here == "(" and is_value and re.fullmatch(r"\w+\+?=", word.head):
                word.array = self._array()
                return word
            if here in " \t\n;&|()<>" or self._starts("\\\n"):
                if self._starts("\\\n") and word.pieces:
                    self._advance(2)
                    if self._at < len(self._text) and self._text[self._at] not in " \t\n":
                        continue
                break
            word.pieces += self._piece(quoted=False)
            self._join(word)
        return word

    @staticmethod
    def _join(word: Word) -> None:
        """Make one piece of the last two, if both are unquoted text."""
        if len(word.pieces) > 1:
            first, second = word.pieces[-2:]
            if (
                isinstance(first, Text)
                and isinstance(second, Text)
                and not first.quoted
                and not second.quoted
            ):
                word.pieces[-2:] = [Text(first.text + second.text)]

    def _array(self) -> list[Word]:
        line = self._line
        self._advance(1)
        found: list[Word] = []
        while self._at < len(self._text):
            if self._starts(")"):
                self._advance(1)
                return found
            if self._skip_blank():
                continue
            if self._text[self._at] in "\n;&|(<>":
                self._advance(1)
                continue
            found.append(self._word())
        raise self._error(line, "the array has no closing parenthesis; add it")

    def _piece(self, *, quoted: bool) -> list[Piece]:
        here = self._text[self._at]
        if here == "\\":
            self._advance(1)
            escaped = self._advance(1)
            if quoted and escaped not in '"\\$`':
                return [Text(f"\\{escaped}" if escaped != "\n" else "", quoted=True)]
            return [Text("" if escaped == "\n" else escaped, quoted=True)]
        if here == "'" and not quoted:
            line = self._line
            self._advance(1)
            return [Text(self._until("'", line, "the quote ' is never closed; close it"), quoted=True)]
        if here == '"' and not quoted:
            return self._double_quoted()
        if here == "`":
            line = self._line
            self._advance(1)
            return [Substitution(self._until("`", line, "the ` is never closed; close it"))]
        if here == "$":
            return [self._expansion(quoted=quoted)]
        return [Text(self._advance(1), quoted=quoted)]

    def _double_quoted(self) -> list[Piece]:
        line = self._line
        self._advance(1)
        found: list[Piece] = [Text("", quoted=True)]
        while not self._starts('"'):
            if self._at >= len(self._text):
                raise self._error(line, 'the quote " is never closed; close it')
            found += self._piece(quoted=True)
        self._advance(1)
        return found

    def _until(self, end: str, line: int, problem: str) -> str:
        place = self._text.find(end, self._at)
        if place < 0:
            raise self._error(line, problem)
        inner = self._advance(place - self._at)
        self._advance(len(end))
        return inner

    def _expansion(self, *, quoted: bool) -> Piece:
        if self._starts("$(("):
            return Sum(self._bracketed("$((", "))"))
        if self._starts("$("):
            return Substitution(self._bracketed("$(", ")"))
        if self._starts("${"):
            inner = self._bracketed("${", "}")
            name = re.match(r"#?(\w+|[@*#?])", inner)
            if name is None:
                raise self._error(
                    self._line, f"${{{inner}}} is not an expansion that is read; write its value"
                )
            return Variable(name[0], inner[name.end() :], quoted)
        name = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!])").match(self._text, self._at)
        if name is None:
            return Text(self._advance(1), quoted=quoted)
        self._advance(len(name[0]))
        return Variable(name[1], "", quoted)

    def _bracketed(self, start: str, end: str) -> str:
        """What is between brackets, with others of their kind in pairs."""
        line, opening = self._line, start[-1]
        self._advance(len(start))
        begin, depth = self._at, 0
        while self._at < len(self._text):
            if depth == 0 and self._starts(end):
                inner = self._text[begin : self._at]
                self._advance(len(end))
                return inner
            here = self._advance(1)
            depth += (here == opening) - (here == end[-1])
        raise self._error(line, f"{start} is never closed; add {end}")
