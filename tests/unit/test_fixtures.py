# SPDX-License-Identifier: Apache-2.0
"""What fixtures of all tests leave as it was."""

import pytest
import torch
from torch.utils._device import _device_constructors


def test_modules_are_built_on_a_device_while_memory_is_poisoned(
    request: pytest.FixtureRequest,
) -> None:
    """PyTorch reads once which functions build tensors, as a device is first used."""
    _device_constructors.cache_clear()
    request.getfixturevalue("nan_empty")
    with torch.device("meta"):
        assert torch.nn.Linear(2, 2).weight.is_meta
