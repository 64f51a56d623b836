# SPDX-License-Identifier: Apache-2.0
"""What the log says of choices when a layer's are resolved."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from _stacks import STACK

from vllm_flashinfer_vit.engine import selection
from vllm_flashinfer_vit.fp8 import policy


@pytest.mark.parametrize(
    ("module", "name", "kernel"),
    [(selection, "resolve", "triton"), (policy, "resolve_fp8", "triton_fp8")],
)
def test_measurements_with_other_versions_are_said(
    module: ModuleType, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = SimpleNamespace(info_once=lambda text, *args: said.append(text % args))
    stack = replace(STACK, vllm="0.30.0", triton="3.8.0")
    monkeypatch.setattr(module, "logger", logger)
    monkeypatch.setattr(module, "attempt", lambda kernel, **_: None)
    monkeypatch.setattr(module, "probe", lambda libraries: stack)
    resolve = getattr(module, name).__wrapped__
    assert len(resolve(80, torch.bfloat16, None, None)) > 1
    (line,) = said
    assert (
        "other versions: vllm 0.25.1 (here 0.30.0), triton 3.6.0 (here 3.8.0)" in line
    )
    # A kernel that is forced follows from no measurement.
    resolve(80, torch.bfloat16, kernel, None)
    assert said == [line]
