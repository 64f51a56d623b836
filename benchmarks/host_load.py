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
    """Return the load average of the last minute and the number of cores, as text."""
    return f"load {os.getloadavg()[0]:.2f} (1 minute), {os.cpu_count()} cores"


@contextmanager
def watched_load() -> Iterator[None]:
    """Print the load that a measurement saw, and warn if others used the cores, too.

    The warning goes by the cores that were busy meanwhile: in the first minute the load
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
    """Return the seconds that all cores together worked since the machine started."""
    total = _STAT.read_text().partition("\n")[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, total.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
