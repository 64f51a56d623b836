# SPDX-License-Identifier: Apache-2.0
"""Which manager takes the place of the one that vLLM has built."""

from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_flashinfer_vit.graphs.exact import ExactManager
from vllm_flashinfer_vit.graphs.layouts import LAYOUT, Layout
from vllm_flashinfer_vit.graphs.padded import PaddedManager


def adopt(manager: EncoderCudaGraphManager, flashinfer: bool) -> None:
    """Turn a manager that vLLM has just built into one of this package's.

    Args:
        manager: Nothing is captured yet.
        flashinfer: Whether the engine asks for FLASHINFER.
    """
    layout: Layout | None = getattr(manager.config, LAYOUT, None)
    # Runners name vLLM's class, and import it before anything could take its place.
    if flashinfer and layout is not None and layout.fits(manager.config):
        manager.__class__ = ExactManager
        manager.adopt_exact(layout)
    else:
        manager.__class__ = PaddedManager
        manager.adopt()
