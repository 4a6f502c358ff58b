"""`vllm serve` as a user starts it, on a free loopback port, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

KV_BLOCKS = 36
"""KV memory of 4,480 tokens in blocks of 128: three prompts of ten blocks fit, not four."""

READY_S = 240.0
STOP_S = 90.0

METRIC = re.compile(r"^vllm:moonstep_(\w+)\{([^}]*)\} (\S+)$", flags=re.MULTILINE)
"""A line of ``/metrics``: name, labels, value."""

# What a log line says after vLLM's prefix "(process) LEVEL time [file:line]".
LOGGED = re.compile(r"\[\w+\.py:\d+\] (moonstep:.*)$", flags=re.MULTILINE)


class Server:
    """One server. Leaving the ``with`` block ends its whole process group, whatever happened."""

    def __init__(
        self,
        model: Path,
        log: Path,
        extra_config: dict[str, Any] | None = None,
        *,
        role: str = "kv_both",
        connector: str | None = "MoonstepConnector",
        arguments: Sequence[str] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = log
        transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": role}
        if extra_config is not None:
            transfer["kv_connector_extra_config"] = extra_config
        self._command = [
            str(Path(sys.executable).with_name("vllm")),
            *("serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "model", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "4096", "--num-gpu-blocks-override", str(KV_BLOCKS)),
            "--enable-prompt-tokens-details",
            # Without it vLLM kills its engine in the instant it asks it to end: no last words.
            *("--shutdown-timeout", "60"),
            *(("--kv-transfer-config", json.dumps(transfer)) if connector else ()),
            *arguments,
        ]
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=280)

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread each: two servers that spin at barriers on two cores stop each other.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            # The audit's tests hush vLLM in this process; a server speaks.
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._client.close()

    def wait_ready(self) -> None:
        """Return once the server answers; raise with the end of its log if it never does."""
        for _ in poll(READY_S):
            assert self._process.poll() is None, self.log_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
        raise AssertionError(f"not ready after {READY_S} s: {self.log_text()[-3000:]}")

    def wait_ended(self, timeout_s: float) -> int:
        """The server's exit code, once it has ended by itself."""
        return self._process.wait(timeout=timeout_s)

    def stop(self) -> None:
        """End the server as an operator does: SIGTERM, and wait."""
        self._process.terminate()
        self._process.wait(timeout=STOP_S)

    def kill(self) -> None:
        """End the server and all it started, now; as if it had lost its machine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=STOP_S)

    def complete(self, prompt: str, **body: Any) -> tuple[str, int]:
        """The greedy answer to ``prompt``, and how many of its tokens came from a cache."""
        request = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 16, **body}
        answer = self._client.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return answer.json()["choices"][0]["text"], details.get("cached_tokens") or 0

    def metrics(self) -> dict[str, float]:
        """Moonstep's metrics by name, with the value of their own label: ``slots free``."""
        answer = self._client.get("/metrics")
        assert answer.status_code == 200
        found: dict[str, float] = {}
        for name, labels, value in METRIC.findall(answer.text):
            own = [
                text.strip('"')
                for label, _, text in (each.partition("=") for each in labels.split(","))
                if label not in ("engine", "model_name")
            ]
            found[" ".join([name, *own])] = float(value)
        return found

    def forget(self) -> None:
        """Empty the engine's own prefix cache; what the connector keeps stays."""
        assert self._client.post("/reset_prefix_cache").status_code == 200

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def own_tracebacks(self) -> list[str]:
        """Places in Moonstep's own files that tracebacks name; the engine has some of its own."""
        return re.findall(r'File "[^"]*/moonstep/[^"]*", line \d+', self.log_text())

    def last_words(self) -> list[str]:
        """Moonstep's lines once there is one: the engine's process may end after the server's."""
        deadline = time.monotonic() + STOP_S
        while not (lines := self.moonstep_lines()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return lines

    def moonstep_lines(self) -> list[str]:
        """What Moonstep logged, one entry a log line."""
        return LOGGED.findall(self.log_text())


def poll(deadline_s: float, every_s: float = 0.2) -> Iterator[None]:
    """Yield again and again until the deadline has passed."""
    stop = time.monotonic() + deadline_s
    while time.monotonic() < stop:
        yield
        time.sleep(every_s)
