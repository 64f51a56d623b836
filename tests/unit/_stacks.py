# SPDX-License-Identifier: Apache-2.0
"""Made-up machines."""

from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.machine.versions import TESTED_VLLM

GIB = 2**30
HOPPER = Gpu("NVIDIA H200", (9, 0), 141 * GIB)
AMPERE = Gpu("NVIDIA A100", (8, 0), 80 * GIB)
ADA = Gpu("NVIDIA L4", (8, 9), 24 * GIB)
TURING = Gpu("Tesla T4", (7, 5), 16 * GIB)
BLACKWELL = Gpu("NVIDIA B200", (10, 0), 180 * GIB)
BLACKWELL_RTX = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB)

INSTALL_VLLM = 'pip install "vllm>={},<={}"'.format(*TESTED_VLLM)
LIBCUDNN = "/venv/nvidia/cudnn/lib/libcudnn.so.9"
STACK = Stack(
    python="3.12.1",
    vllm="0.25.1",
    torch="2.11.0",
    triton="3.6.0",
    flashinfer="0.6.13",
    cudnn_frontend="1.28.0",
    quack="0.5.0",
    cuda_bindings="13.4.4",
    cudnn_wheels={"nvidia-cudnn-cu13": "9.19.0.56"},
    cudnn_backend=91900,
    cudnn_libraries=(LIBCUDNN,),
    torch_cudnn=91900,
    torch_cuda="13.0",
    flash_attn=(2, 3, 4),
    gpus=(HOPPER,),
    driver="580.65.06",
    pins={"flashinfer-python": "==0.6.13"},
    inspected=True,
)
