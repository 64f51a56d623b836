# SPDX-License-Identifier: Apache-2.0
"""Importing the package does nothing; registering it initialises no CUDA."""

import json
import subprocess
import sys


def run(code: str) -> dict:
    """Run code in a fresh interpreter and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_neither_vllm_nor_triton_nor_torch():
    loaded = run(
        "import json, sys, vllm_flashinfer_vit\n"
        "names = ('vllm', 'triton', 'torch', 'flashinfer', 'cudnn')\n"
        "print(json.dumps([name for name in names if name in sys.modules]))"
    )
    assert loaded == []


def test_register_runs_twice_without_cuda_and_can_be_undone():
    state = run(
        "import json, torch\n"
        "from vllm.platforms.interface import Platform\n"
        "before = Platform.__dict__['get_vit_attn_backend']\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "import vllm_flashinfer_vit\n"
        "vllm_flashinfer_vit.register()\n"
        "during = Platform.__dict__['get_vit_attn_backend']\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "from vllm_flashinfer_vit import plugin\n"
        "layer = op_registry_oot['MMEncoderAttention']\n"
        "applied = [p.name for p in plugin.all_patches() if p.applied]\n"
        "plugin.revert_all()\n"
        "after = Platform.__dict__['get_vit_attn_backend']\n"
        "print(json.dumps({'layer': layer.__module__, 'applied': applied,\n"
        "  'cuda': torch.cuda.is_initialized(), 'wrapped': before is not during,\n"
        "  'restored': before is after}))"
    )
    assert state["layer"] == "vllm_flashinfer_vit.engine.layer"
    assert not state["cuda"]
    assert "select-cpu" in state["applied"]
    assert not any(name.startswith("qwen") for name in state["applied"])
    assert state["wrapped"]
    assert state["restored"]


def test_an_unsupported_vllm_is_named_in_one_line_and_left_alone():
    code = (
        "import importlib.metadata as m\n"
        "original = m.version\n"
        "m.version = lambda n: '0.19.1' if n == 'vllm' else original(n)\n"
        "import vllm_flashinfer_vit\n"
        "vllm_flashinfer_vit.register()\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "assert 'MMEncoderAttention' not in op_registry_oot\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if "0.19.1" in line
    ]
    assert len(lines) == 1
    assert "0.25.1 to 0.33.0" in lines[0]
