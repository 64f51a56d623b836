# SPDX-License-Identifier: Apache-2.0
"""How much of a time a GPU works: samples of its driver's, as long as a block runs."""

import itertools
import time
from types import SimpleNamespace

import pytest
from _benchmarks import BENCHMARKS  # noqa: F401

import gpu_use


def test_samples_are_taken_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(gpu_use, "_EVERY_S", 0.01)
    samples, count, begin = [], itertools.count(), time.perf_counter()
    with gpu_use.noted_use(lambda: float(next(count)), samples):
        until = time.monotonic() + 30
        while len(samples) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    taken, end = list(samples), time.perf_counter()
    times = [at for at, _ in taken]
    assert [share for _, share in taken] == [float(i) for i in range(len(taken))]
    assert len(taken) >= 3 and [begin, *times, end] == sorted([begin, *times, end])
    time.sleep(0.05)
    assert samples == taken


def test_a_short_block_has_a_sample_and_a_failing_one_ends_too():
    samples = []
    with pytest.raises(ZeroDivisionError), gpu_use.noted_use(lambda: 0.25, samples):
        raise ZeroDivisionError
    assert [share for _, share in samples] == [0.25]


@pytest.mark.parametrize(("name", "how"), [("3", "Index"), ("GPU-4a", "UUID")])
def test_a_gpu_is_found_by_its_name(name, how, monkeypatch):
    from vllm.third_party import pynvml

    asked = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(
        pynvml, f"nvmlDeviceGetHandleBy{how}", lambda x: asked.append(x)
    )
    rates = SimpleNamespace(gpu=40)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda device: rates)
    assert gpu_use.utilisation(name)() == 0.4
    assert asked == [int(name) if how == "Index" else name]
