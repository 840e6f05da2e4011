"""The `tiered-kv` command: its sub-commands and its exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv import __version__
from tiered_kv.cli.backends import backends
from tiered_kv.cli.bench import bench
from tiered_kv.cli.check import check
from tiered_kv.cli.demo import demo
from tiered_kv.cli.explain import explain
from tiered_kv.cli.export import export
from tiered_kv.cli.gc import gc
from tiered_kv.cli.import_archive import import_archive
from tiered_kv.cli.ls import ls
from tiered_kv.cli.output import FAILED, REFUSED
from tiered_kv.cli.plan import plan
from tiered_kv.cli.schema import schema
from tiered_kv.cli.stat import stat
from tiered_kv.cli.top import top
from tiered_kv.cli.verify import verify
from tiered_kv.cli.vllm_args import vllm_args
from tiered_kv.cli.warm import warm
from tiered_kv.errors import RefuseToStart, TieredKVError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tiered-kv",
    help="Keeps the KV blocks of LLM inference in further tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, check, explain, bench, backends, vllm_args, warm, plan, schema),
    *(ls, stat, verify, gc, export, top),
)
for command in _COMMANDS:
    app.command()(command)
app.command("import")(import_archive)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiered-kv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Keeps the KV blocks of LLM inference in further tiers."""


def _open_closed_streams() -> None:
    """What was closed by the caller (`>&-`) is like /dev/null: else a file of a tier could get the
    number of stdout, and what is printed land in it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line and exit: 0 done, 1 something failed, 2 wrong use or configuration, 130
    interrupted."""
    _open_closed_streams()
    try:
        app()
    except RefuseToStart as error:
        typer.echo(str(error), err=True)
        sys.exit(REFUSED)
    except TieredKVError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(FAILED)
    except OSError as error:  # what was printed has no room, or whoever read it is gone
        typer.echo(f"error: {error}", err=True)
        sys.stdout = None  # the interpreter would write what is left, and fail once more
        sys.exit(FAILED)
