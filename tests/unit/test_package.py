# SPDX-License-Identifier: Apache-2.0
"""What is published: metadata, README on a package index, CHANGELOG, archives."""

import re
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import vllm_flashinfer_vit
from vllm_flashinfer_vit.machine.versions import TESTED_VLLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_package  # noqa: E402
import release_notes  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def index_readme() -> str:
    """Return README as the build's hook writes it for the index."""
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    (fragment,) = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text()
    for one in hook["substitutions"]:
        text, count = re.subn(one["pattern"], one["replacement"], text)
        assert count, f"{one['pattern']} is not in README"
    return text.replace("$HFPR_VERSION", vllm_flashinfer_vit.__version__)


def test_every_address_of_the_repository_is_the_same() -> None:
    hosts = ("https://github.com/", "https://raw.githubusercontent.com/")
    name = REPOSITORY.removeprefix(hosts[0])
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md")]
    files += (path for path in (ROOT / ".github").rglob("*") if path.is_file())
    for path in files:
        for link in re.findall(r"https://[^\s)\"'>`]+", path.read_text()):
            if link.startswith(hosts) and link.count(PROJECT["name"]):
                assert re.match(rf"https://[^/]+/{name}(?:/|$)", link), (path, link)


def test_classifiers_name_the_pythons_that_are_allowed() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    minors = {f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed}
    shown = {
        text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text
    }
    assert shown == minors
    pythons = re.search(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert pythons and set(pythons[1].split()) == minors


def test_the_version_stands_in_one_place() -> None:
    assert {"version", "readme"} <= set(PROJECT["dynamic"])
    path = PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{vllm_flashinfer_vit.__version__}"' in (
        (ROOT / path).read_text()
    )


def test_links_of_the_index_readme_lead_to_files_of_the_tag() -> None:
    text = index_readme()
    tag = f"v{vllm_flashinfer_vit.__version__}"
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    own = 0
    for image, link in links:
        start = f"{raw}/{tag}/" if image else f"{REPOSITORY}/blob/{tag}/"
        assert link.startswith("https://"), link
        if REPOSITORY.removeprefix("https://github.com/") in link:
            assert link.startswith(start), link
            name = link.removeprefix(start).partition("#")[0]
            assert (ROOT / name).is_file(), link
            own += 1
    assert own == len(
        re.findall(r"\]\((?!https:)[^)]+\)", (ROOT / "README.md").read_text())
    )
    assert check_package.readme_problems(text) == []


def test_the_index_readme_installs_from_the_index() -> None:
    text = index_readme()
    assert f"\npip install {PROJECT['name']}\n" in text
    assert "pip install ." not in text
    assert "pip install .\n" in (ROOT / "README.md").read_text()


def sections(changelog: str) -> dict[str, str]:
    """Return a CHANGELOG's sections by their headings.

    Raises:
        ValueError: It has not the form of Keep a Changelog.
    """
    heads = re.findall(r"^## (.+)$", changelog, re.M)
    texts = re.split(r"^## .+$", changelog, flags=re.M)[1:]
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions = []
    for at, (head, text) in enumerate(zip(heads, texts, strict=True)):
        if head != "[Unreleased]" or at > 0:
            found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", head)
            if not found:
                raise ValueError(f"neither version and date, nor [Unreleased]: {head}")
            date.fromisoformat(found[2])
            versions.append(Version(found[1]))
        name = head.partition("]")[0]
        if not re.search(rf"^{re.escape(name)}\]: https://\S+$", changelog, re.M):
            raise ValueError(f"no address of {name}]")
        parts = re.findall(r"^### (.+)$", text, re.M)
        if [kind for kind in kinds if kind in parts] != parts:
            raise ValueError(f"other parts, or in another order: {parts}")
    if not heads or versions != sorted(set(versions), reverse=True):
        raise ValueError(f"versions from new to old: {heads}")
    return dict(zip(heads, texts, strict=True))


def test_changelog_has_the_form_and_the_version() -> None:
    found = sections(CHANGELOG)
    head, text = next(iter(found.items()))
    version = vllm_flashinfer_vit.__version__
    assert head == "[Unreleased]" or head.startswith(f"[{version}] - ")
    oldest, newest = TESTED_VLLM
    assert f"\nFor vLLM {oldest} and newer, tested with {oldest} and {newest}." in text


RELEASED = """# Changelog

## [0.2.0] - 2030-02-28

### Added

- Two.

## [0.1.0] - 2030-01-31

### Fixed

- One.

[0.2.0]: https://example.org/0.2.0
[0.1.0]: https://example.org/0.1.0
"""


def test_a_changelog_of_another_form_is_noticed() -> None:
    assert list(sections(RELEASED)) == ["[0.2.0] - 2030-02-28", "[0.1.0] - 2030-01-31"]
    for old, new in (
        ("2030-02-28", "2030-02-30"),
        (" - 2030-01-31", ""),
        ("[0.2.0] -", "[0.0.2] -"),
        ("### Fixed", "### Mended"),
        ("[0.1.0]: ", "0.1.0: "),
    ):
        assert old in RELEASED
        with pytest.raises(ValueError):
            sections(RELEASED.replace(old, new))


def test_release_notes_are_the_section_of_the_version() -> None:
    assert release_notes.section(RELEASED, "0.2.0") == "### Added\n\n- Two."
    assert release_notes.section(RELEASED, "0.1.0") == "### Fixed\n\n- One."
    with pytest.raises(SystemExit, match=r"\[0.1\] - YYYY"):
        release_notes.section(RELEASED, "0.1")


def test_a_tag_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release_notes.py", "v0.0.0"])
    with pytest.raises(SystemExit, match="the tag is v0.0.0"):
        release_notes.main()


def test_a_file_too_many_or_missing_in_an_archive_is_named() -> None:
    known = {"README.md", "src/vllm_flashinfer_vit/py.typed", "tests/test_a.py"}
    info = "vllm_flashinfer_vit-1.dist-info/METADATA"
    good = {info, "vllm_flashinfer_vit/py.typed"}
    assert check_package.wheel_problems(good, known) == []
    assert check_package.wheel_problems({info, "tests/test_a.py"}, known) == [
        "the wheel lacks vllm_flashinfer_vit/py.typed",
        "the wheel holds tests/test_a.py",
    ]
    sdist = {f"vllm_flashinfer_vit-1/{name}" for name in (*known, "PKG-INFO")}
    assert check_package.sdist_problems(sdist, known) == []
    cache = "tests/__pycache__/test_a.pyc"
    assert check_package.sdist_problems(
        (sdist | {f"vllm_flashinfer_vit-1/{cache}"})
        - {"vllm_flashinfer_vit-1/README.md"},
        known,
    ) == ["the sdist lacks README.md", f"the sdist holds {cache}"]
    assert check_package.readme_problems("[a](docs/a.md) [b](#b)") == [
        "README on the index links to docs/a.md"
    ]


def test_everything_in_the_sdist_list_is_there() -> None:
    for name in PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]:
        assert (ROOT / name).exists(), name
