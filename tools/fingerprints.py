# SPDX-License-Identifier: Apache-2.0
"""Writes which methods of vLLM the patches were read with: `fingerprints.json`.

    python tools/fingerprints.py            # the releases in the file, once more
    python tools/fingerprints.py 0.34.0     # and another one

Read what changed in the methods before another release is added: a fingerprint in the
file says that the patches serve it.

Wheels come from the package index, one at a time. Their sources are kept, by version.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from vllm_flashinfer_vit.patches.fingerprints import (
    FILE,
    Fingerprints,
    Release,
    known,
)
from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.patches.source import fingerprint, parameters
from vllm_flashinfer_vit.plugin import all_patches

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "out" / "vllm"
# What kernels run on, of what vLLM requires.
LIBRARIES = ("torch", "flashinfer-python", "quack-kernels")


def unpacked(version: str, sources: Path) -> Path:
    """Return the folder with a release's Python files, which are fetched if need be.

    Raises:
        CalledProcessError: There is no wheel of it.
    """
    folder = sources / version
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary=:all:", "--dest", temporary, f"vllm=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            wanted = [n for n in names if n.endswith((".py", "/METADATA"))]
            # Beside its place, so that a folder that is there is whole.
            half = folder.with_name(f"{version}.unpacking")
            shutil.rmtree(half, ignore_errors=True)
            archive.extractall(half, wanted)
        half.rename(folder)
    return folder


def libraries(folder: Path) -> dict[str, str]:
    """Return which versions of `LIBRARIES` a release requires."""
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    headers = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
    required = map(Requirement, headers.get_all("Requires-Dist", ()))
    found = {r.name: str(r.specifier) for r in required if r.marker is None}
    return {name: found[name] for name in LIBRARIES if name in found}


def fits(patch: Patch, folder: Path) -> bool:
    """Whether a release has what a patch wraps and stands for."""
    try:
        found = parameters(patch.target, folder, patch.inherited_from)
        for method in patch.stands_for:
            fingerprint(method, folder)
    except LookupError:
        return False
    return found == patch.parameters


def read(folders: dict[str, Path], patches: Iterable[Patch]) -> Fingerprints:
    """Return what releases, by version, have of what the patches stand for."""
    patches = tuple(patches)
    methods: dict[str, dict[str, tuple[str, ...]]] = {}
    wanted = {m for patch in patches for m in (*patch.stands_for, *patch.helpers)}
    for method in sorted(wanted):
        marks: dict[str, tuple[str, ...]] = {}
        for version, folder in folders.items():
            try:
                mark = fingerprint(method, folder)
            except LookupError:
                continue
            marks[mark] = (*marks.get(mark, ()), version)
        methods[method] = marks
    releases = {
        version: Release(
            libraries(folder),
            tuple(patch.name for patch in patches if not fits(patch, folder)),
        )
        for version, folder in folders.items()
    }
    return Fingerprints(releases, methods)


def dumps(found: Fingerprints) -> str:
    """Write the document, each list on one line."""
    text = json.dumps(found.to_json(), indent=2)
    one_line = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
    return one_line.replace("[ ", "[").replace(" ]", "]") + "\n"


def main() -> None:
    """Write the file, and tell what is new in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="releases to add")
    args = parser.parse_args()
    before = known() if FILE.exists() else Fingerprints({}, {})
    versions = sorted({*before.releases, *args.versions}, key=Version)
    folders = {version: unpacked(version, SOURCES) for version in versions}
    found = read(folders, all_patches())
    FILE.write_text(dumps(found), encoding="utf-8")
    for method, marks in found.methods.items():
        for mark in marks.keys() - before.methods.get(method, {}).keys():
            print(f"new: {method} in vLLM {', '.join(marks[mark])}")
    for version, release in found.releases.items():
        if release.left_out:
            print(f"vLLM {version} leaves out: {', '.join(release.left_out)}")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
