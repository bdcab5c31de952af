"""The process that renders and tokenizes: what stops it, and that it starts again."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.data.chat import CHAT
from millrace.inference.server import text_process
from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.text_process import TextProcess
from millrace.processes.child import ChildProcess
from tests.house.source import ROOT
from tests.inference.server.attacks import GROWING, LOOPING
from tests.inference.server.running import tokenizer, wait_until
from tests.rewards.helpers import child_of, is_running

pytestmark = pytest.mark.world

# Of the processor: a slow one takes 0.2 s for an ordinary text.
CPU_S = 2.0


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def process(chat_template: str | None = None, folder: Path | None = None, cpu_s: float = 10.0) -> TextProcess:
    words = copy.deepcopy(tokenizer())
    words.chat_template = chat_template or words.chat_template
    return TextProcess(words, folder, template=CHAT, max_length=64, cpu_s=cpu_s)


def using(made: TextProcess, use) -> None:
    async def run() -> None:
        await made.start()
        try:
            await use(made)
        finally:
            await made.close()

    asyncio.run(run())


async def refusal(made: TextProcess, do: str, value: object) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await made.ask(do, value)
    return refused.value


def child_process(made: TextProcess) -> ChildProcess:
    (child,) = made._children.children
    return child


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_it_answers_as_its_functions_do_one_after_another_and_all_at_once():
    expected = tokenizer()("<user>turns?<assistant>")["input_ids"]

    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("turns?"))) == expected
        texts = [f"the wheel {number}" for number in range(20)]
        answers = await asyncio.gather(*(made.ask("prompts", [text]) for text in texts))
        assert [json.loads(answer) for answer in answers] == [[tokenizer()(t)["input_ids"]] for t in texts]
        long = "the wheel turns " * 20_000
        assert (
            json.loads(await made.ask("tokenize", {"prompt": long}))["tokens"]
            == tokenizer()(long)["input_ids"]
        )

    using(process(), use)


@pytest.mark.slow
def test_a_template_that_loops_is_given_up_and_the_next_text_is_taken():
    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        child = child_process(made)
        for _ in range(2):
            error = await refusal(made, "messages", say("loop"))
            assert (error.status, error.param) == (400, "messages")
            assert error.message == (
                "the text took more than 2 s to render and tokenize and was given up; send less, or mend "
                "the model's chat template"
            )
            assert json.loads(await made.ask("messages", say("a")))
        # The tokenizer was not loaded again.
        assert child_process(made) is child

    using(process(LOOPING, cpu_s=CPU_S), use)


@pytest.mark.slow
def test_a_template_that_allocates_without_end_is_refused():
    async def use(made: TextProcess) -> None:
        error = await refusal(made, "messages", say("grow"))
        assert (error.status, error.message) == (400, "the text needs more than 2 GiB of memory")
        assert json.loads(await made.ask("messages", say("a")))

    using(process(GROWING), use)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_replaced():
    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        (worker,) = children(child_of(child_process(made)._popen.pid))
        before = _cpu_ticks(worker)
        asking = asyncio.create_task(refusal(made, "messages", say("loop")))
        # To read the request takes less than a tick of 10 ms, so after ten it is in the template's loop.
        while _cpu_ticks(worker) < before + 10:
            await asyncio.sleep(0.01)
        os.kill(worker, signal.SIGSEGV)
        error = await asking
        assert error.status == 400
        assert error.message.startswith("the process that tokenizes ended with signal 11 at this text")
        assert json.loads(await made.ask("messages", say("a")))

    using(process(LOOPING, cpu_s=100.0), use)


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process in user and kernel mode, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.slow
def test_a_process_that_is_lost_is_started_again(tmp_path):
    tokenizer().save_pretrained(tmp_path)

    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        first = child_process(made)._popen.pid
        (worker,) = children(child_of(first))
        os.kill(child_of(first), signal.SIGKILL)
        while is_running(worker):
            await asyncio.sleep(0.01)
        error = await refusal(made, "messages", say("a"))
        assert error.status == 503
        assert error.message.startswith("the process that tokenizes has ended")
        assert json.loads(await made.ask("messages", say("a")))
        assert child_process(made)._popen.pid != first

    using(process(folder=tmp_path), use)


@pytest.mark.slow
def test_one_that_cannot_start_says_why(tmp_path, caplog):
    async def use(made: TextProcess) -> None:
        error = await refusal(made, "messages", say("a"))
        assert error.status == 503
        # Clients are not told the server's paths.
        assert error.message == "the tokenizer process did not start; see the server's log"

    using(process(folder=tmp_path), use)
    assert caplog.messages[0] == (
        f"the process that tokenizes did not start: folder {tmp_path} holds no tokenizer (tokenizer.json, "
        "tokenizer.model, vocab.json); copy its files there"
    )


@pytest.mark.slow
def test_one_that_hangs_is_ended_after_a_while(monkeypatch):
    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        monkeypatch.setattr(text_process, "ANSWER_S", 0.2)
        (worker,) = children(child_of(child_process(made)._popen.pid))
        os.kill(worker, signal.SIGSTOP)
        error = await refusal(made, "messages", say("a"))
        assert (error.status, error.message) == (
            503,
            "the process that tokenizes has not answered for 0.2 s; ask again",
        )
        monkeypatch.undo()
        assert json.loads(await made.ask("messages", say("a")))
        assert not is_running(worker)

    using(process(), use)


@pytest.mark.slow
def test_a_request_that_is_cancelled_does_not_answer_the_next_one():
    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        asking = asyncio.create_task(made.ask("messages", say("loop")))
        while not child_process(made).pending:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        expected = tokenizer()("the")["input_ids"]
        assert json.loads(await made.ask("prompts", ["the"])) == [expected]

    using(process(LOOPING, cpu_s=100.0), use)


@pytest.mark.slow
def test_a_request_under_way_at_the_end_is_told():
    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        asking = asyncio.create_task(refusal(made, "messages", say("loop")))
        while not child_process(made).pending:
            await asyncio.sleep(0.01)
        await made.close()
        assert (await asking).status == 503

    using(process(LOOPING, cpu_s=100.0), use)


def test_whoever_waits_too_long_for_others_is_told(monkeypatch):
    monkeypatch.setattr(text_process, "TURN_S", 0.1)

    async def use(made: TextProcess) -> None:
        await made._turn.acquire()
        error = await refusal(made, "prompts", ["a"])
        made._turn.release()
        assert (error.status, error.message) == (
            503,
            "the tokenizer is loading or has been busy for 0.1 s; ask again",
        )

    made = process()
    asyncio.run(use(made))


@pytest.mark.slow
def test_it_has_no_secrets_and_little_memory(monkeypatch):
    monkeypatch.setenv("MILLRACE_ADMIN_TOKEN", "hidden")
    monkeypatch.setenv("DATABASE_URL", "hidden")

    async def use(made: TextProcess) -> None:
        assert json.loads(await made.ask("messages", say("a")))
        parent = child_of(child_process(made)._popen.pid)
        for pid in (parent, *children(parent)):
            assert b"hidden" not in Path(f"/proc/{pid}/environ").read_bytes()
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert f"Max data size             {2 << 30}" in limits

    using(process(), use)


SCRIPT = """
import asyncio
from tests.inference.server.test_text_process import LOOPING, child_process, process, say
from tests.rewards.helpers import child_of, is_running
async def main():
    made = process(LOOPING, cpu_s=1.0)
    await made.ask("messages", say("a"))
    asking = asyncio.create_task(made.ask("messages", say("loop")))
    while not child_process(made).pending:
        await asyncio.sleep(0.01)
    print(child_of(child_process(made)._popen.pid), flush=True)
    await asking
asyncio.run(main())
"""


@pytest.mark.slow
def test_it_ends_with_a_server_that_is_killed_in_the_midst_of_a_loop():
    server = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        pid = int(server.stdout.readline())
        workers = children(pid)
        server.kill()
    wait_until(lambda: not any(map(is_running, [pid, *workers])))
    assert workers
