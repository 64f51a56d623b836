# SPDX-License-Identifier: Apache-2.0
"""Kernels that are settled beforehand, as functions that return their output."""

from collections.abc import Callable
from typing import Any

import torch


def once(prepare: Callable[..., Callable[[], torch.Tensor]]) -> Callable[..., Any]:
    """Return what settles a kernel anew in each call, and runs it."""
    return lambda *args, **kwargs: prepare(*args, **kwargs)()
