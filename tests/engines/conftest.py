"""Real vLLM configurations for connectors, and every line that is logged meanwhile."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from moonstep.audit import engineconfig, quiet
from moonstep.audit.engineconfig import ConnectorChoice, EngineConfig
from moonstep.audit.shape import Shape
from moonstep.engines.vllm.connector import MoonstepConnector

MODULE = "moonstep.engines.vllm.connector"
CONNECTOR = f"{MODULE}:MoonstepConnector"


class Lines(logging.Handler):
    """The messages of a logger, one entry a record."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the ``moonstep`` logger says from here on, one entry a record."""
    quiet.hush()
    handler, logger = Lines(), logging.getLogger("moonstep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.messages
    logger.removeHandler(handler)
    logger.setLevel(level)


def configured(shape: Shape | None = None, role: str = "kv_both", **extra: Any) -> EngineConfig:
    """vLLM's own configuration of an engine with Moonstep under these settings."""
    choice = ConnectorChoice(CONNECTOR, {"host_cache": "1MiB", **extra}, role)
    return engineconfig.build(shape or Shape(), choice)


def create(
    config: EngineConfig, role: KVConnectorRole = KVConnectorRole.SCHEDULER
) -> MoonstepConnector:
    """The connector as vLLM creates it."""
    kv = config.scheduler_kv if role is KVConnectorRole.SCHEDULER else config.rank_kv[0]
    connector = KVConnectorFactory.create_connector(config.vllm_config, role, kv)
    assert isinstance(connector, MoonstepConnector)
    return connector


def changed(config: EngineConfig, part: str, **values: Any) -> EngineConfig:
    """The configuration with these values in one part; what vLLM itself checks is passed by."""
    vllm_config: VllmConfig = copy.copy(config.vllm_config)
    own = copy.copy(getattr(vllm_config, part))
    for name, value in values.items():
        object.__setattr__(own, name, value)
    setattr(vllm_config, part, own)
    return EngineConfig(
        vllm_config,
        config.scheduler_kv,
        config.rank_kv,
        config.scheduler_block_tokens,
        config.hash_block_tokens,
    )
