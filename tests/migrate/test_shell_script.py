"""Scripts are read as bash reads them, without running anything."""

from __future__ import annotations

import subprocess

import pytest

from millrace.config.recipe import ConfigError
from millrace.migrate.shell_script import Script

# Scripts with a command `go`, and the words that it gets, with the arguments `first second`.
SCRIPTS = {
    "a=1\ngo x=$a y=${a} z=\"$a b\" w='$a'": ["x=1", "y=1", "z=1 b", "w=$a"],
    "go one \\\n  two \\\n  three\nb=2": ["one", "two", "three"],
    'go ${none:-default} ${none:-a b} "${none:-a b}" ${none-}': ["default", "a", "b", "a b"],
    "a=; go ${a:-empty} [${a-kept}] ${a:+no} ${a+yes}": ["empty", "[]", "yes"],
    "a=3; b=$((a * 2 + (7 - 1) / 4)); go $b $(( -7 / 2 )) $((b % 4))": ["7", "-3", "3"],
    "A=(x=1 'y z' # comment\n  w=3\n)\nA+=(v=4)\ngo \"${A[@]}\" end": ["x=1", "y z", "w=3", "v=4", "end"],
    'go "$@" $# $1 ${2:-none} ${9:-none}': ["first", "second", "2", "first", "second", "none"],
    'shift 1\ngo "$@"': ["second"],
    "a='one two'; go $a \"$a\"": ["one", "two", "one two"],
    'if [ "$1" = first ]; then a=yes; elif [ 1 -eq 1 ]; then a=maybe; else a=no; fi\ngo $a': ["yes"],
    "b=; if [[ $b == x ]]; then a=yes\nelse\n  a=no\nfi; go $a": ["no"],
    "for i in 1 2; do b=$i; done\ncase x in y) c=1;; esac\nfunction f() { d=1; }\ngo a": ["a"],
    "go a > /dev/null b 2>&1 && true": ["a", "b"],
    "cat > /dev/null <<EOF\ngo ignored $(date)\nEOF\ngo a": ["a"],
    'go \'it\'\'s\' "a\\"b" a\\ b "c\\d" # end': ["its", 'a"b', "a b", "c\\d"],
    "a=${b:=x}; go $a": ["x"],
    "export a=1 b=2\nX=1 go $a$b": ["12"],
    "go pre\"mid\"'post'": ["premidpost"],
    "go a;b=3 # no\n": ["a"],
    "a=1; [ x = y ] && a=2; [ x = x ] || a=3; ! [ a = b ] && b=4; go $a $b": ["1", "4"],
    "if [ 1 = 2 ] || [ 2 = 2 ] &&\n [ 3 != 4 ]; then a=yes; else a=no; fi; go $a": ["yes"],
    'm=Qwen3; [[ $m == *wen* ]] && a=1; [[ $m != "Q*" ]] && b=2; go $a $b': ["1", "2"],
    "n=2; shift $n; [ $# -eq 0 ] || { go no; exit 1; }; go $#": ["0"],
    "a=1; a=2 true; f() { c=3; return; }\nset -- x y; cd . && go $a $2": ["1", "y"],
}


def commands(text: str, arguments: tuple[str, ...] = (), **variables: str) -> list[list[str]]:
    script = Script("x.sh", lambda words: "go" in words, list(arguments), variables)
    return [[each.text for each in command] for command in script.read(text)]


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_command_gets_its_words(text: str) -> None:
    (command,) = commands(text, ("first", "second"))
    assert command[command.index("go") + 1 :] == SCRIPTS[text]


@pytest.mark.world
def test_these_are_the_words_of_bash() -> None:
    whole = "".join(
        f"( go() {{ printf '%s\\n' \"$@\" >&3; }}\nset -- first second\n{text}\n) 3>&1 >/dev/null; echo "
        "----\n"
        for text in SCRIPTS
    )
    done = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, timeout=60, check=True)
    given = [part.splitlines() for part in done.stdout.split("----\n")[: len(SCRIPTS)]]
    assert dict(zip(SCRIPTS, given, strict=True)) == SCRIPTS


def test_a_command_is_never_run(tmp_path) -> None:
    made = tmp_path / "made"
    text = f"a=$(touch {made})\nb=`touch {made}`\nif touch {made}; then c=1; fi\ntouch {made}\ngo x"
    assert commands(text) == [["go", "x"]]
    assert not made.exists()


def test_a_variable_can_be_given() -> None:
    assert commands("NOW=$(date)\ngo $NOW", NOW="today") == [["go", "today"]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "NOW=$(date)\ngo n=$NOW",
            r"x.sh line 1: $(date) runs a command, and a script is only read; give it: --set NOW=VALUE",
        ),
        ("go n=$NOW", "x.sh line 1: $NOW has no value in the script; give it: --set NOW=VALUE"),
        (
            "for a in 1 2; do b=$a; done\ngo n=$b",
            "x.sh line 1: b is set in a loop, a function or a case; give it: --set b=VALUE",
        ),
        (
            "if grep x y; then b=1; fi\ngo n=$b",
            "x.sh line 1: b depends on a condition that a command decides; give it: --set b=VALUE",
        ),
        (
            "b=0; grep x y && b=1\ngo n=$b",
            "x.sh line 1: b depends on a condition that a command decides; give it: --set b=VALUE",
        ),
        ("go n=$((1.5 * 2))", "x.sh line 1: $((1.5 * 2)) is not a sum of whole numbers; write its value"),
        ("go n=$((2 ** 99))", "x.sh line 1: $((2 ** 99)) is not a sum of whole numbers; write its value"),
        ("a=x\ngo n=${a//x/y}", "x.sh line 2: ${a//x/y} is not read; give it: --set a=VALUE"),
    ],
)
def test_a_value_that_is_not_known_names_its_line(text: str, problem: str) -> None:
    script = Script("x.sh", lambda words: "go" in words, [], {})
    ((_, word),) = script.read(text)
    assert (word.text.partition("=")[0], word.problem) == ("n", problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("go 'a\nb", "x.sh line 1: the quote ' is never closed; close it"),
        ('\ngo "a\nb', 'x.sh line 2: the quote " is never closed; close it'),
        ("A=(a\nb", "x.sh line 1: the array has no closing parenthesis; add it"),
        ("go ${a", "x.sh line 1: ${ is never closed; add }"),
        (
            "go a \\ \n b",
            "x.sh line 1: something follows the backslash, which so continues no line; remove what follows",
        ),
        (
            "if true; then exit 1; fi\ngo",
            "x.sh line 1: the script ends here with these arguments; give those that it needs after its name",
        ),
        (
            "if grep x y; then go a; fi",
            "x.sh line 1: whether the training starts depends on a command; take it out of the if",
        ),
        ("shift x", "x.sh line 1: shift x is no number; correct it"),
        ("fi", "x.sh line 1: fi without an if; remove it"),
        ("cat <<EOF\nx", "x.sh line 1: the here-document does not end with EOF; end it"),
    ],
)
def test_a_script_that_cannot_be_read_names_the_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        commands(text)
    assert str(caught.value) == problem
