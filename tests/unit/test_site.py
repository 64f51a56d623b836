# SPDX-License-Identifier: Apache-2.0
"""The site has every page, and each of its links leads to a page or to GitHub."""

import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import site_hook  # noqa: E402

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
BLOB = f"{CONFIG['repo_url']}/blob/main"


def in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        yield from in_nav(part)


NAV = list(in_nav(CONFIG["nav"]))
FIGURES = [f"figures/{path.name}" for path in (ROOT / "docs/figures").iterdir()]
by_page = pytest.mark.parametrize("page", NAV)


def text_of(page: str) -> str:
    return (ROOT / site_hook.source_of(page)).read_text()


def test_every_page_is_in_the_menu_once() -> None:
    docs = ROOT / "docs"
    own = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert sorted(NAV) == sorted([*own, *site_hook.PAGES.values()])


@by_page
def test_every_link_leads_to_the_site_or_to_github(page: str) -> None:
    text = text_of(page)
    turned = site_hook.linked(text, page, [*NAV, *FIGURES], BLOB)
    assert turned.count("](") == text.count("](")
    for link in re.findall(r"\]\(([^)\s]+)\)", turned):
        name = link.partition("#")[0]
        if name.startswith(f"{BLOB}/"):
            assert (ROOT / name.removeprefix(f"{BLOB}/")).is_file(), link
        elif name and not name.startswith("https://"):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
            assert target in (*NAV, *FIGURES), link


def test_links_are_those_of_the_site() -> None:
    def turned(text: str, page: str) -> str:
        return site_hook.linked(text, page, [*NAV, *FIGURES], BLOB)

    assert turned("[a](docs/fp8.md#scales)", "index.md") == "[a](fp8.md#scales)"
    assert turned("![a](docs/figures/host.svg)", "index.md") == (
        "![a](figures/host.svg)"
    )
    assert turned("[a](../patches.md)", "design/architecture.md") == (
        "[a](../patches.md)"
    )
    assert turned("[a](../benchmarks/README.md#cases)", "results.md") == (
        "[a](benchmarks.md#cases)"
    )
    assert turned("[a](../../CONTRIBUTING.md)", "design/architecture.md") == (
        "[a](../contributing.md)"
    )
    assert turned("[a](images/cat.jpg)", "examples.md") == (
        f"[a]({BLOB}/examples/images/cat.jpg)"
    )
    for other in ("[a](#b)", "[a](https://example.org/b.md)", "[a](mailto:b)"):
        assert turned(other, "index.md") == other


def test_the_site_is_that_of_the_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert CONFIG["repo_url"] == urls["Repository"]
    owner, name = CONFIG["repo_url"].split("/")[-2:]
    assert CONFIG["site_url"] == f"https://{owner}.github.io/{name}/"


@by_page
def test_lists_stand_apart(page: str) -> None:
    """MkDocs takes a list without an empty line before it for text."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        if re.match(r"(-|\d+\.) ", line):
            assert not before or re.match(r"(-|\d+\.|  +)", before), line


def test_names_of_the_python_page_exist() -> None:
    from importlib import import_module

    names = re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(import_module(module), attribute).__doc__, name
