"""Games of TextArena: the same episodes as in its own loop, and clear errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from millrace.config.environment_section import TextArenaEnvironmentConfig
from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import checked
from millrace.errors import SetupError
from millrace.types import Action, Task
from tests.environments.steps import ENCODE, step

# Its import binds a port, to find out whether there is IPv6.
pytestmark = pytest.mark.world
needs_textarena = pytest.mark.skipif(
    find_spec("textarena") is None, reason="needs TextArena: pip install 'millrace-rl[textarena]'"
)
MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Blackjack-v0": ["[Hit]", "[Stand]", "hit", "[stand] now"],
    "Bandit-v0": ["[red]", "[blue]", "green", "[yellow]"],
    "2048-v0-mega-easy": ["[up]", "[down]", "left", "[right]"],
    "FrozenLake-v0": ["[up]", "[down]", "left", "[right]"],
}


def factory(id, **options):
    config = TextArenaEnvironmentConfig(kind="textarena", id=id, options=options)
    return environment_factory("textarena", "textarena", config.arguments)


def act(text):
    return Action(text, (1,), "stop")


def begun(make, seed):
    game = make()
    return game, checked(game.begin(Task("", "", {}, seed, 0, 8)), "begin")


def own_loop(id, seed, moves):
    """What the policy reads by the wrapper for language models, moves included, and the final reward."""
    import textarena

    random.seed("not that of the game")
    game = textarena.make(f"{id}-raw")
    game = textarena.wrappers.ActionFormattingWrapper(textarena.wrappers.LLMObservationWrapper(game))
    game.reset(num_players=1, seed=seed)
    texts = [game.get_observation()[1]]
    for move in moves:
        done, _ = game.step(action=move)
        if done:
            return texts, game.close()[0][0]
        texts.append(game.get_observation()[1])
    return texts, None


@needs_textarena
@pytest.mark.parametrize("id", MOVES)
def test_a_game_is_the_same_as_in_the_own_loop_of_textarena(id):
    make, scores = factory(id), set()
    for seed in range(5):
        moves = random.Random(seed).choices(MOVES[id], k=60)
        expected, reward = own_loop(id, seed, moves)
        game, reply = begun(make, seed)
        texts, written = [reply.text], reply.text
        for move in moves:
            reply = checked(game.step(act(move)), "step")
            if reply.done:
                break
            shown = move if "[" in move else f"[{move}]"
            written += f"\n[Player] {shown}{reply.text}"
            texts.append(written)
        # Games of boards name the player otherwise; the texts of the game itself are what counts.
        assert len(texts) == len(expected)
        assert [text.replace("[Player 0]", "[Player]") for text in expected] == texts
        assert (reply.score if reply.done else None) == reward
        scores.add(reward)
    assert len(scores) > 1


@needs_textarena
def test_equal_seeds_and_moves_give_equal_replies_also_side_by_side():
    before = random.getstate()
    for id, moves in MOVES.items():
        make = factory(id)
        one, two, other = [begun(make, seed)[0] for seed in (3, 3, 4)]
        assert one.pure
        for move in moves[:3]:
            replies = [game.step(act(move)) for game in (one, other, two)]
            assert replies[0] == replies[2]
            if replies[0].done or replies[1].done:
                break
    # The random numbers of the process are left alone.
    assert random.getstate() == before


@needs_textarena
def test_games_in_several_threads_do_not_share_random_numbers():
    make = factory("2048-v0-mega-easy")

    def played(seed):
        game, first = begun(make, seed)
        return [first, *(game.step(act(move)) for move in MOVES["2048-v0-mega-easy"] * 3)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(played, [3, 4] * 20))
    assert all(replies == found[place % 2] for place, replies in enumerate(found))
    assert found[0] != found[1]


PLAY = """
from millrace.environments.kinds import environment_factory
from millrace.environments.textarena_environment import PURE_GAMES
from millrace.types import Action, Task
from textarena.envs.registration import ENV_REGISTRY

MOVES = ["[1]", "[right]", "[0 1]", "[red]", "[hit]", "[1 1 1]", "[down]", "[stand]"]
for folder in sorted(PURE_GAMES):
    id = next(id for id, spec in ENV_REGISTRY.items() if f".{folder}.env:" in spec.entry_point)
    make = environment_factory("textarena", "", {"id": id, "options": {}})
    assert make().pure
    game = make()
    print(id, game.begin(Task("", "", {}, 5, 0, 8)))
    for move in MOVES:
        reply = game.step(Action(move, (1,), "stop"))
        print(reply)
        if reply.done:
            break
"""


@needs_textarena
@pytest.mark.slow
def test_games_that_are_called_pure_are_the_same_in_another_process():
    def played(hash_seed):
        return subprocess.run(
            [sys.executable, "-c", PLAY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout

    assert played("1") == played("2") != ""


@needs_textarena
def test_a_move_that_is_not_allowed_is_left_to_the_game():
    game, _ = begun(factory("GuessTheNumber-v0"), 3)
    assert "You attempted an invalid move" in game.step(act("well")).text
    reply = game.step(act("well"))
    assert (reply.done, reply.score, reply.invalid) == (True, 0.0, "")
    reply = begun(factory("GuessTheNumber-v0"), 3)[0].step(act(f"[{'9' * 5000}]"))
    assert reply.done and "too long" in reply.invalid
    # A game that gives a reason in place of a reward.
    game, _ = begun(factory("ThreeCardMonte-v0"), 3)
    game.step(act("[9]"))
    reply = game.step(act("[9]"))
    assert reply.done and reply.invalid


@needs_textarena
def test_a_game_that_raises_fails_its_episode(monkeypatch):
    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    replies = []
    environments = EnvironmentsInThread(factory("GuessTheNumber-v0"), ENCODE, replies.append)

    def raises(self, action):
        raise OSError("the number is gone")

    monkeypatch.setattr(GuessTheNumberEnv, "step", raises)
    environments.execute(step())
    environments.execute(step("[1]"))
    assert not replies[0].failure
    assert replies[1].failure.startswith("step 1 raised OSError: the number is gone (test_textarena.py")


@needs_textarena
@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("GuesTheNumber-v0", {}, "there is no such game; did you mean GuessTheNumber-v0"),
        ("GuessTheNumber-v0", {"size": 2}, r"with environment.options \{'size': 2\}: TypeError: .*'size'"),
        ("GuessTheNumber-v0", {"min_number": 9, "max_number": 3}, "cannot begin with one player.*ValueError"),
        ("TicTacToe-v0", {}, "cannot begin with one player; choose a game for one .*has to be 2"),
        ("QuantumTicTacToe-v0", {}, "is a game for several players"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(id, options, message):
    with pytest.raises(SetupError, match=message):
        factory(id, **options)


@needs_textarena
def test_a_game_that_asks_another_model_is_refused(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "secret")
    with pytest.raises(SetupError, match="asks the model of a provider"):
        factory("TwentyQuestions-v0")


@needs_textarena
def test_word_lists_are_not_downloaded(monkeypatch):
    import nltk

    calls = []
    monkeypatch.setattr(nltk, "download", lambda *words, **options: calls.append(words))
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.delitem(sys.modules, "textarena.envs.Wordle.env", raising=False)
    with pytest.raises(SetupError, match="needs word lists of nltk; install them with python -m nltk.down"):
        factory("Wordle-v0")
    assert not calls and nltk.download is not None


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(SetupError, match=r'pip install "millrace-rl\[textarena\]"'):
        factory("GuessTheNumber-v0")
