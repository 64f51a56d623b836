# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` makes of its command line, without a GPU."""

import importlib
from collections.abc import Sequence
from typing import Any

from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform


def serve_arguments(given: Sequence[str]) -> Any:
    """Return what vLLM's own parser reads after `vllm serve`.

    Raises:
        SystemExit: An option is not known, or its value is wrong.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The parser asks for the device.
    use_cpu_platform()
    cli_args = first_module(
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    )
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(list(given))


def first_module(*names: str) -> Any:
    """Import the first of these modules that this vLLM has; newer names come first.

    Raises:
        ModuleNotFoundError: It has none of them.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"this vLLM has none of {', '.join(names)}")
