# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-flashinfer-vit`: thin, the work is in the modules that it calls."""

import json
from typing import Annotated

import typer
from rich.console import Console

from vllm_flashinfer_vit import __version__

main = typer.Typer(
    name="vllm-flashinfer-vit",
    help="FLASHINFER attention for vLLM's vision encoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-flashinfer-vit {__version__}")
        raise typer.Exit


@main.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


@main.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what this machine can run, why not the rest, and how to mend each problem.

    Exits with 0 if FLASHINFER can serve here, with 1 otherwise.
    """
    from vllm_flashinfer_vit.doctor import examine, render

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        render(report, Console())
    raise typer.Exit(0 if report.ok else 1)
