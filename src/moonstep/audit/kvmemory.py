"""KV memory of one rank: real CPU tensors, and what the bench knows about every token in them.

`content` holds, for each group, block and token slot, the (salted) state of the
token whose bytes are there and were seen to be right; 0 means that nobody has
looked since something else wrote the block. `shadow` is a copy of all bytes, so
a write that the bench did not expect is seen, whoever made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from moonstep.audit.oracle import States, expand, layer_salts

if TYPE_CHECKING:
    from collections.abc import Callable

Positions = npt.NDArray[np.int64]
UNKNOWN = np.uint64(0)
DRAFT_LAYER = "draft."
"""What the names of a drafter's layers begin with."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's KV: `words` is `[blocks, heads, tokens, words]` of 64 bits, a view.

    What a draft layer holds depends on tokens after the prefix: it is written, never compared.
    """

    name: str
    group: int
    words: States
    salts: States

    @property
    def is_draft(self) -> bool:
        return self.name.startswith(DRAFT_LAYER)


class RankMemory:
    """The KV memory of one rank, laid out as the installed vLLM lays it out."""

    def __init__(
        self,
        kv_cache_config: Any,
        layout: str,
        rank: int,
        first_copy: Callable[[int, Any], int] = lambda rank, spec: rank,
    ) -> None:
        """`first_copy(rank, spec)` is the lowest rank that holds the same bytes of such layers."""
        self.rank = rank
        self.tensors: dict[str, torch.Tensor] = allocate_kv_cache(
            kv_cache_config, torch.device("cpu"), KVCacheLayout[layout]
        )
        self._layout = KVCacheLayout[layout]
        self._block_count: int = kv_cache_config.num_blocks
        storage = next(iter(self.tensors.values())).untyped_storage()
        raw = torch.empty(0, dtype=torch.int64).set_(storage)
        self._raw: States = raw.numpy().view(np.uint64)
        self._raw[:] = np.arange(1, len(self._raw) + 1, dtype=np.uint64)
        self._shadow: States = self._raw.copy()
        self._owner = np.full(len(self._raw), -1, np.int32)
        self.layers = [
            self._layer(name, group, first_copy(rank, spec.kv_cache_spec))
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            for name in spec.layer_names
        ]
        self.first_copies = [
            first_copy(rank, spec.kv_cache_spec) for spec in kv_cache_config.kv_cache_groups
        ]
        self.layers_of = [
            [layer for layer in self.layers if layer.group == group]
            for group in range(len(kv_cache_config.kv_cache_groups))
        ]
        self._compared = [
            [layer for layer in layers if not layer.is_draft] for layers in self.layers_of
        ]
        self.block_tokens = [
            int(spec.kv_cache_spec.block_size) for spec in kv_cache_config.kv_cache_groups
        ]
        self.window_tokens: list[int | None] = [
            getattr(spec.kv_cache_spec, "sliding_window", None)
            for spec in kv_cache_config.kv_cache_groups
        ]
        self.is_recurrent = [
            isinstance(spec.kv_cache_spec, MambaSpec) for spec in kv_cache_config.kv_cache_groups
        ]
        self.content = [
            np.zeros((self._block_count, 1 if is_recurrent else tokens), np.uint64)
            for tokens, is_recurrent in zip(self.block_tokens, self.is_recurrent, strict=True)
        ]

    def _layer(self, name: str, group: int, rank: int) -> Layer:
        tensor = self.tensors[name]
        words: States = tensor.view(torch.int64).numpy().view(np.uint64)
        start = (tensor.data_ptr() - self._raw.ctypes.data) // 8
        owner = np.lib.stride_tricks.as_strided(
            self._owner[start:], words.shape, [stride // 2 for stride in words.strides]
        )
        owner[:] = np.arange(self._block_count, dtype=np.int32)[:, None, None, None]
        return Layer(
            name, group, words, layer_salts(name, group, rank, words.shape[1], words.shape[3])
        )

    def changed_blocks(self) -> set[int]:
        """Blocks whose bytes differ from the shadow; the shadow then takes the bytes over.

        Content of such blocks becomes unknown. Block -1 stands for bytes of no block.
        """
        if np.array_equal(self._raw, self._shadow):
            return set()
        where = np.nonzero(self._raw != self._shadow)[0]
        blocks = set(self._owner[where].tolist())
        np.copyto(self._shadow, self._raw)
        for content in self.content:
            content[list(blocks - {-1})] = UNKNOWN
        return blocks

    def write(self, layer: Layer, blocks: Positions, slots: Positions, states: States) -> None:
        """Write these tokens' KV of one layer, as a forward pass does."""
        layer.words[blocks, :, slots, :] = expand(states, layer.salts)

    def commit(self, group: int, blocks: Positions, slots: Positions, states: States) -> None:
        """All layers of a group were written with these tokens: note it, and take the shadow."""
        self._overwritten(group, blocks)
        self.content[group][blocks, slots] = states
        np.copyto(self._shadow, self._raw)

    def wrong_tokens(
        self, group: int, blocks: Positions, slots: Positions, states: States
    ) -> Positions:
        """Indices of the tokens whose bytes are not the oracle's; empty when all is well.

        Tokens whose content is known to be right cost one comparison of 64 bits.
        """
        content = self.content[group]
        suspects: Positions = np.nonzero(content[blocks, slots] != states)[0]
        if len(suspects) == 0:
            return suspects
        right = np.ones(len(suspects), bool)
        at_blocks, at_slots, wanted = blocks[suspects], slots[suspects], states[suspects]
        for layer in self._compared[group]:
            there = layer.words[at_blocks, :, at_slots, :]
            right &= (there == expand(wanted, layer.salts)).all(axis=(1, 2))
        content[at_blocks[right], at_slots[right]] = wanted[right]
        wrong: Positions = suspects[~right]
        return wrong

    def repair(self, group: int, blocks: Positions, slots: Positions, states: States) -> None:
        """Put the oracle's bytes where the engine itself left none."""
        for layer in self._compared[group]:
            self.write(layer, blocks, slots, states)
        self.commit(group, blocks, slots, states)

    def copy_entry(self, group: int, source: int, target: int) -> None:
        """Copy one block of one group, as a model runner moves a state between its blocks."""
        for layer in self.layers_of[group]:
            layer.words[target] = layer.words[source]
        self._overwritten(group, np.array([target]))
        self.content[group][target] = self.content[group][source]
        np.copyto(self._shadow, self._raw)

    def _overwritten(self, group: int, blocks: Positions) -> None:
        """These blocks are the group's now: what was in them of other groups is gone."""
        for other, content in enumerate(self.content):
            if other != group:
                content[blocks] = UNKNOWN

    def zero(self, blocks: list[int]) -> None:
        """Zero whole blocks (`SchedulerOutput.new_block_ids_to_zero`)."""
        for layer in self.layers:
            layer.words[blocks] = 0
        for content in self.content:
            content[blocks] = UNKNOWN
        np.copyto(self._shadow, self._raw)

    def copy_blocks(self, copies: list[Any]) -> None:
        """Copy-on-write (`SchedulerOutput.kv_cache_block_copies`)."""
        copy_kv_cache_blocks_inplace(list(self.tensors.values()), self._block_count, copies)
        for source, target in copies:
            for content in self.content:
                content[target] = content[source]
        np.copyto(self._shadow, self._raw)

    def holds(self, group: int, states: States, payload: bytes) -> bool:
        """Whether a block of a group, as it was kept, is the oracle's: the last `states` count.

        A block whose tokens are not all there may hold anything in the place of the others.
        """
        slots = self.content[group].shape[1]
        states = states[-slots:]
        padded = np.concatenate([states, np.zeros(slots - len(states), np.uint64)])
        held = np.frombuffer(payload, np.uint8)
        start = 0
        for layer in self.layers_of[group]:
            words = expand(padded, layer.salts)
            wanted = self._in_memory_order(words)
            words[:] = ~np.uint64(0)
            words[len(states) :] = 0
            known = self._in_memory_order(words) != 0
            part, start = held[start : start + len(wanted)], start + len(wanted)
            if len(part) != len(wanted):
                return False
            if not layer.is_draft and (part[known] != wanted[known]).any():
                return False
        return start == len(held)

    def _in_memory_order(self, words: States) -> npt.NDArray[np.uint8]:
        """The bytes of a block from its words, `[tokens, heads, words]`."""
        order = [axis - 1 for axis in self._layout.layer_view_order if axis != 0]
        ordered = words.transpose(1, 0, 2).transpose(order)
        return np.array(ordered, order="C").reshape(-1).view(np.uint8)
