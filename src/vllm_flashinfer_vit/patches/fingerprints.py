# SPDX-License-Identifier: Apache-2.0
"""Which methods of vLLM were read, by their fingerprints: `fingerprints.json`.

`make fingerprints` writes the file.
"""

import functools
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_flashinfer_vit.machine.json_files import read_json
from vllm_flashinfer_vit.machine.versions import vllm_version
from vllm_flashinfer_vit.patches.source import fingerprint

FILE = Path(__file__).with_name("fingerprints.json")
SCHEMA = "vllm-flashinfer-vit/fingerprints/1"

# Whose wrappers may be around a method of vLLM: they are the same in each process.
_KNOWN_WRAPPERS = frozenset({"torch", __package__.partition(".")[0]})


@dataclass(frozen=True)
class Release:
    """A release of vLLM that was read.

    Attributes:
        libraries: Versions that it requires of the libraries that kernels run on, by
            package.
        left_out: Names of the patches that do not fit it.
    """

    libraries: Mapping[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Fingerprints:
    """What is known of vLLM's releases.

    Attributes:
        releases: By version, oldest first.
        methods: By `module:Class.method`: each fingerprint, with the versions that have
            it.
    """

    releases: Mapping[str, Release]
    methods: Mapping[str, Mapping[str, tuple[str, ...]]]

    def to_json(self) -> dict[str, Any]:
        """Return the file's document."""
        return {
            "schema": SCHEMA,
            "made_by": "make fingerprints",
            "releases": {name: asdict(one) for name, one in self.releases.items()},
            "methods": self.methods,
        }


@functools.cache
def known() -> Fingerprints:
    """Read the package's file."""
    document = read_json(FILE)
    return Fingerprints(
        releases={
            name: Release(one["libraries"], tuple(one["left_out"]))
            for name, one in document["releases"].items()
        },
        methods={
            method: {mark: tuple(versions) for mark, versions in marks.items()}
            for method, marks in document["methods"].items()
        },
    )


def left_out() -> frozenset[str]:
    """Return the patches that are not for this vLLM, if it is one that was read.

    A release candidate or a build of its own, as `0.31.0+cu129`, counts as its release.
    """
    try:
        found = Version(vllm_version()).release
    except InvalidVersion:
        # `check_vllm` refuses it, and says so.
        return frozenset()
    for name, release in known().releases.items():
        if Version(name).release == found:
            return frozenset(release.left_out)
    return frozenset()


def difference(method: str) -> str | None:
    """Say how a method differs from what was read, or None if it does not.

    Args:
        method: `module:Class.method`, or `module:function`; the module may be imported
            or not.
    """
    try:
        found = fingerprint(method)
    except LookupError as error:
        return str(error.args[0])
    marks = known().methods.get(method, {})
    if found not in marks:
        versions = [version for of_mark in marks.values() for version in of_mark]
        where = f"vLLM up to {versions[-1]}" if versions else "any vLLM"
        return f"{method} is not as it was read in {where}"
    return _wrapper(method)


def _wrapper(method: str) -> str | None:
    """Say what wraps or replaces a method in this process, if it is not vLLM's own."""
    module, _, path = method.partition(":")
    class_name, _, attribute = path.partition(".")
    if module not in sys.modules:
        return None
    owner: Any = sys.modules[module]
    if attribute:
        owner = getattr(owner, class_name, object)
    layer = vars(owner).get(attribute or class_name)
    if layer is None:
        return f"there is no {method} in this process"
    allowed = {*_KNOWN_WRAPPERS, *sys.stdlib_module_names, module.partition(".")[0]}
    while layer is not None:
        function = getattr(layer, "__func__", layer)
        layer = getattr(function, "__wrapped__", None)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home and layer is None:
            return f"{method} is no Python function here, so it cannot be compared"
        if home and home.partition(".")[0] not in allowed:
            return f"{method} is wrapped or replaced by {home}"
    return None
