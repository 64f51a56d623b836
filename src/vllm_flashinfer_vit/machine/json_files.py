# SPDX-License-Identifier: Apache-2.0
"""JSON files: what is read is checked, what is written has a line for each entry.

An error says in one line which entry is wrong, and why.
"""

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)

# Far above an index of weights, the longest of what is read. More is another kind of
# file, such as weights, and would fill the memory before it is found to be none.
_MAX_BYTES = 2**28
_CHUNK_BYTES = 2**20

# pydantic's names for what JSON has others for.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


class Strict(BaseModel):
    """A part of a document; a value of another type than it says is wrong."""

    model_config = ConfigDict(strict=True)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON, too large, or too deeply nested.
    """
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, too many for a JSON file")
    try:
        content = bytearray()
        with path.open("rb") as file:
            # One read of as much as the limit would allocate all of it for any file.
            while chunk := file.read(min(_CHUNK_BYTES, _MAX_BYTES + 1 - len(content))):
                content += chunk
                # A device or a pipe has no size to ask for.
                if len(content) > _MAX_BYTES:
                    raise ValueError(
                        f"it has over {_MAX_BYTES:,} bytes, too many for a JSON file"
                    )
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is too deeply nested") from None


def lined(document: Mapping[str, Any]) -> str:
    """Return a document's JSON text, a line for each entry of its members."""
    members = (f"  {json.dumps(k)}: {_block(v)}" for k, v in document.items())
    return "{\n" + ",\n".join(members) + "\n}\n"


def _block(member: Any) -> str:
    if isinstance(member, dict):
        brackets = "{}"
        entries = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in member.items()]
    elif isinstance(member, list):
        brackets, entries = "[]", [json.dumps(entry) for entry in member]
    else:
        return json.dumps(member)
    text = ",\n".join(f"    {entry}" for entry in entries)
    return f"{brackets[0]}\n{text}\n  {brackets[1]}" if text else brackets


def one_of(names: Collection[str]) -> AfterValidator:
    """Return what makes a field of text one of these names."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"known are {', '.join(names)}")
        return name

    return AfterValidator(check)


def validated(model: type[_Model], document: Any) -> _Model:
    """Check a document against a model.

    Raises:
        ValueError: The document does not follow it; the first wrong entry is named.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    entry = _entry(first["loc"])
    if first["type"] == "missing":
        raise ValueError(f"{entry} is missing")
    if first["type"] == "extra_forbidden":
        raise ValueError(f"{entry} is not known")
    found = f"{entry} is {reprlib.repr(first['input'])}"
    if (cause := first.get("ctx", {}).get("error")) is not None:
        raise ValueError(f"{found}: {cause}")
    if (wanted := _WANTED.get(first["type"])) is not None:
        raise ValueError(f"{found}, not {wanted}")
    if first["type"] == "literal_error":
        raise ValueError(f"{found}, not {first['ctx']['expected']}")
    raise ValueError(f"{found}: {first['msg']}")


def _entry(location: tuple[int | str, ...]) -> str:
    """Write a place as Python would: `layers['visual.blocks.0'].q`."""
    text = ""
    for part in location:
        if isinstance(part, str) and part.isidentifier():
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text or "the document"
