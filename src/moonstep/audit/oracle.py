"""Oracle: what every byte of KV memory has to be, as a function of the token prefix.

A token's *state* is a 64-bit chain over all tokens up to and including it. The
bytes of its KV in one layer of one rank are a function of that state, and the
next token a "model" samples is a function of the last state. So the content of
a block is known from its prefix, and the whole output of a prompt from the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

States = npt.NDArray[np.uint64]

VOCABULARY = 499
_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_ODD = np.uint64(0xD6E8FEB86659FD93)
_FOLD = np.uint64(32)


def mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64): every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def chain(state: int, token: int) -> int:
    """The state after `token`, given the state before it."""
    return mix(state ^ ((token + 1) * 0xA0761D6478BD642F & _MASK))


def sample(state: int) -> int:
    """The token the model samples after a prefix with this state."""
    return (mix(state ^ 0x5851F42D4C957F2D) >> 16) % VOCABULARY


def prompt_tokens(family: int, shared_tokens: int, variant: int, count: int) -> list[int]:
    """A prompt: the first `shared_tokens` are those of its family, the rest its own.

    >>> a, b = prompt_tokens(1, 4, 7, 8), prompt_tokens(1, 4, 8, 8)
    >>> a[:4] == b[:4], a[4:] == b[4:]
    (True, False)
    """
    own = mix((family << 20) ^ (variant << 1) ^ 1)
    base = mix(family << 20)
    return [mix((base if i < shared_tokens else own) + i) % VOCABULARY for i in range(count)]


class Sequence:
    """The tokens of one request: its prompt and all it will ever sample.

    `next_output` is the position of the next token the client has to receive.
    """

    __slots__ = ("_last", "_states", "next_output", "prompt_tokens", "tokens")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._states: States = np.zeros(64, np.uint64)
        self._last = _START
        for token in prompt:
            self._append(token)
        self.prompt_tokens = len(self.tokens)
        self.next_output = self.prompt_tokens

    def states(self, start: int, stop: int) -> States:
        """States of the tokens at `start` up to `stop`; tokens are sampled as needed."""
        self.extend(stop)
        return self._states[start:stop]

    def extend(self, count: int) -> None:
        """Sample until there are at least `count` tokens."""
        while len(self.tokens) < count:
            self._append(sample(self._last))

    def token(self, position: int) -> int:
        """The token at a position; sampled if it is not there yet."""
        self.extend(position + 1)
        return self.tokens[position]

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        if position == len(self._states):
            grown = np.zeros(2 * position, np.uint64)
            grown[:position] = self._states
            self._states = grown
        self._last = chain(self._last, token)
        self._states[position] = self._last
        self.tokens.append(token)


def layer_salts(layer: str, group: int, rank: int, heads: int, words: int) -> States:
    """Salts of one layer on one rank, `[heads, words]`, one for each 64-bit word of a token."""
    seed = mix(sum(mix(ord(c) + 31 * i) for i, c in enumerate(layer)) ^ (group << 40) ^ rank)
    flat = [mix(seed + i) for i in range(heads * words)]
    return np.array(flat, np.uint64).reshape(heads, words)


def expand(states: States, salts: States) -> States:
    """The words of these tokens' KV, `[tokens, heads, words]`.

    Zero is never a token's word by construction of practice: states and salts are 64-bit hashes.
    """
    words = (states[:, None, None] ^ salts) * _ODD
    return words ^ (words >> _FOLD)


@dataclass(frozen=True, slots=True)
class Named:
    """What a block hash stands for: the sequence and where its block ends."""

    sequence: Sequence
    end_tokens: int


class Registry:
    """Block hash to token prefix, for every hash the engine ever computed."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Named] = {}

    def name(self, hashes: list[bytes], sequence: Sequence, hash_tokens: int) -> None:
        """Remember what these hashes, a request's own list, stand for."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._by_hash:
                break
            self._by_hash[hashes[index]] = Named(sequence, (index + 1) * hash_tokens)

    def named(self, block_hash: bytes) -> Named | None:
        """What a hash stands for; None for one that the engine never computed."""
        return self._by_hash.get(bytes(block_hash))

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._by_hash
