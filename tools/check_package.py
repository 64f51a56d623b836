# SPDX-License-Identifier: Apache-2.0
"""Checks the wheel and the sdist of a folder: what they hold, and that both install.

    python tools/check_package.py dist

`make package` builds them and runs it. Nothing is installed beside the package, so
vLLM is not needed: what is checked works without it.
"""

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_flashinfer_vit"

# Run in a new environment, outside of the repository.
SMOKE = """
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path
import vllm_flashinfer_vit
there = Path(vllm_flashinfer_vit.__file__)
assert there.is_relative_to(sys.prefix), there
package = distribution("vllm-flashinfer-vit")
assert package.version == vllm_flashinfer_vit.__version__, package.version
(plugin,) = entry_points(group="vllm.general_plugins", name="flashinfer_vit")
assert plugin.load() is vllm_flashinfer_vit.register
(script,) = entry_points(group="console_scripts", name="vllm-flashinfer-vit")
assert Path(sys.executable).with_name(script.name).exists()
"""


def tracked() -> set[str]:
    """Return the files that git knows, as paths from the root."""
    told = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(told.stdout.splitlines())


def differences(name: str, found: set[str], wanted: set[str]) -> list[str]:
    """Return a line for each file that is too many in an archive, or missing."""
    return [
        *(f"{name} lacks {file}" for file in sorted(wanted - found)),
        *(f"{name} holds {file}" for file in sorted(found - wanted)),
    ]


def wheel_problems(names: set[str], known: set[str]) -> list[str]:
    """Return what is wrong with a wheel's files: it holds the package, and no more."""
    found = {name for name in names if ".dist-info/" not in name}
    prefix = f"src/{PACKAGE}/"
    wanted = {f.removeprefix("src/") for f in known if f.startswith(prefix)}
    return differences("the wheel", found, wanted)


def sdist_problems(names: set[str], known: set[str]) -> list[str]:
    """Return what is wrong with an sdist's files: it holds what git holds."""
    found = {name.partition("/")[2] for name in names} - {"PKG-INFO"}
    return differences("the sdist", found, known)


def readme_problems(text: str) -> list[str]:
    """Return the links of a README that lead nowhere on a package index."""
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [
        f"README on the index links to {link}"
        for link in links
        if not link.startswith(("https://", "#"))
    ]


def install(archive: Path) -> None:
    """Install an archive alone in a new environment, and run the smoke test there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(archive)]
        subprocess.run(pip, check=True, cwd=folder)
        subprocess.run([python, "-c", SMOKE], check=True, cwd=folder)
    print(f"{archive.name} installs, and the smoke test passes")


def main() -> None:
    """Check both archives of a folder.

    Raises:
        SystemExit: Something is wrong: a line for each.
    """
    dist = Path(sys.argv[1]).resolve()
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    known = tracked()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        problems = wheel_problems(set(names), known)
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        readme = email.message_from_bytes(archive.read(metadata)).get_payload()
    problems += readme_problems(str(readme))
    with tarfile.open(sdist) as archive:
        files = {member.name for member in archive if member.isfile()}
    problems += sdist_problems(files, known)
    if problems:
        raise SystemExit("\n".join(problems))
    print("wheel and sdist hold what they should")
    for archive_path in (wheel, sdist):
        install(archive_path)


if __name__ == "__main__":
    main()
