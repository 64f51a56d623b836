# SPDX-License-Identifier: Apache-2.0
"""The memory of servers while they are asked: host and device, and whether it grows."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from environment import gpus_to_use
from gpu_use import device_of

MIB = 2**20
# In percent. Allocators keep what the largest batch so far has needed.
MAX_GROWTH = {"rss": 10.0, "device": 5.0}
# The parts of a run that are compared: the second and the last.
_PARTS = 10


@dataclass
class Series:
    """A server's memory over time.

    Attributes:
        done: Requests that the run had sent, of all servers.
        rss_mib: Resident memory of the server and all that it started.
        device_mib: Their memory on GPUs.
    """

    done: list[int] = field(default_factory=list)
    rss_mib: list[int] = field(default_factory=list)
    device_mib: list[int] = field(default_factory=list)


def on_devices() -> tuple[dict[int, int], int]:
    """Return bytes in use, by process as far as known, and altogether.

    They are of the GPUs that this process sees: on a host's others somebody else may
    measure.
    """
    from vllm.third_party import pynvml

    by_pid: dict[int, int] = {}
    in_use = 0
    for gpu in gpus_to_use(torch.cuda.device_count()):
        device = device_of(gpu)
        in_use += pynvml.nvmlDeviceGetMemoryInfo(device).used
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
            # None where the driver may not say it.
            if process.usedGpuMemory:
                before = by_pid.get(process.pid, 0)
                by_pid[process.pid] = before + process.usedGpuMemory
    return by_pid, in_use


class MemoryLog:
    """Notes the memory of some servers.

    Attributes:
        series: By server.
        is_per_process: Whether `device_mib` is a server's own. Where the driver names
            no process of a server, as in some containers, it is all that is in use.
    """

    def __init__(
        self,
        pids: Mapping[str, int],
        on_devices: Callable[[], tuple[dict[int, int], int]] = on_devices,
    ) -> None:
        """Begin without samples.

        Args:
            pids: The first process of each server.
            on_devices: Reads the GPUs' memory.
        """
        self.series = {server: Series() for server in pids}
        self._pids, self._on_devices = dict(pids), on_devices
        by_pid, _ = on_devices()
        self.is_per_process = all(
            any(process.pid in by_pid for process in _tree(pid))
            for pid in pids.values()
        )

    def sample(self, done: int) -> None:
        """Note the memory of all servers; of those that have ended it is 0."""
        by_pid, in_use = self._on_devices()
        for server, pid in self._pids.items():
            tree = _tree(pid)
            own = sum(by_pid.get(process.pid, 0) for process in tree)
            series = self.series[server]
            series.done.append(done)
            series.rss_mib.append(sum(map(_rss, tree)) // MIB)
            series.device_mib.append((own if self.is_per_process else in_use) // MIB)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def growth(values: Sequence[float]) -> float | None:
    """Return by how many percent the last tenth is above the second one.

    Args:
        values: Over time; each tenth counts by its median.

    Returns:
        None if there are too few.
    """
    size = len(values) // _PARTS
    if not size:
        return None
    before = statistics.median(values[size : 2 * size])
    after = statistics.median(values[-size:])
    return 100 * (after / before - 1) if before else None
