# SPDX-License-Identifier: Apache-2.0
"""How busy the host's cores are while something is measured that waits for the host."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# One process is measured at a time, and all others wait for their turn.
MOST_BUSY_CORES = 1.5
_STAT = Path("/proc/stat")


def load_text() -> str:
    """Return the last minute's load average and the number of own cores, as text."""
    cores = len(os.sched_getaffinity(0))
    return f"load {os.getloadavg()[0]:.2f} (1 minute), {cores} cores"


@contextmanager
def watched_load() -> Iterator[None]:
    """Print the load that a measurement saw, and warn if others used the cores, too.

    The warning goes by the cores that were busy meanwhile, of those that this process
    may use: `taskset` keeps other work away from them. In the first minute the load
    average still holds the building of the towers.
    """
    begin, busy_s = time.monotonic(), _busy_s()
    yield
    busy_cores = (_busy_s() - busy_s) / (time.monotonic() - begin)
    print(f"  {load_text()}, {busy_cores:.1f} busy while measuring", flush=True)
    if busy_cores > MOST_BUSY_CORES:
        print(
            f"  warning: {busy_cores:.1f} cores were busy where one process is "
            "measured: something else runs here, and times of the host are too long",
            flush=True,
        )


def _busy_s() -> float:
    """Return the seconds that this process's cores worked since the machine started."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        core, *counts = line.split()
        if core in own:
            user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
