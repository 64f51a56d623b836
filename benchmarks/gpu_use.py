# SPDX-License-Identifier: Apache-2.0
"""How much of a time a GPU works, by what its driver says."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_EVERY_S = 0.2


def device_of(gpu: str) -> Any:
    """Return what the driver's library calls a GPU.

    Args:
        gpu: Its name in CUDA_VISIBLE_DEVICES: an index or a UUID.
    """
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    if gpu.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)


def utilisation(gpu: str) -> Callable[[], float]:
    """Return what reads the share of its last sample in which a GPU ran a kernel.

    Args:
        gpu: As for `device_of`.
    """
    from vllm.third_party import pynvml

    device = device_of(gpu)
    return lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100


@contextmanager
def noted_use(
    read: Callable[[], float], samples: list[tuple[float, float]]
) -> Iterator[None]:
    """Collect what a GPU's driver says until the block ends.

    Args:
        read: What `utilisation` returned.
        samples: Gets a time, by `time.perf_counter`, and a share for each sample, one
            at least.
    """
    is_over = threading.Event()

    def sample() -> None:
        while True:
            over = is_over.wait(_EVERY_S)
            samples.append((time.perf_counter(), read()))
            if over:
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
