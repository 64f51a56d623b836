# SPDX-License-Identifier: Apache-2.0
"""The product of a tanh GELU and a gate in PyTorch: what `kernels/gated_gelu.py` is."""

import torch


def gated_gelu_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up`, in fp32, rounded once.

    Args:
        gate: `[T, I]` floating point, any strides; overwritten.
        up: Like gate.

    Returns:
        The gate's memory.

    Raises:
        ValueError: The two are not alike.
    """
    check_gated_gelu_inputs(gate, up)
    values = torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float()
    return gate.copy_(values)


def check_gated_gelu_inputs(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Check that two tensors have the shape and dtype of each other.

    Raises:
        ValueError: They have not.
    """
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "gate and up must be [T, I] of one dtype, got "
            f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
