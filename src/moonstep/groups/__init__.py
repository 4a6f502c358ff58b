"""KV-cache groups: layers of the engine that share one block table.

A group's *kind* decides from which boundaries it can resume, given which of its blocks are
present. What has to be written and what can be read back are both derived from the two rules of
:mod:`moonstep.groups.needs`, so that nothing is kept that no hit can use, and no hit is found that
was not kept. Pure functions of plain values, for both halves.
"""

from moonstep.groups.group import Group, GroupKind, last_boundary_tokens
from moonstep.groups.hits import Presence, joint_hit_tokens, resumable
from moonstep.groups.kept import (
    alignment_tokens,
    interval_ends,
    kept_boundaries,
    kept_positions,
    reachable_tokens,
    replay_boundaries,
)
from moonstep.groups.names import block_names
from moonstep.groups.needs import hit_blocks, needed_blocks

__all__ = [
    "Group",
    "GroupKind",
    "Presence",
    "alignment_tokens",
    "block_names",
    "hit_blocks",
    "interval_ends",
    "joint_hit_tokens",
    "kept_boundaries",
    "kept_positions",
    "last_boundary_tokens",
    "needed_blocks",
    "reachable_tokens",
    "replay_boundaries",
    "resumable",
]
