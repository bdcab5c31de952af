"""Placement of a simulated request on engines with static roles. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from millrace.errors import PlanError
from millrace.planner.placement import Apart, Here, Place

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do.

    Attributes:
        name: of the engine.
        role: which requests it takes.
        waiting_tokens: prompt tokens that it has yet to compute, those on their way to it included.
        num_requests: requests that it has, or that are on their way to it.
        context_tokens: tokens of these requests.
    """

    name: str
    role: Role
    waiting_tokens: int = 0
    num_requests: int = 0
    context_tokens: int = 0


def place_by_role(num_prompt_tokens: int, engines: Sequence[EngineLoad]) -> Place:
    """Place a request with static roles: on the least loaded engine of each role.

    A prompt goes to the engine with the fewest waiting prompt tokens, where it ends first; engines with as
    many are told apart by the tokens of all their requests, which their steps read. Tokens go to the engine
    with the fewest requests. Prompts of fewer than two tokens have nothing to transfer, but roles are static.

    Raises:
        PlanError: no engine has a role that is needed.
    """
    both = [engine for engine in engines if engine.role == "both"]
    prefill = [engine for engine in engines if engine.role == "prefill"]
    decode = [engine for engine in engines if engine.role == "decode"]
    if both and not prefill:
        return Here(min(both, key=_prompt_order).name)
    if not prefill or not decode:
        have = ", ".join(sorted({engine.role for engine in engines})) or "none"
        raise PlanError(
            f"engines of the roles {have} cannot serve a request of {num_prompt_tokens} prompt tokens; it "
            "needs one with the role both, or a prefill and a decode engine"
        )
    return Apart(min(prefill, key=_prompt_order).name, min(decode, key=_token_order).name)


def _prompt_order(engine: EngineLoad) -> tuple[int, int, str]:
    return engine.waiting_tokens, engine.context_tokens, engine.name


def _token_order(engine: EngineLoad) -> tuple[int, int, str]:
    return engine.num_requests, engine.context_tokens, engine.name
