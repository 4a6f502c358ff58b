"""The ``moonstep`` command. Subcommands import their engines only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from moonstep import __version__
from moonstep.cli import audit, bench, mooncake, store
from moonstep.cli.demo import demo

app = typer.Typer(
    help="A KV-cache connector for vLLM that moves in step with its scheduler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
audit.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")
mooncake.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moonstep {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """A KV-cache connector for vLLM that moves in step with its scheduler."""


if __name__ == "__main__":
    app()
