# SPDX-License-Identifier: Apache-2.0
"""What `tools/offline_stack.py` carries to a host without a network."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import device_code  # noqa: E402
import offline_stack  # noqa: E402

PTX, MACHINE_CODE = 1, 2


def install(site: Path, name: str, *paths: str) -> None:
    """Put a distribution into a folder, with files that hold their own paths."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    for path in (*paths, f"{info}/METADATA", f"{info}/RECORD"):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(path)
    (site / info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    record = "".join(f"{path},,\n" for path in (*paths, f"{info}/METADATA"))
    (site / info / "RECORD").write_text(record)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    install(folder, "torch", "torch/__init__.py", "torch/bin/torch_shm_manager")
    install(folder, "some-headers", "torch/include/a.h", "torch/lib/a.a")
    install(folder, "nvidia-cublas", "nvidia/cu13/lib/libcublas.so.13")
    install(folder, "nvidia-cudnn-cu13", "nvidia/cudnn/lib/libcudnn.so.9")
    install(folder, "Z3_Solver", "z3/__init__.py")
    install(folder, "numpy", "numpy/__init__.py")
    return folder


def test_what_the_host_lacks_travels(site: Path) -> None:
    found = set(offline_stack.files(site, on_host=["NumPy"]))
    assert {name for name in found if ".dist-info" not in name} == {
        "torch/__init__.py",
        "torch/bin/torch_shm_manager",
        "nvidia/cudnn/lib/libcudnn.so.9",
    }
    # Entry points and versions are read from there.
    assert "torch-1.0.dist-info/METADATA" in found
    assert "numpy-1.0.dist-info/METADATA" not in found


def test_parts_unpack_into_a_folder_that_quack_takes_as_installed(
    site: Path, tmp_path: Path
) -> None:
    out, stack = tmp_path / "out", tmp_path / "stack"
    stack.mkdir()
    parts = offline_stack.pack(site, out, 1, ["numpy"])
    assert parts == sorted(out.iterdir())
    unpack = f"cat {out}/part.* | tar xJf - -C {stack}"
    subprocess.run(["bash", "-c", unpack], check=True)
    unpacked = stack / "site-packages"
    assert (unpacked / "torch" / "__init__.py").read_text() == "torch/__init__.py"
    assert not (unpacked / "numpy").exists()


def test_a_pack_that_fails_says_so(site: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        offline_stack.pack(site, tmp_path / "out", 0, [])


def test_carried_libraries_come_before_the_hosts(site: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    stack = site.parent
    found = offline_stack.environment(stack, host)
    first, *_, last = found["LD_LIBRARY_PATH"].split(":")
    assert first.startswith(str(stack))
    assert last == str(host / "nvidia" / "cu13" / "lib")
    assert found["PYTHONPATH"].split(":")[:2] == [str(ROOT / "src"), str(site)]


def container(*entries: tuple[int, int]) -> bytes:
    """Return device code as nvcc stores it, of kinds and compute capabilities."""
    body = b""
    for kind, gpu in entries:
        text = f"code of {kind} for {gpu}".encode().ljust(32)
        body += struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(text), gpu) + text
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def kept(library: Path) -> list[tuple[int, int]]:
    """Return the kinds and compute capabilities of code that a library still has."""
    data = library.read_bytes()
    known = [(k, g) for k in (PTX, MACHINE_CODE) for g in (75, 80, 86, 90, 100)]
    return [(k, g) for k, g in known if f"code of {k} for {g}".encode() in data]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (90, [(PTX, 80), (MACHINE_CODE, 90)]),
        # Machine code runs on GPUs of a higher minor capability, too.
        (89, [(MACHINE_CODE, 80), (MACHINE_CODE, 86)]),
        (120, [(PTX, 80), (PTX, 90)]),
    ],
)
def test_code_of_other_gpus_is_emptied(
    gpu: int, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    library = tmp_path / "lib.so"
    containers = (
        container((MACHINE_CODE, 80), (MACHINE_CODE, 90), (PTX, 90)),
        container((MACHINE_CODE, 86), (PTX, 80)),
        container((MACHINE_CODE, 100)),
    )
    data = b"ELF" + b"between".join(containers) + b"end"
    library.write_bytes(data)
    assert device_code.keep_only(library, gpu) == 32 * (6 - len(expected))
    assert sorted(kept(library)) == sorted(expected)
    # Sizes and headers stay, by which the driver finds its way.
    assert len(library.read_bytes()) == len(data)
    assert library.read_bytes().count(b"between") == 2
    assert device_code.keep_only(library, gpu) == 32 * (6 - len(expected))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no device code",
        container((MACHINE_CODE, 80))[:-8],
        container((MACHINE_CODE, 80))[:12],
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 40) + bytes(40),
    ],
)
def test_what_does_not_add_up_stays_as_it_is(data: bytes, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(data)
    assert device_code.keep_only(library, 90) == 0
    assert library.read_bytes() == data


def test_the_code_of_one_gpu_travels(site: Path, tmp_path: Path) -> None:
    code = container((MACHINE_CODE, 80), (MACHINE_CODE, 90))
    install(site, "vllm", "vllm/_C.abi3.so", "vllm/plain.so")
    (site / "vllm" / "_C.abi3.so").write_bytes(code)
    out, stack = tmp_path / "out", tmp_path / "stack"
    stack.mkdir()
    parts = offline_stack.pack(site, out, 1, [], gpu=90)
    assert parts == sorted(out.iterdir())
    unpack = f"cat {out}/part.* | tar xJf - -C {stack}"
    subprocess.run(["bash", "-c", unpack], check=True)
    unpacked = stack / "site-packages"
    assert kept(unpacked / "vllm" / "_C.abi3.so") == [(MACHINE_CODE, 90)]
    assert (unpacked / "vllm" / "plain.so").read_text() == "vllm/plain.so"
    assert (unpacked / "torch" / "__init__.py").exists()
    # What is installed stays as it was.
    assert (site / "vllm" / "_C.abi3.so").read_bytes() == code
