"""Tiny models of other shapes than the demo's, made on the spot with random weights.

The weights are large enough for every token of a prompt to matter to the answer, so that a wrong
block in the KV memory shows in the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512


@dataclass(frozen=True)
class TinyModel:
    """One family: transformers' name for it, what differs from the others, how vLLM has to run it.

    ``kinds`` and ``block_tokens`` are those of its groups as the engine makes them,
    ``prompt_tokens`` the length of a prompt of a few blocks, ``kv_blocks`` the engine's memory over
    all groups. In the storm, requests of ``storm_tokens`` (prompt, answer) outgrow it.
    """

    family: str
    configuration: dict[str, Any]
    kinds: tuple[str, ...]
    block_tokens: int
    prompt_tokens: int
    kv_blocks: int
    storm_tokens: tuple[int, int]
    dtype: str = "float32"
    engine: dict[str, Any] = field(default_factory=dict)

    def boundary(self, tokens: int) -> int:
        """The last boundary of a block within so many tokens."""
        return tokens // self.block_tokens * self.block_tokens


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA = TinyModel(
    "llama",
    {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32},
    kinds=("full attention",),
    block_tokens=32,
    prompt_tokens=300,
    kv_blocks=48,
    storm_tokens=(150, 96),
    engine={"block_size": 32},
)
GEMMA3 = TinyModel(
    "gemma3_text",
    {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 80,
        "query_pre_attn_scalar": 32,
    },
    kinds=("full attention", *["sliding window"] * 5),
    block_tokens=32,
    prompt_tokens=310,
    kv_blocks=90,
    storm_tokens=(40, 160),
    engine={"block_size": 32},
)
DEEPSEEK2 = TinyModel(
    "deepseek_v2",
    {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "first_k_dense_replace": 99,
    },
    kinds=("full attention",),
    block_tokens=16,
    prompt_tokens=300,
    kv_blocks=80,
    storm_tokens=(150, 96),
)
QWEN3_NEXT = TinyModel(
    "qwen3_next",
    {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0, 1, 2],
        "partial_rotary_factor": 0.25,
    },
    kinds=("full attention", *["recurrent state"] * 3),
    block_tokens=256,
    prompt_tokens=1530,
    kv_blocks=40,
    storm_tokens=(700, 96),
    dtype="bfloat16",
    engine={"mamba_cache_mode": "align", "enable_prefix_caching": True},
)


def save(model: TinyModel, folder: Path) -> Path:
    """Write the model as a Hugging Face folder, and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    configuration = AutoConfig.for_model(model.family, **(_COMMON | model.configuration))
    torch.manual_seed(0)
    weights = AutoModelForCausalLM.from_config(configuration, dtype=getattr(torch, model.dtype))
    weights.save_pretrained(folder)
    return folder
