"""One engine over a Mooncake Store, with Moonstep or with the connector that vLLM ships."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from moonstep.demo.plan import DemoPlan

MOONSTEP: Final = "MoonstepConnector"
STOCK: Final = "MooncakeStoreConnector"


@dataclass(frozen=True, slots=True)
class PeerPlan(DemoPlan):
    """The demo's engine with a choice of connectors. ``client_settings`` is the file in which
    vLLM's connector finds its master; Moonstep finds it in ``store``. ``chunk_tokens`` is the
    length of Moonstep's objects; vLLM's connector stores blocks."""

    connector: str = MOONSTEP
    client_settings: str = ""
    chunk_tokens: int | None = None

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``LLM``."""
        arguments = DemoPlan.engine_arguments(self)
        if self.connector == MOONSTEP and self.chunk_tokens is not None:
            extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
            extra["chunk_tokens"] = self.chunk_tokens
        if self.connector == STOCK:
            # All engines of a host share one endpoint for lookups unless they are told otherwise.
            arguments["kv_transfer_config"] = {
                "kv_connector": STOCK,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lookup_rpc_port": os.getpid()},
            }
        return arguments

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine reads at import."""
        return {
            **DemoPlan.environment(self),
            "MOONCAKE_CONFIG_PATH": self.client_settings,
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOG_minloglevel": "2",
        }
