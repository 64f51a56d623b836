# SPDX-License-Identifier: Apache-2.0
"""What the cuDNN kernels share: their plans and workspace.

The key of a plan is everything that it bakes in, and plans live as long as the process:
a captured CUDA graph may still run the kernels of any of them.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from vllm_flashinfer_vit.machine.versions import format_cudnn

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

_MIN_WORKSPACE_BYTES = 1 << 20


class PlanKey(NamedTuple):
    """Everything that a plan bakes in: no two keys may share a plan.

    Attributes:
        num_seqs: Declared batch size.
        max_len: Declared longest sequence, in tokens.
        dtype: Of q, k and v.
        out_dtype: Of the output, which is contiguous.
        q: (H, D) and the strides of q, in elements.
        k: (H_kv, D) and the strides of k.
        v: (H_kv, D_v) and the strides of v.
        scale: Softmax scale.
    """

    num_seqs: int
    max_len: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    scale: float


class Plan(Protocol):
    """A built graph of cudnn-frontend."""

    def get_workspace_size(self) -> int:
        """Return the bytes that running it needs."""

    def execute(
        self, tensors: Mapping[int, torch.Tensor], workspace: torch.Tensor, handle: Any
    ) -> None:
        """Run it on tensors by their ids."""


class PlanCache:
    """The plans and the workspace of one device.

    Calls are ordered on one stream, as an encoder's are: they share the workspace.
    """

    def __init__(self) -> None:
        """Hold nothing yet, and load nothing."""
        self._device: torch.device | None = None
        self._plans: dict[PlanKey, Plan] = {}
        # Outgrown ones stay: captured graphs hold their addresses. Each is at least
        # twice the last, so all together are less than twice the largest.
        self._workspaces: list[torch.Tensor] = []

    @property
    def built(self) -> int:
        """How many plans there are."""
        return len(self._plans)

    @property
    def workspace_bytes(self) -> int:
        """Device memory held as workspace."""
        return sum(workspace.numel() for workspace in self._workspaces)

    @property
    def workspace(self) -> torch.Tensor:
        """Memory that is enough for every plan so far."""
        return self._workspaces[-1]

    def plan(
        self, key: PlanKey, device: torch.device, build: Callable[[], Plan]
    ) -> Plan:
        """Return the plan of a key, built by the first call with it.

        Raises:
            RuntimeError: cuDNN builds none, a CUDA graph is being captured, or plans
                were built for another device before.
        """
        plan = self._plans.get(key)
        if plan is not None and device == self._device:
            return plan
        if self._device not in (None, device):
            # A cuDNN handle is of one device; before 0.7.1 FlashInfer has a single one.
            raise RuntimeError(
                f"this process runs cuDNN attention on {self._device} and cannot do so "
                f"on {device} too; use one process per GPU"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cuDNN has no plan for {key}, and none can be built while a CUDA "
                "graph is captured; run the same shapes once before the capture"
            )
        start = time.perf_counter()
        try:
            plan = build()
            workspace_bytes = plan.get_workspace_size()
        # cudnn-frontend has its own exceptions, and raises others besides.
        except Exception as error:
            raise RuntimeError(
                f"cuDNN {_version()} builds no plan for {key}: {error}. Choose "
                "another kernel with VLLM_FLASHINFER_VIT_KERNEL."
            ) from error
        self._reserve(workspace_bytes, device)
        self._device = device
        self._plans[key] = plan
        build_ms = (time.perf_counter() - start) * 1e3
        logger.debug(
            "cuDNN plan %d built in %.1f ms, workspace %d bytes: %s",
            self.built,
            build_ms,
            workspace_bytes,
            key,
        )
        return plan

    def _reserve(self, num_bytes: int, device: torch.device) -> None:
        if self._workspaces and self._workspaces[-1].numel() >= num_bytes:
            return
        size = 1 << (max(num_bytes, _MIN_WORKSPACE_BYTES) - 1).bit_length()
        self._workspaces.append(torch.empty(size, dtype=torch.uint8, device=device))


# Per process, like the CUDA context that the plans' kernels are loaded into.
PLANS = PlanCache()


def _version() -> str:
    import cudnn

    return format_cudnn(cudnn.backend_version())
