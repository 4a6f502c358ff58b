"""``moonstep up``, ``down`` and ``status``: a Mooncake Store on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from moonstep.cli.store import size
from moonstep.config import SettingError, parse_size
from moonstep.stores.base import StoreUnwell
from moonstep.stores.mooncake import local
from moonstep.stores.mooncake.local import AlreadyUp, Record, StateFolder
from moonstep.stores.mooncake.master import DEFAULT_PORT, Address
from moonstep.stores.mooncake.metrics import MasterStatus, read_status
from moonstep.stores.mooncake.package import PackageMissing
from moonstep.stores.mooncake.process import (
    DEFAULT_METRICS_PORT,
    LOOPBACK,
    MasterFailed,
    MasterPlan,
)

State = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the record and the logs. Not given: $XDG_STATE_HOME/moonstep.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)


def up(
    pool: Annotated[str, typer.Option(help="Memory for objects, such as 16GiB; 0 for none.")] = (
        "4GiB"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the master.")] = DEFAULT_PORT,
    metrics_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the master's metrics.")
    ] = DEFAULT_METRICS_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anybody who reaches it can read and write.")
    ] = LOOPBACK,
    http_metadata: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Serve metadata over HTTP on this port, on all addresses."
        ),
    ] = None,
    lease: Annotated[
        str | None, typer.Option(help="How long what was read cannot be evicted, such as 5s.")
    ] = None,
    state: State = None,
) -> None:
    """Start a Mooncake Store on this machine, and print the flag for vllm serve.

    It is a master and, with --pool, a process that gives memory to it; both go on after this
    command. With --pool 0 the servers give the memory ("segment=...").

    Examples:

        moonstep up

        moonstep up --pool 64GiB --port 50061 --metrics-port 9013
    """
    console = Console()
    flags = {} if lease is None else {"default_kv_lease_ttl": lease}
    plan = MasterPlan(host, port, metrics_port, http_metadata, flags)
    if host in ("0.0.0.0", "::"):
        _fail(console, f"moonstep: --host={host!r}: name the address that servers are to use")
    try:
        pool_bytes = parse_size("--pool", pool)
        with console.status("starting"):
            record = local.start(_folder(state), plan, pool_bytes)
    except KeyboardInterrupt:
        _fail(console, "moonstep: interrupted; what was started has been ended.", status=130)
    except SettingError as error:
        _fail(console, str(error))
    except (AlreadyUp, MasterFailed, PackageMissing, OSError) as error:
        _fail(console, f"moonstep: {error}", status=1)
    _say(console, f"A Mooncake Store is up at {record.address}; its log: {record.log}")
    if not pool_bytes:
        _say(console, "It has no memory but what servers give it: choose the segment below.")
    _say(console, "Start servers with:\n")
    _say(console, f"    --kv-transfer-config '{_flag(record)}'\n")
    _say(console, "See it with `moonstep status`, end it with `moonstep down`.")


def down(state: State = None) -> None:
    """End what `moonstep up` started. What is in its memory is lost; servers go on without it.

    Example: moonstep down
    """
    console = Console()
    record = local.stop(_folder(state))
    if record is None:
        _fail(console, "moonstep: nothing was started here", status=1)
    _say(console, f"The Mooncake Store at {record.address} is down.")


def status(
    metrics: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a master's metrics. Not given: the one of `moonstep up`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state: State = None,
) -> None:
    """Show how full a Mooncake Store is, by its master's metrics. Ends with 1 if it is not up.

    Examples:

        moonstep status

        moonstep status --metrics 10.0.0.5:9003 --json
    """
    console = Console()
    address = _metrics_address(console, metrics, _folder(state))
    try:
        found = read_status(address)
    except StoreUnwell as error:
        _fail(console, f"moonstep: the Mooncake Store is not up: {error}", status=1)
    if as_json:
        typer.echo(json.dumps({"metrics": str(address), **dataclasses.asdict(found)}, indent=2))
    else:
        _show(console, found)


def _show(console: Console, found: MasterStatus) -> None:
    table = Table()
    for column in ("segment", "used", "capacity"):
        table.add_column(column, justify="left" if column == "segment" else "right")
    for segment in found.segments:
        table.add_row(segment.name, size(segment.used_bytes), size(segment.capacity_bytes))
    console.print(table)
    console.print(
        f"In all {found.objects:,} objects in {size(found.used_bytes)} of "
        f"{size(found.capacity_bytes)}; {found.clients:,} clients; {found.evicted:,} objects "
        "evicted since the start."
    )


def _flag(record: Record) -> str:
    url = record.url("0" if record.pool else "16GiB")
    return json.dumps(
        {
            "kv_connector": "MoonstepConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": url},
        },
        separators=(",", ":"),
    )


def _metrics_address(console: Console, text: str | None, folder: StateFolder) -> Address:
    if text is None:
        record = folder.read()
        if record is None:
            _fail(console, "moonstep: nothing was started here; name a master: --metrics HOST:PORT")
        return record.metrics
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        _fail(console, f"moonstep: --metrics={text!r}: write HOST:PORT, such as 10.0.0.5:9003")
    return Address(host.strip("[]"), int(port))


def _folder(state: Path | None) -> StateFolder:
    return StateFolder.default() if state is None else StateFolder(state)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _fail(console: Console, message: str, status: int = 2) -> NoReturn:
    _say(console, message)
    raise typer.Exit(status)
