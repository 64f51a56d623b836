# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-flashinfer-vit`: thin, the work is in the modules that it calls."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS

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


@contextmanager
def _command() -> Iterator[Console]:
    """Keep vLLM quiet, and end with one line and status 2 on what a user can mend.

    Yields the console for progress: standard output is for the result alone.
    """
    # vLLM reads it once, when it is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Names of files may hold what it cannot encode, and the work would be lost.
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield Console(stderr=True)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        # Names of files, too, may hold the end of a line, and what a terminal obeys.
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        print(f"error: {text}", file=sys.stderr)
        raise typer.Exit(2) from None


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


def _image(text: str) -> Path:
    # Of an unset variable of a shell: as a path it would be the current folder.
    if not text:
        raise typer.BadParameter("the path of an image or folder is empty")
    return Path(text)


_Images = Annotated[
    list[Path],
    typer.Argument(
        parser=_image,
        help="Image files, or folders of them: of a folder AVIF, BMP, GIF, JPEG, PNG, "
        "TIFF and WebP, not of folders below it.",
    ),
]
_Model = Annotated[
    str,
    typer.Option(
        help="Folder of a local Hugging Face checkpoint; with --random-weights also "
        "the name of a known model."
    ),
]
_RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Seeded random weights, the same for every backend: to try it.",
    ),
]
_Depth = Annotated[
    int | None,
    typer.Option(min=1, help="Build only the first DEPTH blocks of the tower."),
]
_Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
_Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
_MaxPixels = Annotated[
    int | None,
    typer.Option(min=1, help="Shrink larger images to this many pixels."),
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print a JSON document instead of a table.")
]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with 1, which is a verdict of `doctor`.
        raise BrokenPipeError


def _end(
    document: Any, render: Callable[[Console], None], as_json: bool, status: int
) -> NoReturn:
    """Print a command's result and exit, with 2 if it cannot be printed."""
    try:
        if as_json:
            # Other programs cannot read JSON with NaN in it.
            print(json.dumps(document, indent=2, allow_nan=False), flush=True)
        else:
            render(_Console())
    except OSError as error:
        # Python would print what is left at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader that has seen enough, as `head`, is no failure.
        if not isinstance(error, BrokenPipeError):
            print(
                f"error: the result cannot be written to standard output: {error}",
                file=sys.stderr,
            )
            status = 2
    raise typer.Exit(status)


@main.command()
def encode(
    images: _Images,
    model: _Model = "Qwen/Qwen2.5-VL-3B-Instruct",
    random_weights: _RandomWeights = False,
    depth: _Depth = None,
    backend: Annotated[
        list[str],
        typer.Option(help="Attention backend; repeat the option to compare several."),
    ] = ["FLASHINFER"],  # noqa: B006
    attn_dtype: Annotated[
        str | None,
        typer.Option(help="fp8: quantised attention, where FLASHINFER runs."),
    ] = None,
    fp8_scale_path: Annotated[
        Path | None, typer.Option(help="File of FP8 scales, as calibrate writes it.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="As vLLM's: the tower's linear layers quantised at load, such as fp8."
        ),
    ] = None,
    unquantized: Annotated[
        list[str],
        typer.Option(help="A layer, or re:PATTERN, that keeps 16 bits; repeatable."),
    ] = [],  # noqa: B006
    dtype: _Dtype = "auto",
    device: _Device = "auto",
    max_pixels: _MaxPixels = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to save the embeddings in, as safetensors."),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Encode images with vLLM's own vision tower; show kernels, time and error.

    --output replaces embeddings of an earlier run, and no other file.
    A file from a folder that cannot be read is left out and named.
    Embeddings that are not finite are named and not saved.
    Exits with 1 after either, with 2 if nothing could be done.
    An image that is given by its own name must be readable.
    """
    with _command() as console:
        from vllm_flashinfer_vit.commands.encode import Options, render, run

        options = Options(
            images=images,
            model=model,
            random_weights=random_weights,
            depth=depth,
            backends=backend,
            attn_dtype=attn_dtype,
            fp8_scale_path=fp8_scale_path,
            quantization=quantization,
            unquantized=unquantized,
            dtype=dtype,
            device=device,
            max_pixels=max_pixels,
            output=output,
        )
        report = run(options, console)
    _end(report.to_json(), partial(render, report), as_json, report.exit_status)


@main.command()
def calibrate(
    images: _Images,
    model: _Model,
    output: Annotated[
        Path, typer.Option(help="File of scales to write; vLLM itself reads it too.")
    ] = Path("fp8_scales.json"),
    margin: Annotated[
        float, typer.Option(help="Head room over the largest absolute values.")
    ] = 1.5,
    merge: Annotated[
        Path | None,
        typer.Option(
            help="File of scales to widen, of this command's or of vLLM's; may be "
            "--output."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="SVG file for a plot of each layer's largest values."),
    ] = None,
    random_weights: _RandomWeights = False,
    depth: _Depth = None,
    dtype: _Dtype = "auto",
    device: _Device = "auto",
    max_pixels: _MaxPixels = None,
    as_json: _AsJson = False,
) -> None:
    """Make a file of FP8 scales from images; show each layer's clip rate and error.

    The file is replaced when all is done; --merge keeps what it held.
    A file that holds anything but scales is not replaced.
    A second run with the same file, at the same time, ends at once.
    A file from a folder that cannot be read is left out and named.
    Exits with 1 then, with 2 if no scales could be made.
    """
    with _command() as console:
        from vllm_flashinfer_vit.commands.calibrate import Options, render, run

        options = Options(
            images=images,
            model=model,
            output=output,
            margin=margin,
            merge=merge,
            plot=plot,
            random_weights=random_weights,
            depth=depth,
            dtype=dtype,
            device=device,
            max_pixels=max_pixels,
        )
        report = run(options, console)
    _end(report.to_json(), partial(render, report), as_json, report.exit_status)


@main.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what this machine can run, why not the rest, and how to mend each problem.

    Exits with 0 if FLASHINFER can serve here, with 1 otherwise.
    """
    with _command() as console:
        from vllm_flashinfer_vit.commands.doctor import examine
        from vllm_flashinfer_vit.commands.doctor_text import render

        report = examine(console)
    status = 0 if report.ok else 1
    _end(report.to_json(), partial(render, report), as_json, status)


@main.command()
def tune(
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="Dtypes to measure, comma-separated.",
            show_default="bf16,fp16,fp8; with --quick bf16",
        ),
    ] = None,
    head_dims: Annotated[
        str | None,
        typer.Option(
            help="Head dims to measure, comma-separated.",
            show_default=",".join(map(str, HEAD_DIMS)),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write instead of this GPU's in the user's folder."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds; what is not finished by then is left out.",
            show_default="660; with --quick 150",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Fewer lengths and numbers of sequences: a first table in two to "
            "three minutes.",
        ),
    ] = False,
    add: Annotated[
        bool,
        typer.Option(
            "--add",
            help="Keep what the file has of other dtypes, head dims and layers, "
            "measured with the same versions.",
        ),
    ] = False,
    gemms: Annotated[
        str | None,
        typer.Option(
            help="Layers in FP8 whose GEMMs to measure, inputs x outputs with their "
            "padding, comma-separated.",
            show_default="those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="attention or gemms: measure one of both.", show_default="both"
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Measure which kernel is fastest on this GPU; engines then choose by that.

    The file that it writes replaces the one of an earlier run, unless --add is given.
    """
    with _command() as console:
        from vllm_flashinfer_vit.commands.quiet import quiet_vllm
        from vllm_flashinfer_vit.commands.tune_options import Options

        options = Options(
            dtypes, head_dims, output, time_limit, quick, add, gemms, only
        )
        # Before imports of seconds.
        options.check()
        with quiet_vllm():
            from vllm_flashinfer_vit.commands.tune import run
            from vllm_flashinfer_vit.commands.tune_text import render, to_json

            report = run(options, console)
    _end(to_json(report), partial(render, report), as_json, 0)


if __name__ == "__main__":
    main()
