"""Tools of MCP servers: a call gets a reply or fails with a reason, and no server outlives its episode."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.environment_section import McpServerSection
from millrace.environments import mcp_tools
from millrace.environments.kinds import tools_factory
from millrace.environments.running_episodes import EnvironmentFailed, is_pure
from millrace.errors import SetupError
from tests.environments.steps import TASK
from tests.environments.test_tool_environment import calling, contents
from tests.rewards.helpers import ends_within

pytestmark = pytest.mark.world
FOLDER = Path(__file__).parent
RULES: dict[str, Any] = {
    "sandbox": "none",
    "parallel_calls": 8,
    "max_characters": 1000,
    "max_invalid_calls": 1,
}
NAMES = [
    "echo",
    "count",
    "large",
    "parts",
    "reject",
    "fail",
    "broken",
    "die",
    "hang",
    "variable",
    "process",
    "half",
]


def by_hand(fault: str = "", **given: Any) -> dict[str, Any]:
    return {"command": ["python", str(FOLDER / "mcp_server.py"), fault], **given}


def factory(*servers: dict[str, Any], functions: tuple[str, ...] = ()) -> Callable[[], Any]:
    return tools_factory(functions, servers=servers, **RULES)


def play(make: Callable[[], Any], *turns: list[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """The replies to each turn of one episode, on one event loop, as in a worker."""

    async def episode() -> list[list[str]]:
        game = make()
        await game.begin(TASK)
        try:
            return [contents(await game.step(calling(*turn))) for turn in turns]
        finally:
            await game.close()
            await asyncio.wait({*mcp_tools._TASKS, asyncio.ensure_future(asyncio.sleep(0))})

    return asyncio.run(episode())


def echo(text: str) -> tuple[str, dict[str, Any]]:
    return "echo", {"text": text}


@pytest.mark.slow
def test_the_tools_of_a_server_are_shown_and_called() -> None:
    make = factory(by_hand(), functions=("tests.environments.tool_samples:multiply",))
    begun = asyncio.run(make().begin(TASK))
    assert [tool["function"]["name"] for tool in begun.tools] == ["multiply", *NAMES]
    assert begun.tools[1]["function"]["parameters"]["required"] == ["text"]
    assert not is_pure(make())
    turns = play(make, [echo("one"), echo("two"), ("multiply", {"product": "3*4"})], [echo("é\ud800")])
    assert turns == [["one", "two", "=12;"], ["é?"]]
    ((text,),) = play(make, [("count", {"number": float("nan")})])
    assert text.startswith("error: Out of range float values")


def test_an_episode_has_a_server_of_its_own_unless_it_is_shared() -> None:
    own = factory(by_hand())
    assert play(own, [("count", {})], [("count", {})]) == [["1"], ["2"]]
    assert play(own, [("count", {})]) == [["1"]]

    async def two_episodes() -> list[str]:
        found = []
        for _ in range(2):
            game = shared()
            found += contents(await game.step(calling(("count", {}), ("count", {}))))
            await game.close()
        return found

    shared = factory(by_hand(shared=True))
    assert sorted(asyncio.run(two_episodes())) == ["1", "2", "3", "4"]


def test_results_that_are_not_text_are_named() -> None:
    ((parts, large),) = play(factory(by_hand()), [("parts", {}), ("large", {})])
    assert parts.splitlines() == [
        "first",
        "[image image/png, 4 characters of base64]",
        "of a file",
        "[file:///b.txt]",
    ]
    assert len(large) == 1000 and large.startswith("beginx") and large.endswith("xend")


def test_a_call_that_the_server_rejects_is_answered() -> None:
    assert play(factory(by_hand()), [("reject", {}), ("fail", {})]) == [
        ["error: no such city", "error: the service is closed"]
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "the disk is full"), ("die", "Connection closed")],
)
def test_a_server_that_fails_is_no_fault_of_the_policy(name: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailed, match=rf"^MCP server python .*: {reason}$"):
        play(factory(by_hand()), [(name, {})])


def test_a_shared_server_that_was_lost_is_started_again() -> None:
    server = McpServerSection(**by_hand(shared=True))

    async def calls() -> str:
        connection = mcp_tools.McpConnection(server)
        with pytest.raises(EnvironmentFailed, match="Connection closed"):
            await connection.call("die", {})
        found = await connection.call("count", {})
        await connection.close()
        await asyncio.wait(set(mcp_tools._TASKS))
        return found

    assert asyncio.run(calls()) == "1"


def test_a_call_that_fails_leaves_a_shared_server_to_the_others() -> None:
    server = McpServerSection(**by_hand(shared=True))

    async def calls() -> list[str]:
        connection = mcp_tools.McpConnection(server)
        with pytest.raises(EnvironmentFailed, match="the disk is full"):
            await connection.call("broken", {})
        found = [await connection.call("count", {})]
        both = [asyncio.ensure_future(connection.call("die", {})) for _ in range(2)]
        await asyncio.wait(both)
        assert all(isinstance(one.exception(), EnvironmentFailed) for one in both)
        found += sorted(await asyncio.gather(*(connection.call("count", {}) for _ in range(2))))
        await connection.close()
        await asyncio.wait(set(mcp_tools._TASKS))
        return found

    assert asyncio.run(calls()) == ["2", "1", "2"]


@pytest.mark.slow
def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    async def late() -> None:
        game = factory_()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(game.step(calling(("hang", {}))), 3.0)
        await game.close()
        await asyncio.wait(set(mcp_tools._TASKS))

    factory_ = factory(by_hand())
    asyncio.run(late())
    assert not mcp_tools._TASKS


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("fault", ["", "stays"])
def test_a_server_and_what_it_started_end_with_the_episode(fault: str) -> None:
    ((told,),) = play(factory(by_hand(fault)), [("process", {})])
    assert ends_within(json.loads(told)["server"], 30.0)
    if fault:  # one that ends by itself is asked to end its own children, and not watched
        assert ends_within(json.loads(told)["child"], 30.0)
    else:
        os.kill(json.loads(told)["child"], 9)


def test_a_server_sees_the_variables_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_CITY", "Ghent")
    assert play(factory(by_hand()), [("variable", {"text": "SHOP_CITY"})]) == [["Ghent"]]


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": ["no-such-program"]}, "MCP server no-such-program did not start: .*No such file"),
        (by_hand("exit"), "mcp_server.py exit did not start: Connection closed"),
        (by_hand("silent"), "mcp_server.py silent did not list its tools within 3 s"),
        (by_hand("tools"), "mcp_server.py tools did not start: .*tools"),
        (by_hand("pages"), "mcp_server.py pages did not start: .*it listed more than 100 pages of tools"),
        (by_hand("schema"), "tool 1 .odd.: parameters.a has the type 'date'.*environment.mcp_servers.tools"),
        (by_hand(tools=["echo", "sing"]), "has no tool sing, .* it has: echo, count, "),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP server http://127.0.0.1:9/mcp did not start: "),
        (
            {"url": "http://127.0.0.1:9/mcp", "api_key_env": "NO_SUCH_KEY"},
            "^MCP server http://127.0.0.1:9/mcp takes its key from the variable NO_SUCH_KEY, which is not "
            "set; set it, or remove api_key_env$",
        ),
    ],
    ids=str,
)
def test_a_server_that_cannot_be_used_is_a_sentence(server: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        mcp_tools.list_tools([McpServerSection(**server)], 3.0 if "silent" in str(server) else 60.0)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(SetupError, match=r'install it with pip install "millrace-rl\[mcp\]"$'):
        factory(by_hand())


def test_rubbish_on_stdout_is_ignored() -> None:
    assert play(factory(by_hand("binary")), [echo("one")]) == [["one"]]


def test_two_tools_of_one_name_are_refused_and_chosen_among() -> None:
    with pytest.raises(SetupError, match=r"two tools called echo; .* with environment\.mcp_servers\.tools$"):
        factory(by_hand(tools=["echo"]), by_hand(tools=["count", "echo"]))
    assert play(factory(by_hand(tools=["echo"]), by_hand(tools=["count"])), [echo("a"), ("count", {})]) == [
        ["a", "1"]
    ]


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Iterator[str]:
    command = [sys.executable, str(FOLDER / "mcp_sdk_server.py"), "http", "secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.kill()


@pytest.mark.slow
def test_a_server_of_the_sdk_over_stdio() -> None:
    make = factory({"command": ["python", str(FOLDER / "mcp_sdk_server.py")]})
    (shown,) = asyncio.run(make().begin(TASK)).tools
    assert shown["function"]["parameters"]["properties"]["count"]["type"] == "integer"
    turns = play(
        make, [("add", {"count": 2})], [("add", {"count": 3, "fruit": "figs"}), ("add", {"count": -1})]
    )
    assert turns == [["2 apples"], ["5 figs", "error: Error executing tool add"]]


@pytest.mark.slow
def test_a_server_over_http_gets_the_token(http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "secret")
    make = factory({"url": http, "api_key_env": "SHOP_KEY"})
    assert play(make, [("add", {"count": 2})], [("add", {"count": 3})]) == [["2 apples"], ["5 apples"]]
    with pytest.raises(
        SetupError, match=rf"^MCP server {http} did not start: it replied 401; set api_key_env"
    ):
        factory({"url": http})
