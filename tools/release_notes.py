# SPDX-License-Identifier: Apache-2.0
"""Prints what CHANGELOG says of the version that a tag releases.

    python tools/release_notes.py v0.1.0

It fails if the tag is not of the version of the package, or if CHANGELOG has no dated
section for it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import vllm_flashinfer_vit  # noqa: E402


def section(changelog: str, version: str) -> str:
    """Return the text of a version's section, without its heading.

    Raises:
        SystemExit: There is none, or it has no date.
    """
    head = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    found = re.search(rf"{head}(.*?)(?=^## |^\[|\Z)", changelog, re.M | re.S)
    if not found:
        raise SystemExit(f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'")
    return found[1].strip()


def main() -> None:
    """Compare the tag with the version, and print the section."""
    tag, version = sys.argv[1], vllm_flashinfer_vit.__version__
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and the version of the package {version}")
    print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))


if __name__ == "__main__":
    main()
