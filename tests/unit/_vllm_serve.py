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
    try:
        cli_args = importlib.import_module("vllm.entrypoints.openai.cli_args")
    except ImportError:
        cli_args = importlib.import_module("vllm.entrypoints.common.cli_args")
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(list(given))
