"""The environment `textarena`: a game of that package for one player. No torch."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from millrace.data.functions import explain
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError, did_you_mean
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Action, Reply, Task

# Games pass their seed on to generators that take no more than 31 bits.
NUM_SEEDS = 1 << 31
_MAX_ERROR = 500
# Games read numbers with int(), which raises if they are longer than some thousand digits.
_LONG_NUMBER = re.compile(r"\d{1000}")
# The games, by the folder of their code, whose replies depend on seed and actions alone. Those of words keep
# them in sets, whose order differs between processes.
PURE_GAMES = frozenset(
    {
        "Bandit",
        "Blackjack",
        "Countdown",
        "Crosswords",
        "Cryptarithm",
        "FifteenPuzzle",
        "FrozenLake",
        "Game2048",
        "GuessTheNumber",
        "LightsOut",
        "LogicPuzzle",
        "Mastermind",
        "Minesweeper",
        "PegJump",
        "RushHour",
        "Secretary",
        "Set",
        "Slitherlink",
        "Sokoban",
        "Sudoku",
        "ThreeCardMonte",
        "TowerOfHanoi",
    }
)
# The state of the module `random`, from which games take their numbers, belongs to one game at a time.
_LOCK = threading.Lock()


class TextArenaEnvironment:
    """An episode of a game for one player; what the game adds after each move is the reply.

    Its texts are those of TextArena's `LLMObservationWrapper`, without the moves, which the policy wrote
    itself. The reward at the end of the game is the score.
    """

    def __init__(self, id: str, options: Mapping[str, Any], *, pure: bool) -> None:
        self._id, self._options, self.pure = id, options, pure

    def begin(self, task: Task) -> Reply:
        """Begin a game by the seed of the task."""
        seed = task.seed % NUM_SEEDS
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game = _make(self._id, self._options)
            self._game.reset(num_players=1, seed=seed)
            return Reply(new_text(self._game))

    def step(self, action: Action) -> Reply:
        """Make the move that the completion has; the game replies to one that is not allowed, too."""
        if _LONG_NUMBER.search(action.text):
            return Reply(done=True, invalid="the move has a number that is too long to be read")
        with self._own_random():
            done, _ = self._game.step(action=action.text)
            if not done:
                return Reply(new_text(self._game))
            rewards, info = self._game.close()
        reward = (rewards or {}).get(0)
        if isinstance(reward, int | float):
            return Reply(done=True, score=float(reward))
        # Some games put the reason of an invalid move where its reward should be.
        if info[0].get("invalid_move"):
            return Reply(done=True, invalid=plain_text(f"{info[0].get('reason') or reward}", _MAX_ERROR))
        raise EnvironmentFailed(f"ended a game with the reward {reward!r}, not a number")

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _LOCK:
            others = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)


def textarena_factory(id: str, *, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return what makes a game for each episode, after a first one was begun as a test.

    Args:
        id: of TextArena's registry.
        options: keyword arguments of the game, in place of those of the registry.

    Raises:
        SetupError: textarena is not installed, there is no such game, it does not take the options, needs
            other players, another model or data that is not installed, or cannot begin.
    """
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError:
        raise SetupError(
            "environment kind textarena needs the package textarena; install it with pip install "
            '"millrace-rl[textarena]"'
        ) from None
    name = f"environment textarena {id}"
    if id not in ENV_REGISTRY:
        hint = did_you_mean(id, list(ENV_REGISTRY), "textarena.pprint_registry_detailed() lists them")
        raise SetupError(f"{name}: there is no such game; {hint}")
    game = TextArenaEnvironment(id, options, pure=False)
    try:
        with _LOCK:
            made = _make(id, options)
    except Exception as error:
        if isinstance(error, LookupError) and "nltk.download" in str(error):
            raise SetupError(
                f"{name} needs word lists of nltk; install them with python -m nltk.downloader words "
                "averaged_perceptron_tagger_eng"
            ) from error
        raise SetupError(
            f"{name} cannot be made with environment.options {dict(options)}: {_reason(error)}"
        ) from error
    base = _unwrapped(made)
    if any(isinstance(value, textarena.Agent) for value in vars(base).values()):
        raise SetupError(f"{name} asks the model of a provider for its replies, which is not supported")
    try:
        game.begin(Task("", "", {}, seed=0, sample=0, max_turns=1))
    except Exception as error:
        raise SetupError(
            f"{name} cannot begin with one player; choose a game for one ({_reason(error)})"
        ) from error
    if not isinstance(_unwrapped(game._game).state, textarena.SinglePlayerState):
        raise SetupError(f"{name} is a game for several players; choose one for one player")
    folder = type(base).__module__.removeprefix("textarena.envs.").split(".")[0]
    return lambda: TextArenaEnvironment(id, options, pure=folder in PURE_GAMES)


def new_text(game: Any) -> str:
    """Return what a game added since the last call, without the moves."""
    from textarena import GAME_ID, ObservationType

    base = _unwrapped(game)
    roles = base.state.role_mapping
    _, messages = base.get_observation()
    lines = []
    for sender, message, kind in messages:
        if kind != ObservationType.PLAYER_ACTION:
            role = "GAME" if sender == GAME_ID else roles.get(sender, f"Player {sender}")
            lines.append(f"\n[{role}] {message}")
    return "".join(lines)


def _make(id: str, options: Mapping[str, Any]) -> Any:
    """Make a game. Those of words would load word lists from the internet, each time they are made."""
    import nltk
    import textarena

    download, nltk.download = nltk.download, lambda *words, **options: False
    try:
        return textarena.make(id, **options)
    finally:
        nltk.download = download


def _unwrapped(game: Any) -> Any:
    """Return the game within wrappers; those of observations repeat all texts so far."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


def _reason(error: Exception) -> str:
    return plain_text(explain(error), _MAX_ERROR)
