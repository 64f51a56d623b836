# SPDX-License-Identifier: Apache-2.0
"""What MkDocs needs to make a site of pages that are written for GitHub.

Pages outside of docs/ become pages of the site, too, with no copy of their text. Links
between pages lead to pages of the site; links to other files lead to GitHub.
"""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"

# Files of the repository, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
# A Markdown link to a file of the repository; other links have a scheme.
_LINK = re.compile(r"\]\((?![\w+.-]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    return _SOURCES.get(page, f"{DOCS}/{page}")


def linked(text: str, page: str, files: Iterable[str], blob: str) -> str:
    """Return a page's text with its links as the site needs them.

    Args:
        text: Markdown, with links as GitHub takes them.
        page: Its name in the site, which may be of a folder.
        files: The names of all files of the site.
        blob: Where GitHub shows the files of the repository.
    """
    known = {source_of(name): name for name in files}
    folder = posixpath.dirname(source_of(page))

    def link(match: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(folder, match[1]))
        anchor = match[2] or ""
        if source not in known:
            return f"]({blob}/{source}{anchor})"
        name = posixpath.relpath(known[source], posixpath.dirname(page) or ".")
        return f"]({name}{anchor})"

    return _LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of docs/ to the site."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn a page's links to those of the site."""
    names = [file.src_uri for file in files if file.inclusion.is_included()]
    blob = f"{config.repo_url.rstrip('/')}/blob/main"
    return linked(markdown, page.file.src_uri, names, blob)
