"""vLLM's own configuration objects for a scheduler half that runs without a model."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec

MAX_MODEL_TOKENS: Final = 1 << 21
CHUNK_TOKENS: Final = 8192
_LAYOUT: Final = "LBNHC"


@dataclass(frozen=True, slots=True)
class HalfConfig:
    """What a connector's scheduler half is built from."""

    vllm_config: Any
    kv_cache_config: Any


def half_config(connector: str, extra: dict[str, Any], block_tokens: int) -> HalfConfig:
    """Configuration of an engine with one full-attention group and ``connector``.

    The pool a half is bound to may have more blocks than this configuration says: no half reads
    the number.
    """
    vllm_config = VllmConfig(
        model_config=_model_config(),
        cache_config=CacheConfig(
            block_size=block_tokens,
            enable_prefix_caching=True,
            num_gpu_blocks_override=MAX_MODEL_TOKENS // block_tokens + 1,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4096,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_model_len=MAX_MODEL_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        ),
    )
    vllm_config.cache_config.block_size = block_tokens
    vllm_config.cache_config.kv_cache_layout = _LAYOUT
    return HalfConfig(vllm_config, _kv_cache_config(vllm_config, block_tokens))


def _kv_cache_config(vllm_config: Any, block_tokens: int) -> Any:
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    # A million tokens have to fit, or the configuration is refused.
    needed_bytes = spec.page_size_bytes * (MAX_MODEL_TOKENS // block_tokens + 1)
    # The engine core resolves these when it starts; no half reads them, vLLM's helpers do.
    (config,) = get_kv_cache_configs(
        vllm_config, [{"model.layers.0.self_attn.attn": spec}], [needed_bytes]
    )
    _, config.hash_block_size = resolve_kv_cache_block_sizes(config, vllm_config)
    return config


@lru_cache(maxsize=1)
def _model_config() -> Any:
    return ModelConfig(
        model=_model_folder(),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_TOKENS,
        seed=0,
    )


@lru_cache(maxsize=1)
def _model_folder() -> str:
    """A folder with nothing but the configuration of a small model with a long context."""
    folder = tempfile.mkdtemp(prefix="moonstep-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 1024,
        "max_position_embeddings": MAX_MODEL_TOKENS,
        "torch_dtype": "bfloat16",
    }
    Path(folder, "config.json").write_text(json.dumps(facts))
    return folder
