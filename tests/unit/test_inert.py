# SPDX-License-Identifier: Apache-2.0
"""Importing the package does nothing; registering it initialises no CUDA."""

import json
import subprocess
import sys

import pytest


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
        "handed = layer.hooks.model_patches.__module__\n"
        "from torch.nn.modules import module\n"
        "hooks = len(module._global_module_registration_hooks)\n"
        "import sys\n"
        "costly = ('vllm.model_executor.kernels.linear', 'cutlass', 'humming',\n"
        "  'quack', 'cudnn')\n"
        "loaded = [name for name in costly if name in sys.modules]\n"
        "print(json.dumps({'layer': layer.__module__, 'applied': applied,\n"
        "  'handed': handed, 'hooks': hooks,\n"
        "  'loaded': loaded,\n"
        "  'cuda': torch.cuda.is_initialized(), 'wrapped': before is not during,\n"
        "  'restored': before is after}))"
    )
    assert state["layer"] == "vllm_flashinfer_vit.engine.layer"
    assert state["handed"] == "vllm_flashinfer_vit.plugin"
    assert state["hooks"] == 0
    assert not state["cuda"]
    # API servers register too, and never build a layer. vLLM's kernels take seconds to
    # import, and start compilers in the background.
    assert state["loaded"] == []
    assert "select-cpu" in state["applied"]
    assert not any(name.startswith("qwen") for name in state["applied"])
    assert state["wrapped"]
    assert state["restored"]


UNSUPPORTED = """
import importlib.metadata as m
original = m.version
m.version = lambda n: '0.19.1' if n == 'vllm' else original(n)
import json, os
before = dict(os.environ)
import vllm_flashinfer_vit
vllm_flashinfer_vit.register()
# Towers activate the package, too; an engine's processes inherit the environment.
vllm_flashinfer_vit.register()
changed = [n for n in os.environ if os.environ[n] != before.get(n)]
from vllm.model_executor.custom_op import op_registry_oot
assert 'MMEncoderAttention' not in op_registry_oot
import torch
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_flashinfer_vit.engine import selection
selection.current_platform.is_cpu = lambda: True
try:
    Platform.get_vit_attn_backend(72, torch.float32, AttentionBackendEnum.FLASHINFER)
except ValueError as error:
    print(json.dumps({'changed': changed, 'error': str(error)}))
"""


@pytest.mark.extended
def test_an_unsupported_vllm_is_named_once_and_left_alone():
    done = subprocess.run(
        [sys.executable, "-c", UNSUPPORTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *out, result = done.stdout.splitlines()
    lines = [line for line in [*out, *done.stderr.splitlines()] if "0.19.1" in line]
    assert len(lines) == 1
    assert "0.25.1 and newer" in lines[0]
    found = json.loads(result)
    assert "_VLLM_FLASHINFER_VIT_WARNED" in found["changed"]
    assert "vLLM 0.19.1 is installed" in found["error"]


# A vLLM or another plugin that this one cannot serve with, and what is said then.
OBSTACLES = {
    "replaced": (
        """
from vllm.model_executor.custom_op import op_registry_oot
class Other: pass
op_registry_oot['MMEncoderAttention'] = Other
""",
        "Other already replaces MMEncoderAttention",
    ),
    "moved": (
        """
import vllm.v1.attention.backends.registry as registry
del registry.AttentionBackendEnum
""",
        "cannot import name 'AttentionBackendEnum'",
    ),
}
REGISTERS = """
import os, vllm_flashinfer_vit
vllm_flashinfer_vit.register()
print('went on')
os.environ['VLLM_FLASHINFER_VIT_STRICT'] = '1'
vllm_flashinfer_vit.register()
print('went on, strict')
"""


@pytest.mark.extended
@pytest.mark.parametrize(("obstacle", "said"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_failed_registration_is_logged_and_raised_if_strict(obstacle, said):
    code = obstacle + REGISTERS
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "went on" in done.stdout and "went on, strict" not in done.stdout
    output = done.stdout + done.stderr
    assert "vllm-flashinfer-vit is not active in this process" in output
    assert said in done.stderr.splitlines()[-1]


LACKS = """
import vllm.model_executor.layers.attention, vllm.multimodal.processing
del vllm.multimodal.inputs.MultiModalFlatField
import json, vllm_flashinfer_vit
vllm_flashinfer_vit.register()
from vllm_flashinfer_vit import plugin
print(json.dumps([p.name for p in plugin.all_patches() if p.applied]))
"""


@pytest.mark.extended
def test_a_class_that_one_patch_needs_and_vllm_lacks():
    applied = run(LACKS)
    assert "image-frames-received" not in applied
    assert {"select-cpu", "image-patches"} <= {*applied}
