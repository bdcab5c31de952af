"""The game of examples/agent_program as a taskset of verifiers, with a harness of its own."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["GuessHarness", "GuessTaskset"]
DIGITS = "0123456789abcdef"


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def won(self, trace) -> float:
        return float(trace.info["won"])


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(60):
            data = GuessData(prompt="< > ?", answer=DIGITS[1 + number % 3])
            yield GuessTask(data, self.config.task)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Two guesses, with a reply after the first."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, *given, **_):
        endpoint, secret, _, data = given
        messages, number = [{"role": "user", "content": data.prompt}], DIGITS.index(data.answer)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content
                guess = DIGITS.find(text.strip()) if len(text.strip()) == 1 else -1
                trace.info["won"] = guess == number
                if guess == number:
                    break
                reply = "?" if guess < 1 else ">" if guess < number else "<"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
