# SPDX-License-Identifier: Apache-2.0
"""Carries an installed stack to a GPU host that has no network.

The host needs the same release of Python and CUDA's libraries of the same major version
as wheels (`nvidia-cublas` and its kin); all else travels, in parts.

    python tools/offline_stack.py pack .venv-X out/stack --gpu 90
    # On the host, beside a copy of this repository and out/stack:
    mkdir stack; cat out/stack/part.* | tar xJf - -C stack
    eval "$(python3 tools/offline_stack.py env stack)"
    python3 benchmarks/bench_attention.py

FlashInfer's sources stay behind. With tensor parallelism vLLM would build its
all-reduce from them for a compiled language model, and end: such a server is started
with `--compilation-config.pass_config.fuse_allreduce_rms false`, and with all else that
its `--compilation-config` holds in this form, too, since one form replaces the other.
"""

import argparse
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

from device_code import keep_only

ROOT = Path(__file__).resolve().parent.parent
# QuACK 0.6 takes code as installed only in a folder of this name.
SITE = "site-packages"
# Where CuTe DSL has its packages, which a `.pth` file names where it is installed.
DSL = "nvidia_cutlass_dsl/dsl_packages"
# Libraries that another release on the host does not stand in for.
CARRIED_LIBRARIES = ("nvidia/cudnn/", "nvidia/nccl/")
# What no kernel, engine or server here loads on a GPU up to Hopper; by normalised name.
LEFT_OUT = frozenset(
    {
        *("flashinfer-cubin", "tokenspeed-triton", "tokenspeed-mla", "tilelang"),
        *("nvidia-cutlass-dsl-libs-cu12", "pynvvideocodec", "z3-solver"),
        *("fastsafetensors", "torchcodec", "mypy", "ruff", "grimp", "pip", "uv"),
        *("nccl4py", "nccl-extensions"),
    }
)
_LEFT_OUT_PATHS = (
    *("torch/include/", "torch/test/", "triton/_C/libproton", "ptxas-blackwell"),
    *("backends/nvidia/bin/cuobjdump", "backends/nvidia/bin/nvdisasm", "cupti"),
    *("flashinfer/data/", "vllm/vllm-rs", "_vllm_fa2_C", "deep_gemm/_C_extension"),
    *("fmha_sm100", "_flashmla_", "_flashkda_", "_qutlass_", "libcudnn_adv"),
    "mistral_common/data/",
)


def files(site: Path, on_host: Collection[str] = ()) -> Iterator[str]:
    """Yield what travels of a folder with installed packages, by path in it.

    Args:
        site: The folder.
        on_host: Distributions that the host has, in a version that will do.
    """
    absent = LEFT_OUT | {normalised(name) for name in on_host}
    for distribution in metadata.distributions(path=[str(site)]):
        if normalised(distribution.metadata["Name"]) in absent:
            continue
        for entry in distribution.files or ():
            path = entry.as_posix()
            if travels(path) and (site / path).is_file():
                yield path


def travels(path: str) -> bool:
    """Whether a file of a distribution is carried, by its path."""
    if path.startswith("../") or path.endswith((".pyc", ".a", ".pth")):
        return False
    if path.startswith("nvidia/") and not path.startswith(CARRIED_LIBRARIES):
        return False
    return not any(part in path for part in _LEFT_OUT_PATHS)


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


def pack(
    site: Path,
    out: Path,
    part_mib: int,
    on_host: Collection[str],
    gpu: int | None = None,
) -> list[Path]:
    """Write what travels as one compressed archive, in parts.

    Args:
        site: The folder with installed packages, `site-packages`.
        out: For the parts; made if it does not exist.
        part_mib: Size of a part.
        on_host: As for `files`.
        gpu: Compute capability times ten of the host's GPUs, whose code alone travels;
            None for all.

    Returns:
        The parts, in order.

    Raises:
        CalledProcessError: tar, xz or split has failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    # A file may belong to two distributions.
    names = dict.fromkeys(files(site, on_host))
    with tempfile.TemporaryDirectory(dir=out) as folder:
        copies = Path(folder, SITE)
        changed = set() if gpu is None else _with_code_of(gpu, site, names, copies)
        sources = []
        for source, kept in (
            (site, [name for name in names if name not in changed]),
            (copies, [name for name in names if name in changed]),
        ):
            listing = Path(folder, f"files{len(sources)}")
            lines = (f"{SITE}/{name}" for name in kept)
            listing.write_text("\n".join(lines), encoding="utf-8")
            where = shlex.quote(str(source.parent))
            sources.append(f"-C {where} -T {shlex.quote(str(listing))}")
        tar = f"tar cf - {' '.join(sources)}"
        split = f"split -b {part_mib}M -d - {shlex.quote(str(out / 'part.'))}"
        script = f"set -o pipefail; {tar} | xz -T0 -3 -c | {split}"
        subprocess.run(["bash", "-c", script], check=True)
    return sorted(out.glob("part.*"))


def _with_code_of(
    gpu: int, site: Path, names: Collection[str], copies: Path
) -> set[str]:
    """Copy libraries with code of other GPUs and empty that; return their names."""
    changed = set()
    for name in names:
        if ".so" not in Path(name).name:
            continue
        copy = copies / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(site / name, copy)
        if keep_only(copy, gpu):
            changed.add(name)
        else:
            copy.unlink()
    return changed


def environment(stack: Path, host: Path) -> dict[str, str]:
    """Return the variables with which the host's Python runs the stack.

    Args:
        stack: Where the parts were unpacked.
        host: The host's own folder with installed packages.
    """
    site = stack.resolve() / SITE
    libraries = [
        folder
        for where in (site, host)
        for folder in sorted(where.glob("nvidia/*/lib"))
    ]
    return {
        "PYTHONPATH": ":".join(map(str, (ROOT / "src", site, site / DSL))),
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "HF_HUB_OFFLINE": "1",
        # FlashInfer would compile it from sources that do not travel.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def main() -> None:
    """Pack a stack, or print the variables that it needs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the parts")
    packing.add_argument("venv", type=Path, help="a virtual environment")
    packing.add_argument("out", type=Path, help="folder for the parts")
    packing.add_argument("--part-mib", type=int, default=55)
    packing.add_argument(
        "--on-host", nargs="*", default=(), help="packages that the host has"
    )
    packing.add_argument(
        "--gpu", type=int, help="carry code for this GPU alone: 90 for an H100 or H200"
    )
    showing = commands.add_parser("env", help="print variables for a shell")
    showing.add_argument("stack", type=Path, help="where the parts were unpacked")
    args = parser.parse_args()
    if args.command == "env":
        host = Path(sysconfig.get_paths()["purelib"])
        for name, value in environment(args.stack, host).items():
            print(f"export {name}={shlex.quote(value)}")
        return
    (site,) = args.venv.resolve().glob(f"lib/python3.*/{SITE}")
    for part in pack(site, args.out, args.part_mib, args.on_host, args.gpu):
        print(f"{part} {part.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
