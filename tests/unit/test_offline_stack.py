# SPDX-License-Identifier: Apache-2.0
"""What `tools/offline_stack.py` carries to a host without a network."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import offline_stack  # noqa: E402


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
