"""``moonstep store``: look after a store, whatever it is, by its URL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moonstep.config import SettingError
from moonstep.keys import checked_namespace
from moonstep.stores.base import Get, Inspectable, StoreUnwell
from moonstep.stores.checked import CheckedInspection
from moonstep.stores.upkeep import Verified, remove_namespace, usage_by_namespace, verify
from moonstep.stores.urls import Use, open_store

app = typer.Typer(
    help="Look after a store by its URL, such as dir:///var/cache/moonstep.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="As in the setting `store`.")]
MOST_SHOWN = 20


@app.command("stat")
def stat(url: Url) -> None:
    """Show how full a store is, by namespace.

    Example: moonstep store stat dir:///var/cache/moonstep
    """
    console = Console()
    with _opened(url, console) as store, console.status("counting"):
        usage = store.usage()
        by_namespace = usage_by_namespace(store)
    table = Table()
    table.add_column("namespace")
    table.add_column("objects", justify="right")
    table.add_column("bytes", justify="right")
    for namespace, found in by_namespace.items():
        table.add_row(namespace, f"{found.objects:,}", size(found.nbytes))
    console.print(table)
    bound = "no bound known" if usage.capacity_bytes is None else size(usage.capacity_bytes)
    console.print(
        f"In all {usage.objects:,} objects in {size(usage.used_bytes)}; capacity: {bound}."
    )


@app.command("verify")
def verify_objects(
    url: Url,
    namespace: Annotated[str | None, typer.Option(help="Only this namespace.")] = None,
) -> None:
    """Read and check every object; remove the damaged ones. Ends with 1 if there were any.

    Example: moonstep store verify dir:///var/cache/moonstep
    """
    console = Console()
    outcomes: Counter[Get] = Counter()
    damaged: list[Verified] = []
    with _opened(url, console) as store, _progress(console) as progress:
        wanted = _checked(namespace)
        bar = progress.add_task("verifying", total=_count(store, wanted))
        for verified in verify(store, wanted):
            outcomes[verified.answer] += 1
            if verified.answer is Get.DAMAGED:
                damaged.append(verified)
            progress.advance(bar)
    for verified in damaged[:MOST_SHOWN]:
        console.print(f"damaged, removed: {verified.entry.key}", highlight=False, soft_wrap=True)
    if len(damaged) > MOST_SHOWN:
        console.print(f"... and {len(damaged) - MOST_SHOWN:,} more")
    console.print(
        f"{outcomes[Get.HIT]:,} good, {outcomes[Get.DAMAGED]:,} damaged and removed, "
        f"{outcomes[Get.FAILED]:,} unreadable, {outcomes[Get.MISS]:,} gone meanwhile."
    )
    if outcomes[Get.DAMAGED] or outcomes[Get.FAILED]:
        raise typer.Exit(1)


@app.command("rm")
def remove(
    url: Url,
    namespace: Annotated[str, typer.Option(help="The namespace to clear.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove every object of one namespace. Servers that use it go on, with misses.

    Example: moonstep store rm dir:///var/cache/moonstep --namespace staging
    """
    console = Console()
    removed = 0
    with _opened(url, console) as store:
        wanted = _checked(namespace)
        objects = _count(store, wanted)
        if not yes:
            typer.confirm(f"Remove {objects:,} objects of {namespace!r}?", abort=True)
        with _progress(console) as progress:
            bar = progress.add_task("removing", total=objects)
            for batch in remove_namespace(store, namespace):
                removed += batch
                progress.advance(bar, batch)
    console.print(f"{removed:,} objects removed.")


def size(nbytes: int) -> str:
    """
    >>> [size(nbytes) for nbytes in (0, 1023, 1536, 200 << 30)]
    ['0 B', '1023 B', '1.5 KiB', '200.0 GiB']
    """
    value, units = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB"))
    if value < 1024:
        return f"{nbytes} B"
    unit = ""
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.1f} {unit}"


@contextmanager
def _opened(url: str, console: Console) -> Iterator[CheckedInspection]:
    """The store, and every way to fail as one line and an exit status."""
    try:
        store = open_store(url, Use.INSPECT)
        if not isinstance(store, Inspectable):
            store.close()
            _fail(console, f"moonstep: {url}: this kind of store cannot list its objects")
        try:
            yield CheckedInspection(store)
        finally:
            store.close()
    except SettingError as error:
        _fail(console, str(error))
    except StoreUnwell as error:
        _fail(console, f"moonstep: {url}: the store is unwell: {error}", status=1)
    except KeyboardInterrupt:
        _fail(console, "moonstep: interrupted; what was done so far is done.", status=130)


def _checked(namespace: str | None) -> str | None:
    return None if namespace is None else checked_namespace(namespace)


def _count(store: CheckedInspection, namespace: str | None) -> int:
    return sum(1 for _ in store.entries(namespace))


def _fail(console: Console, message: str, status: int = 2) -> NoReturn:
    console.print(message, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
