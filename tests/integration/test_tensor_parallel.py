# SPDX-License-Identifier: Apache-2.0
"""Two ranks hold half of the heads and of the MLP each, and agree with one rank.

So do they in encoder CUDA graphs, which are simulated.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import values
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import build_tower

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="vLLM runs on the GPU in this process"
)

GRIDS = [[1, 12, 20], [2, 8, 8]]
# Half of the MLP is 54 wide, no multiple of 8, so the package pads it.
VISION = {
    "qwen2_vl": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 96,
        "mlp_ratio": 2,
        "num_heads": 4,
    },
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 108,
        "num_heads": 4,
        "out_hidden_size": 96,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 108,
        "num_heads": 4,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Both ranks, which fork once all is imported: arguments are the checkpoint, the shared
# folder and `BENCHMARKS`.
RANKS = """
import multiprocessing
import sys
from pathlib import Path

import torch
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

use_cpu_platform(force=True)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

checkpoint, shared = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, sys.argv[3])
from simulated_graphs import build_manager, capture, simulated_graphs
from vllm_flashinfer_vit.blocks import attach, layers
from vllm_flashinfer_vit.blocks.linear import is_plain
from vllm_flashinfer_vit.towers.spec import model_module, resolve_spec
from vllm_flashinfer_vit.towers.tower import build_tower


def addmm_gelu(bias, x, transposed, *, use_gelu, out):
    sums = torch.addmm(bias, x, transposed)
    out.copy_(torch.nn.functional.gelu(sums, approximate="tanh"))


torch.set_num_threads(1)
spec = resolve_spec(checkpoint)
model_module(spec.family)
pixels, grids = torch.load(shared / "input.pt")


def build():
    options = {"dtype": torch.float32, "device": "cpu"}
    tower = build_tower(spec, backend="FLASHINFER", **options)
    out = tower.encode(pixels, grids)
    found = attach.program_of(tower.visual.get_submodule("blocks.0"))
    assert found.steps["attn.proj"] == "vLLM's own RowParallelLinear"
    # Which plans the warm-up builds: where ranks gather heads, v is copied.
    layouts = {layer.layouts for layer in tower.attention_layers().values()}
    assert layouts == {("packed",) if found.spec.split else ("views",)}
    return tower, out, found.steps


def run(rank):
    store = torch.distributed.FileStore(str(shared / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=2, rank=rank, local_rank=rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(2, backend="gloo")
    _, own, _ = build()
    # Now layers whose outputs are not summed over ranks run as on a GPU.
    layers.can_run = is_plain
    torch._addmm_activation = addmm_gelu
    tower, out, steps = build()
    with simulated_graphs():
        manager = build_manager(
            tower, max_tokens=160, budgets=(16, 128), max_items=8, frames_per_video=4
        )
        capture(manager, tower)
        with tower.running():
            video = {"pixel_values_videos": pixels}
            video["video_grid_thw"] = torch.tensor(grids)
            replayed = torch.cat(manager.execute(video))
    assert manager.graph_hits == len(grids) and not manager.graph_misses
    mlps = {n: p for n, p in tower.visual.named_parameters() if ".mlp." in n}
    widths = {tuple(p.shape) for p in mlps.values()}
    if rank == 0:
        torch.save((own, out, replayed, steps, widths), shared / "output.pt")
    torch.distributed.barrier()


fork = multiprocessing.get_context("fork")
ranks = [fork.Process(target=run, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
assert [rank.exitcode for rank in ranks] == [0, 0]
"""


def make_checkpoint(family: str, folder: Path) -> None:
    """Save a small random model of transformers, with what vLLM needs to load it."""
    import transformers

    stem = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 64,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    config = getattr(transformers, f"{stem[family]}Config")(
        text_config=text, vision_config=VISION[family]
    )
    name = f"{stem[family]}ForConditionalGeneration"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "family", values(["qwen2_5_vl"], extended=["qwen2_vl", "qwen3_vl"])
)
def test_two_ranks_agree_with_one(family: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(family, checkpoint)
    spec = resolve_spec(str(checkpoint))
    rows = sum(t * h * w for t, h, w in GRIDS)
    pixels = torch.randn(
        rows, spec.patch_dim, generator=torch.Generator().manual_seed(1)
    )
    torch.save((pixels, GRIDS), tmp_path / "input.pt")
    done = subprocess.run(
        [sys.executable, "-c", RANKS, checkpoint, tmp_path, BENCHMARKS],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *outputs, steps, widths = torch.load(tmp_path / "output.pt")
    stock = build_tower(spec, backend="TORCH_SDPA", dtype=torch.float32, device="cpu")
    expected = stock.encode(pixels, GRIDS)
    for found in outputs:
        assert (found - expected).norm() / expected.norm() < 1e-5
    assert steps["attn.qkv"] == "cuBLAS"
    if family != "qwen2_vl":
        assert (64, 64) in widths  # down_proj or linear_fc2, from 54 columns
