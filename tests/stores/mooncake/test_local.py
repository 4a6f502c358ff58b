"""``moonstep up``, ``down`` and ``status``, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from moonstep.cli.main import app
from moonstep.stores.base import Put
from moonstep.stores.mooncake import process
from moonstep.stores.mooncake.local import StateFolder
from moonstep.stores.mooncake.metrics import MasterStatus, SegmentStatus
from moonstep.stores.mooncake.process import MasterPlan
from moonstep.stores.testing import fetch, key, outgoing, payload
from moonstep.stores.urls import open_store
from tests.masters import need_mooncake

WAIT_S = 60.0


class Command:
    """The command line on a state folder and ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = StateFolder(folder)
        self.port, self.metrics_port = process.free_port(), process.free_port()

    def up_args(self, *more: str) -> list[str]:
        ports = ["--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        return ["up", *ports, "--state", str(self.folder.path), *more]

    def up(self, *more: str) -> Result:
        return CliRunner().invoke(app, self.up_args(*more))

    def run(self, verb: str, *more: str) -> Result:
        return CliRunner().invoke(app, [verb, "--state", str(self.folder.path), *more])

    def processes(self, word: str = "") -> list[psutil.Process]:
        """All that was started for these ports, with this word, and still runs."""
        found = []
        for each in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(each.info["cmdline"] or ())
            is_ours = f"--rpc_port={self.port}" in words or f"127.0.0.1:{self.port}?" in words
            if is_ours and word in words and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
        return found


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    need_mooncake()
    command = Command(tmp_path / "state")
    yield command
    for each in command.processes():
        each.kill()


def test_one_command_brings_up_a_store_that_keeps_objects_and_one_ends_it(
    command: Command,
) -> None:
    result = command.up("--pool", "64MiB")
    assert result.exit_code == 0, result.output
    (line,) = [each for each in result.output.splitlines() if "--kv-transfer-config" in each]
    flag = json.loads(line[line.index("'") + 1 : line.rindex("'")])
    assert (flag["kv_connector"], flag["kv_role"]) == ("MoonstepConnector", "kv_both")
    url = flag["kv_connector_extra_config"]["store"]
    assert url == f"mooncake://127.0.0.1:{command.port}?segment=0"
    first, second = open_store(url), open_store(url)
    assert first.put([outgoing(key(1), payload(1))]) == [Put.STORED]
    first.close()
    assert fetch(second, key(1)) == payload(1)
    second.close()

    status = json.loads(command.run("status", "--json").output)
    assert (status["objects"], status["used_bytes"]) == (1, 5000)
    assert status["capacity_bytes"] == 64 << 20
    assert [segment["capacity_bytes"] for segment in status["segments"]] == [64 << 20]
    shown = command.run("status").output
    assert "1 objects" in shown
    assert "64.0 MiB" in shown

    assert len(command.processes()) == 2
    assert command.run("down").exit_code == 0
    assert command.processes() == []
    assert command.run("down").exit_code == 1


def test_without_a_pool_the_servers_give_the_memory(command: Command) -> None:
    result = command.up("--pool", "0")
    assert "?segment=16GiB" in result.output
    assert len(command.processes()) == 1
    assert json.loads(command.run("status", "--json").output)["capacity_bytes"] == 0
    command.run("down")


def test_a_second_one_is_refused_and_the_first_stays(command: Command) -> None:
    command.up("--pool", "0")
    again = command.up("--pool", "0")
    assert again.exit_code == 1
    assert "runs already" in again.output
    assert len(command.processes()) == 1
    command.run("down")


def test_a_port_that_is_taken_is_one_line_and_nothing_is_started(command: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", command.metrics_port))
        taken.listen()
        result = command.up()
    assert result.exit_code == 1
    words = f"moonstep: 127.0.0.1:{command.metrics_port} is taken; choose another port"
    assert result.output.strip() == words
    assert command.processes() == []


def test_an_address_that_no_server_could_use_is_refused(command: Command) -> None:
    result = command.up("--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "name the address" in result.output
    assert command.processes() == []


def test_a_state_folder_that_cannot_be_made_is_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command.folder = StateFolder(tmp_path / "file" / "state")
    result = command.up("--pool", "0")
    assert result.exit_code == 1
    assert result.output.startswith("moonstep: ")
    assert len(result.output.strip().splitlines()) == 1
    assert command.processes() == []


def test_a_pool_that_does_not_start_takes_the_master_with_it(command: Command) -> None:
    result = command.up("--pool", "1KiB")  # less than Mooncake takes
    assert result.exit_code == 1
    assert "the pool ended" in result.output
    assert command.processes() == []
    assert command.folder.read() is None


def test_ctrl_c_while_it_starts_leaves_nothing_behind(command: Command) -> None:
    """The pool never gets ready, since it is stopped as soon as it is seen."""
    starting = subprocess.Popen(
        [sys.executable, "-m", "moonstep.cli.main", *command.up_args("--pool", "64MiB")],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stop = time.monotonic() + WAIT_S
        while not (pools := command.processes("mooncake.pool")):
            assert time.monotonic() < stop
        for each in pools:
            each.suspend()
        os.killpg(starting.pid, signal.SIGINT)
        output, _ = starting.communicate(timeout=WAIT_S)
        assert starting.returncode == 130, output
        assert command.processes() == []
    finally:
        starting.kill()
        starting.wait()


def test_down_ends_a_frozen_master_and_nothing_that_took_its_number(command: Command) -> None:
    command.up("--pool", "0")
    (master,) = command.processes()
    master.suspend()
    record = command.folder.read()
    assert record is not None
    assert command.run("down").exit_code == 0
    assert command.processes() == []
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stale = type(record.master)(bystander.pid, record.master.began)
        assert stale.find() is None
    finally:
        bystander.kill()
        bystander.communicate()


def test_status_of_what_is_not_up_is_one_line(command: Command) -> None:
    assert command.run("status").exit_code == 2
    result = command.run("status", "--metrics", f"127.0.0.1:{command.port}")
    assert result.exit_code == 1
    assert result.output.startswith("moonstep: the Mooncake Store is not up: no metrics at")
    assert command.run("status", "--metrics", "nonsense").exit_code == 2


def test_metadata_over_http(command: Command) -> None:
    port = process.free_port()
    result = command.up("--pool", "64MiB", "--http-metadata", str(port))
    assert result.exit_code == 0, result.output
    url = f"mooncake://127.0.0.1:{command.port}?segment=0&metadata=http://127.0.0.1:{port}/metadata"
    assert url in result.output
    store = open_store(url)
    assert store.put([outgoing(key(1), payload(1))]) == [Put.STORED]
    assert fetch(store, key(1)) == payload(1)
    store.close()
    command.run("down")


def test_what_only_lists_objects_says_that_it_cannot(command: Command) -> None:
    command.up("--pool", "0")
    url = f"mooncake://127.0.0.1:{command.port}"
    result = CliRunner().invoke(app, ["store", "stat", url])
    assert result.exit_code == 2
    assert result.output.strip() == f"moonstep: {url}: this kind of store cannot list its objects"
    command.run("down")
    result = CliRunner().invoke(app, ["store", "stat", url])
    assert result.exit_code == 1
    assert "no master answers" in result.output


def test_the_metrics_of_a_master_are_read() -> None:
    text = """# TYPE master_key_count gauge
master_key_count 3
master_allocated_bytes 1.5e+03
master_evicted_key_count 2
segment_allocated_bytes{segment="10.0.0.1:13084"} 1500
segment_total_capacity_bytes{segment="10.0.0.1:13084"} 4096
master_value_size_bytes_bucket{le="4096.000000"} 1
"""
    assert MasterStatus.parse(text) == MasterStatus(
        3, 1500, 0, 0, 2, (SegmentStatus("10.0.0.1:13084", 1500, 4096),)
    )


def test_a_plan_becomes_flags_of_the_master() -> None:
    plan = MasterPlan("127.0.0.1", 1, 2, http_metadata=3, flags={"client_ttl": "5"})
    assert plan.command(Path("master")) == [
        "master",
        "--rpc_address=127.0.0.1",
        "--rpc_port=1",
        "--metrics_host=127.0.0.1",
        "--metrics_port=2",
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        "--http_metadata_server_port=3",
        "--client_ttl=5",
    ]
