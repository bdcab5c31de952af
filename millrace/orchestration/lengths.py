"""How long prompts and whole sequences may be, by the recipe and by the model."""

from __future__ import annotations

from millrace.config.settings import RunConfig
from millrace.models.load import Model
from millrace.orchestration.parts import SetupError


def longest_prompt(config: RunConfig, model: Model) -> int:
    """The recipe's limit, or what the model and a micro-batch leave beside a completion.

    Raises:
        SetupError: nothing is left.
    """
    return min(config.data.max_prompt_tokens, longest_sequence(config, model) - config.rollout.max_tokens)


def longest_sequence(config: RunConfig, model: Model) -> int:
    """Tokens of the longest sequence that the model and a micro-batch hold.

    Raises:
        SetupError: a completion of `rollout.max_tokens` leaves no room for a prompt.
    """
    micro = config.policy.tokens_per_micro_batch
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or micro)
    asked = config.rollout.max_tokens
    if asked >= allowed:
        raise SetupError(
            f"rollout.max_tokens is {asked} but the model allows {allowed} tokens in all, prompt included; "
            "lower rollout.max_tokens"
        )
    if asked >= micro:
        raise SetupError(
            f"rollout.max_tokens is {asked} but a micro-batch holds {micro} tokens, prompt included; raise "
            "policy.tokens_per_micro_batch"
        )
    return min(allowed, micro)
