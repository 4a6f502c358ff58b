"""Which device seam goes with the memory the engine computes in."""

from __future__ import annotations

from moonstep.engines.vllm.specs import Unsupported
from moonstep.worker.device import CpuDevice, DeviceFactory


def device_for(device_type: str) -> DeviceFactory:
    """The device for torch's ``device_type``.

    Raises:
        Unsupported: for a type other than ``cpu`` and ``cuda``.
    """
    if device_type == "cpu":
        return CpuDevice
    if device_type == "cuda":
        from moonstep.worker.cuda import CudaDevice

        return CudaDevice
    raise Unsupported(f"KV memory on {device_type!r}", "it works on cpu and cuda")
