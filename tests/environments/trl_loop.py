"""An episode in TRL's own GRPOTrainer, with a script in place of the model."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from types import MethodType, SimpleNamespace

import torch
import trl.trainer.grpo_trainer as grpo
from accelerate import PartialState
from transformers import TrainerState

Trainer = grpo.GRPOTrainer


class Prompted(Exception):
    """Ends a step of the trainer when the prompts are made."""


def trainer_of(make, functions, turns, max_turns):
    """A trainer as `__init__` leaves it, as far as an episode needs it."""
    own = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        model=SimpleNamespace(training=True, config=SimpleNamespace(max_position_embeddings=10**6)),
        args=SimpleNamespace(report_to=[]),
        environment_factories={None: make},
        reward_funcs=list(functions),
        state=TrainerState(),
        max_completion_length=10**6,
        max_tool_calling_iterations=max_turns - 1,
        tools=[],
        _env_tools={None: []},
        _environment_pool={None: []},
        _is_vlm=False,
        _log_completion_extra=None,
        _log_metric=None,
        _multi_environment=False,
        _standalone_tools=[],
        _tokenizer=None,
        use_vllm=False,
    )
    names = [one for one, _ in inspect.getmembers(type(make()), inspect.isfunction)]
    if "get_reward" in names:
        if inspect.iscoroutinefunction(make().get_reward):

            async def get_reward(environments, **kwargs):
                return [await one.get_reward() for one in environments]
        else:

            def get_reward(environments, **kwargs):
                return [one.get_reward() for one in environments]

        own.reward_funcs.insert(0, get_reward)
    own.reward_func_names = [f"{number}" for number in range(len(own.reward_funcs))]
    own.reward_processing_classes = [None] * len(own.reward_funcs)
    own.tools = ["there are some"]
    own._generate_single_turn = lambda ids, *given, **more: ([[turns.index(next(own.script))]], None)
    own._get_tool_suffix_ids = lambda messages: [0]
    for name in ("_tool_call_loop", "_calculate_rewards", "_generate_and_score_completions"):
        setattr(own, name, MethodType(getattr(Trainer, name), own))
    own.async_loop = asyncio.new_event_loop()
    own.thread = threading.Thread(target=own.async_loop.run_forever, daemon=True)
    own.thread.start()
    return own


def own_loop(make, functions, row, turns, max_turns, monkeypatch):
    """The prompt after `reset`, all messages that follow it, and the reward."""
    PartialState()
    own = trainer_of(make, functions, turns, max_turns)
    monkeypatch.setattr(grpo, "parse_response", lambda tokenizer, ids, **more: dict(turns[ids[0]]))

    def prompted(prompts):
        own.prompts = prompts
        raise Prompted

    own._generate = prompted
    with contextlib.suppress(Prompted):
        own._generate_and_score_completions([row])
    own.script = iter(turns)
    completions = [[dict(next(own.script))]]
    ids = [[0]]
    loop = own._tool_call_loop([list(own.prompts[0])], [[0]], ids, completions, None, None, {})
    rewards = own._calculate_rewards([row], own.prompts, loop[1], loop[2])
    own.async_loop.call_soon_threadsafe(own.async_loop.stop)
    own.thread.join()
    own.async_loop.close()
    return own.prompts[0], loop[1][0], float(rewards.nansum())
