"""How vLLM finds the connector: by name once the plugin has run, or by its module's path."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from moonstep.engines.vllm.connector import MoonstepConnector
from moonstep.engines.vllm.plugin import CONNECTOR_MODULE, CONNECTOR_NAME, register


def test_the_plugin_registers_the_connector_and_may_run_again() -> None:
    for _ in range(3):
        register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is MoonstepConnector


def test_the_entry_point_is_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="moonstep")
    assert entry.load() is register


def test_the_connector_is_loadable_by_its_modules_path() -> None:
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR_NAME, kv_role="kv_both", kv_connector_module_path=CONNECTOR_MODULE
    )
    assert KVConnectorFactory.get_connector_class(transfer) is MoonstepConnector
    assert KVConnectorFactory.supports_hma_config(transfer)


def test_the_plugin_imports_neither_vllm_nor_the_connector() -> None:
    """It runs in every process of vLLM; the connector is loaded when it is asked for."""
    code = (
        "import sys, moonstep.engines.vllm.plugin\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not roots & {'vllm', 'torch', 'numba'}, roots\n"
        "assert 'moonstep.engines.vllm.connector' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_hook_is_one_that_this_vllm_calls() -> None:
    """A misspelt or renamed hook would never be called, without a word."""
    own = {"requires_kv_delivery", "scheduler", "worker"}
    for name in vars(MoonstepConnector):
        if not name.startswith("_") and name not in own:
            assert hasattr(KVConnectorBase_V1, name) or hasattr(SupportsHMA, name), name
    assert hasattr(KVConnectorBase_V1, "requires_kv_delivery")
    assert not getattr(MoonstepConnector, "__abstractmethods__", None)
