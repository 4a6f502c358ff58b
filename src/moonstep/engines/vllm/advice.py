"""The line at start that names a flag of vLLM's without which less is kept than could be."""

from __future__ import annotations

import math

from moonstep.engines.vllm.facts import EngineFacts
from moonstep.groups import GroupKind


def retention_advice(facts: EngineFacts) -> str | None:
    """What to set so that states of decoded tokens are kept, if they are not.

    vLLM hands out a recurrent state only at boundaries it retains itself; without an interval that
    is where a prompt ends. ``None`` when there is nothing to say.
    """
    states = [group for group in facts.groups if group.kind is GroupKind.RECURRENT_STATE]
    if not states or facts.retention_tokens != 0:
        return None
    step_tokens = math.lcm(*(group.block_tokens for group in facts.groups))
    state_mib = sum(group.block_bytes for group in states) / (1 << 20)
    return (
        "moonstep: recurrent states are kept where prompts end, not within answers: with "
        f"--prefix-cache-retention-interval {step_tokens} (or a multiple) a request that goes on "
        "from an answer, or is resumed after preemption, starts from the last such boundary; each "
        f"one takes {state_mib:.1f} MiB of the engine's KV memory a rank until it is evicted"
    )
