"""The checksums of an SGLang server's own weights, and which of them an update must change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.engines.http_client import HttpClient, RequestRefused, ServerError
from millrace.engines.server_dialect import field

# Weights that SGLang holds in one tensor.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VERB = "/weights_checker"


async def held_checksums(
    client: HttpClient, timeout_s: float, *, optional: bool = True
) -> dict[str, tuple[str, ...]] | None:
    """Return the checksums of each tensor of a server, one for each of its processes.

    None, where it is `optional`, if the server computes none: an older one, or one with quantized weights.
    """
    place = f"POST {client.url}{VERB}"
    try:
        reply = await client.post(VERB, {"action": "checksum", "selector": "target"}, timeout_s=timeout_s)
    except RequestRefused as error:
        if optional and error.status in (400, 404, 405):
            return None
        raise
    held: dict[str, tuple[str, ...]] = {}
    for rank in field(reply, "ranks", list, place):
        for name, checksum in field(rank, "checksums", dict, place).items():
            if not isinstance(checksum, str):
                raise ServerError(f"{place} sent a checksum of {name} that is no text")
            held[name] = (*held.get(name, ()), checksum)
    return held


def unchanged(
    before: Mapping[str, Sequence[str]],
    after: Mapping[str, Sequence[str]],
    last: Mapping[str, str],
    sent: Mapping[str, str],
) -> list[str]:
    """Return the tensors of a server that an update should have changed and has not.

    Args:
        before: checksums of the server's tensors.
        after: the same after the update.
        last: checksums of the trainer's weights of the last update.
        sent: the same of this one.
    """
    changed = {name for name in sent if last.get(name) != sent[name]}
    return sorted(
        name
        for name, checksums in after.items()
        if checksums == before.get(name) and (held := _weights_of(name, sent)) and held <= changed
    )


def _weights_of(tensor: str, names: Mapping[str, str]) -> set[str]:
    """Return the trainer's weights that a tensor of the server holds; none if that is not known."""
    if tensor in names:
        return {tensor}
    module, _, kind = tensor.rpartition(".")
    parent, _, last = module.rpartition(".")
    return {name for part in FUSED.get(last, ()) if (name := f"{parent}.{part}.{kind}") in names}
