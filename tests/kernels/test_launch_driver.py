# SPDX-License-Identifier: Apache-2.0
"""What settled launches hand to the driver, next to Triton's own."""

import json
import subprocess
import sys

import pytest
import torch

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

# Compiles for a GPU that need not exist, and notes what reaches Triton's C launcher.
LAUNCHES = """
import json, sys, types, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

calls = []

class Raw:
    def __call__(self, *args):
        if isinstance(args[-1], (list, tuple)):
            args = (*args[:-1], *args[-1])
        # A profiler's: Triton makes them anew for every launch.
        kinds = ("LazyDict", "HookChain")
        calls.append([
            "None" if type(x).__name__ in kinds
            else str(x.data_ptr() if hasattr(x, "data_ptr") else x)
            for x in args
        ])

class Utils:
    launch = Raw()
    def load_binary(self, name, kernel, shared, device):
        return name, name, 64, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}
    def unload_module(self, module):
        pass
    def build_signature_metadata(self, signature):
        return str(signature)
    def fill_tma_descriptor(self, *args):
        return "map" + str(args)
    fill_tma_descriptor_tiled = fill_tma_descriptor

class Driver:
    utils, launcher_cls = Utils(), nvidia.CudaLauncher
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 77
    def allocate_default_profile_scratch(self, size, align, stream):
        return None

# Triton 3.6 compiles a C launcher for each kernel.
if hasattr(nvidia, "compile_module_from_src"):
    nvidia.compile_module_from_src = lambda **_: types.SimpleNamespace(launch=Raw())
    nvidia.library_dirs = lambda: []
# Later ones have one for all, which takes its types from the library of the driver.
nvidia.PyKernelArg = lambda **fields: tuple(fields.values())
triton.runtime.driver.set_active(Driver())
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
    multi_processor_count=132)
torch.cuda.is_current_stream_capturing = lambda: True
torch._C._cuda_getCurrentRawStream = lambda device: 77

from vllm_flashinfer_vit.kernels import (
    _launch, add_norm, flash, flash_fp8, hopper_bf16, hopper_fp8, quantize, rope,
    seqlens, window)

# One memory for all outputs, so that equal launches are equal in every argument.
memory = torch.zeros(1 << 21, dtype=torch.bfloat16)
empty = torch.empty
def one_memory(shape, dtype, device=None):
    out = empty(shape, dtype=dtype, device="meta")
    return memory.view(dtype)[: out.numel()].view(out.shape)
torch.empty = one_memory
torch.empty_like = lambda x, **kwargs: one_memory(x.shape, x.dtype)
q, k, v = torch.zeros(200, 3, 4, 80, dtype=torch.bfloat16).unbind(1)
x, weight = torch.zeros(200, 1152, dtype=torch.bfloat16), torch.zeros(1152)
cos = torch.zeros(200, 40)
cu_seqlens = torch.tensor([0, 100, 200], dtype=torch.int32)
_, blocks = quantize.prepare(q, k, v, cu_seqlens)
fp8 = blocks, cu_seqlens, 200, 100, 0.1, 80, torch.bfloat16
given = q, k, v, cu_seqlens, cos, cos
scales, counts = torch.ones(3), torch.zeros(2, 3, dtype=torch.int64)
def sum_norm():
    settled = add_norm.prepare(x, (x, x), weight, None, 1e-6, x)
    settled(x, x, x, weight, weight, x)
runs = {
    "flash": lambda: flash.prepare(q, k, v, cu_seqlens, 100, 0.1)(),
    "rope": lambda: rope.rope(q, k, cos, cos),
    "seqlens": lambda: seqlens.derive_seqlens(cu_seqlens, 200, 8, (960, 960, 960, 320)),
    "window": lambda: window.prepare(q, k, v, cu_seqlens, 100, 0.1, cos, cos)(),
    "quantize": lambda: quantize.quantize_blocks(q, k, v, cu_seqlens, cos, cos),
    "quantize by scales": lambda: quantize.quantize_blocks(*given, scales),
    "quantize counted": lambda: quantize.quantize_blocks(*given, scales, False, counts),
    "flash_fp8": lambda: flash_fp8.prepare(*fp8)(),
    "hopper_bf16": lambda: hopper_bf16.prepare(q, k, v, cu_seqlens, 100, 0.1)(),
    "hopper_fp8": lambda: hopper_fp8.prepare(*fp8)(),
    "sum_norm": sum_norm,
}
# Nothing may fall back to what a Triton that is built otherwise needs.
_launch._run = None
are_aligned = _launch._are_aligned
found = {}
for name, run in runs.items():
    calls.clear()
    # What is not aligned is Triton's to launch.
    _launch._are_aligned = lambda tensors: False
    run()
    _launch._are_aligned = are_aligned
    run()
    run()
    found[name] = list(calls)
print(json.dumps(found))
"""


@no_gpu
@pytest.mark.extended
def test_a_settled_launch_hands_the_driver_what_tritons_does(tmp_path) -> None:
    """With the installed Triton's own code around its C launcher."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        capture_output=True,
        text=True,
        env={"PATH": "", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 11
    for name, launches in found.items():
        count = 2 if name == "hopper_bf16" else 1
        assert len(launches) == 3 * count, name
        through_triton = launches[:count]
        assert all(len(launch) > 20 for launch in through_triton), name
        assert launches[count:] == through_triton * 2, name
