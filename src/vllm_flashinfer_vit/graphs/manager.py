# SPDX-License-Identifier: Apache-2.0
"""Which manager takes the place of the one that vLLM has built."""

from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_flashinfer_vit.graphs.exact import ExactManager
from vllm_flashinfer_vit.graphs.layouts import LAYOUT, Layout
from vllm_flashinfer_vit.graphs.padded import PaddedManager
from vllm_flashinfer_vit.settings import ENV_STRICT

logger = init_logger("vllm.plugins.flashinfer_vit")


def adopt(manager: EncoderCudaGraphManager, flashinfer: bool, strict: bool) -> None:
    """Turn a manager that vLLM has just built into one of this package's.

    Args:
        manager: Nothing is captured yet.
        flashinfer: Whether the engine asks for FLASHINFER.
        strict: As in `Settings`.

    Raises:
        TypeError: In strict mode: it is of a class that derives from vLLM's, and stays
            what it is.
    """
    found = type(manager)
    if found is not EncoderCudaGraphManager:
        text = (
            f"{found.__module__}.{found.__qualname__} manages the encoder CUDA graphs, "
            "in place of vLLM's own class: vllm-flashinfer-vit leaves them as they are"
        )
        if strict:
            raise TypeError(f"{text}; use vLLM's own class, or unset {ENV_STRICT}")
        logger.warning("%s. Budgets and the padding of batches are that class's.", text)
        return
    layout: Layout | None = getattr(manager.config, LAYOUT, None)
    # Runners name vLLM's class, and import it before anything could take its place.
    if flashinfer and layout is not None and layout.fits(manager.config):
        manager.__class__ = ExactManager
        manager.adopt_exact(layout, strict)
    else:
        manager.__class__ = PaddedManager
        manager.adopt(strict)
