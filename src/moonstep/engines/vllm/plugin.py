"""The ``vllm.general_plugins`` entry point: makes ``MoonstepConnector`` known by name.

vLLM calls it in the API process, the engine core and every worker, possibly more than once.
"""

from __future__ import annotations

from typing import Final

CONNECTOR_NAME: Final = "MoonstepConnector"
CONNECTOR_MODULE: Final = "moonstep.engines.vllm.connector"


def register() -> None:
    """Register the connector with vLLM's factory, unless it is there already.

    Nothing of ours is imported beyond this module: the factory loads the connector when it is asked
    for (``KVConnectorFactory.register_connector``, which raises for a name that is taken).
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
