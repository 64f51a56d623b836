# SPDX-License-Identifier: Apache-2.0
"""Which models `--models` takes, by name or as a folder, and their cases."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import gemma4_stack
from known_stacks import STACKS
from tower_cases import CASES
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

# What `block_stacks.build_stack` can build.
STACK_NAMES = frozenset({*STACKS, *gemma4_stack.TOWERS})


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
    return _known(text, (*NAMED_MODELS, *sorted(STACK_NAMES)))


def cases_of(model: str) -> tuple[str, ...]:
    """Return the names of the cases that a model is timed with if none are given."""
    if model in gemma4_stack.TOWERS:
        return gemma4_stack.CASES
    return STACKS[model].cases if model in STACKS else tuple(CASES)


def _known(text: str, names: Iterable[str]) -> str:
    if text not in names and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder, and none of {', '.join(names)}"
        )
    return text
