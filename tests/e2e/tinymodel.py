"""Tiny models with random weights, made on the spot: shapes that the demo's model does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD_SIZE = 64


def tiny_llama(folder: Path, *, heads: int = 4, kv_heads: int = 2, **facts: Any) -> Path:
    """A Llama of two layers, with a tokenizer that makes every word of a few a token of its own.

    Weights are a function of the shape alone, so that two folders hold the same model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=HEAD_SIZE * heads,
        intermediate_size=2 * HEAD_SIZE * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=len(_words()),
        max_position_embeddings=4096,
        initializer_range=0.2,  # wide enough that answers depend on every token before them
        bos_token_id=0,
        eos_token_id=0,
        **facts,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def story(name: int, words: int) -> str:
    """A text of so many tokens; different from its first word on for every name."""
    known = _words()[1:]
    return " ".join(known[(name * 37 + n * (n + name)) % len(known)] for n in range(words))


def _words() -> list[str]:
    return ["<end>", *(f"w{n}" for n in range(511))]


def _save_tokenizer(folder: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(_words())}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<end>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


TEN_BLOCKS = 1280
PROMPTS = [story(name, TEN_BLOCKS + 20) for name in range(1, 5)]
"""Ten full blocks of 128 tokens each, and some."""
