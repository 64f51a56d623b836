# SPDX-License-Identifier: Apache-2.0
"""The check of real engines: what they are given, and how they are judged."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from _benchmarks import ENVIRONMENT
from safetensors.torch import save_file

import engine_check
import engine_models
import engines
from chosen_rows import read
from csv_log import CsvLog
from environment import ENVIRONMENT_COLUMNS
from failures import Failures


def test_pixels_are_the_same_values_in_every_dtype():
    def drawn(dtype):
        weight = torch.empty(8, 3, 2, 4, dtype=dtype)
        patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=weight))
        visual = SimpleNamespace(patch_embed=patch_embed)
        return engines.random_pixels(visual, 64, torch.Generator().manual_seed(0))

    pixels = drawn(torch.float32)
    assert pixels.shape == (64, 24)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(drawn(dtype), pixels.to(dtype))


def fake_model(visual):
    model = torch.nn.Module()
    model.visual = visual
    model.language_model = torch.nn.Linear(2, 2)
    model.get_language_model = lambda: model.language_model
    return model


def quantised_layer(inputs, outputs, **sizes):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(
        torch.zeros(inputs, outputs).to(torch.float8_e4m3fn), requires_grad=False
    )
    layer.weight_scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    vars(layer).update(sizes)
    engines.fill_tower(fake_model(torch.nn.ModuleDict({"qkv": layer})))
    return layer


def test_engines_fill_quantised_layers_alike():
    first, second = (quantised_layer(64, 192) for _ in range(2))
    values = first.weight.float() * first.weight_scale
    assert values.std() == pytest.approx(0.04, rel=0.05)
    assert first.weight.float().abs().max() == 448
    assert torch.equal(values, second.weight.float() * second.weight_scale)


def test_engines_leave_the_padding_of_quantised_layers():
    """A layer whose activation its GEMM applies would hand it to the next one."""
    sizes = {"input_size_per_partition": 60, "output_size_per_partition": 184}
    weight = quantised_layer(64, 192, **sizes).weight.float()
    assert not weight[60:].any() and not weight[:, 184:].any()
    assert (weight[:60, :184] != 0).float().mean() > 0.9


def engine_row(**changes):
    return {
        "config": "eager",
        "model": "Qwen/Qwen2.5-VL-7B-Instruct",
        "answered_image": 1,
        "answered_video": 1,
        "answered_multi": 1,
        "rel_err": "1.50e-02",
        "attention_share": "8.00e-01",
        "layer_class": "FlashInferViTAttention",
        "compiled_modules": 0,
        "vllm": "0.25.1",
        **changes,
    }


def graphs(**changes):
    good = {"graph_hits": 1, "graph_rel_err": "2.00e-02", "graph_bitwise": 0}
    return {"config": "graphs", **good, **changes}


def test_a_good_engine_is_not_faulted():
    assert engine_check.judge(engine_row()) == []
    assert engine_check.judge(engine_row(**graphs())) == []
    compiled = engine_row(
        config="compile_mm_encoder", compiled_modules=34, attention_share=""
    )
    assert engine_check.judge(compiled) == []
    for model, vllm in (("Qwen3-VL-8B", "0.27.1"), ("Qwen2-VL-7B", "0.33.0")):
        row = engine_row(config="compile_mm_encoder", model=model, vllm=vllm)
        assert engine_check.judge(row) == []


def test_a_model_that_is_asked_no_video_is_not_faulted_for_it():
    assert "video" not in engine_models.prompts("google/gemma-3-4b-it")
    row = engine_row(model="google/gemma-3-4b-it", answered_video="")
    assert engine_check.judge(row) == []
    assert engine_check.judge(row | {"answered_multi": ""})


def test_only_the_first_inputs_are_recorded():
    model = fake_model(torch.nn.Identity())
    model.embed_multimodal = lambda pixel_values: (pixel_values,)
    with pytest.raises(RuntimeError, match="no image"):
        engine_models.embed(model)
    engine_models.record_inputs(model)
    for value in (1.0, 2.0):
        model.embed_multimodal(pixel_values=torch.full((2, 3), value))
    assert torch.equal(engine_models.embed(model), torch.ones(2, 3))


def test_projections_to_q_k_and_v_are_wider():
    layer = {name: torch.nn.Linear(64, 64) for name in ("q_proj", "out_proj")}
    tower = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict(layer)})
    engines.fill_tower(fake_model(tower))
    widths = {name: one.weight.std().item() for name, one in layer.items()}
    assert widths["q_proj"] == pytest.approx(0.04, rel=0.05)
    assert widths["out_proj"] == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"answered_video": 0}, "video"),
        ({"layer_class": "MMEncoderAttention"}, "MMEncoderAttention"),
        ({"rel_err": "9.00e-02"}, "differ"),
        ({"rel_err": "nan"}, "differ"),
        ({"rel_err": ""}, "unknown"),
        ({"attention_share": "1.00e-06"}, "makes up only"),
        (graphs(graph_hits=0), "no graph served"),
        (graphs(graph_rel_err="nan"), "graphs differ"),
        (graphs(graph_rel_err="6.00e-02"), "graphs differ"),
        ({"config": "compile_mm_encoder"}, "compiled"),
        (
            {
                "config": "compile_mm_encoder",
                "model": "Qwen/Qwen3-VL-8B-Instruct",
                "vllm": "0.33.0",
            },
            "compiled",
        ),
    ],
)
def test_engine_faults_are_named(changes, fault):
    assert fault in "".join(engine_check.judge(engine_row(**changes)))


def test_compiled_engine_is_compared_with_eager_stock_once():
    configs = ["eager", "compile_mm_encoder", "graphs", "tp2"]
    jobs = engine_check.jobs_for(["m"], configs)
    assert [(job.config, job.provider) for job in jobs] == [
        ("eager", "stock-flash_attn"),
        ("eager", "plugin"),
        ("compile_mm_encoder", "plugin"),
        ("graphs", "plugin"),
        ("tp2", "stock-flash_attn"),
        ("tp2", "plugin"),
    ]


def test_nothing_is_compared_with_what_another_run_has_left(tmp_path, monkeypatch):
    ours, stocks = (
        engines.Job("m", "eager", name).stem for name in ("plugin", "stock-flash_attn")
    )
    save_file({"output": torch.ones(2)}, tmp_path / f"{stocks}.safetensors")

    def start(script, job, arguments, folder, timeout_s):
        if job.provider != "plugin":
            raise RuntimeError("exit status 1")
        save_file({"output": torch.ones(2)}, folder / f"{ours}.safetensors")
        facts = {*engine_check.COLUMNS} - {*ENVIRONMENT_COLUMNS, *asdict(job)}
        (folder / f"{ours}.json").write_text(json.dumps(dict.fromkeys(facts, "")))

    monkeypatch.setattr(engine_check, "start", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    log = CsvLog(tmp_path / "rows.csv", engine_check.COLUMNS)
    args = SimpleNamespace(models=["m"], configs=["eager"], jobs=1)
    failures = Failures()
    engine_check.check_all(args, tmp_path, log, failures, ENVIRONMENT)
    (row,) = read(log.path)
    assert (row["provider"], row["rel_err"]) == ("plugin", "")
    assert any("differ from stock's by unknown" in line for line in failures.lines)
