# SPDX-License-Identifier: Apache-2.0
"""Which models `--models` takes, by name or as a checkpoint's folder."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from vllm_flashinfer_vit.towers.spec import NAMED_MODELS


def named_model(text: str) -> str:
    """Take a model of `--models`: one of the families that this package describes.

    Raises:
        argparse.ArgumentTypeError: It is neither a folder nor the name of such a model.
    """
    return _known(text, NAMED_MODELS)


def any_model(text: str) -> str:
    """Take a model of `--models`: as `named_model`, or a tower whose blocks alone run.

    Raises:
        argparse.ArgumentTypeError: As `named_model`.
    """
    # It imports vLLM's layers, and some scripts choose the platform before that.
    from block_stacks import NAMES

    return _known(text, (*NAMED_MODELS, *sorted(NAMES)))


def _known(text: str, names: Iterable[str]) -> str:
    if text not in names and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder, and none of {', '.join(names)}"
        )
    return text
