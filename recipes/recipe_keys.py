"""What a recipe may say, read off the config tree: unknown keys with the nearest valid name, and values in words.

Everything here walks pydantic models; none of it is specific to one setting. Suggestions look among the siblings first
(a typo), then for the same last name anywhere in the tree (a right key in a wrong section).
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    tuple: "a list",
}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model below a key, where the key is a section."""
    for part in _parts(field.annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def is_free_mapping(field: FieldInfo) -> bool:
    """The key takes a mapping with any keys (keyword arguments, say)."""
    return any((get_origin(part) or part) is dict for part in _parts(field.annotation))


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every valid full key path, sections included, in the order of the tree."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_of(field)
        if section is not None:
            yield from all_keys(section, f"{prefix}{name}.")


def section_at(path: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """The model at a key path (`""` is the root), or None where there is no such section."""
    section: type[BaseModel] | None = root
    for name in path.split(".") if path else ():
        field = section.model_fields.get(name) if section else None
        section = section_of(field) if field else None
    return section


def nearest_key(path: str, root: type[BaseModel]) -> str | None:
    """The valid full key path that was probably meant, or None."""
    parent, _, leaf = path.rpartition(".")
    leaf = leaf.replace("-", "_").lower()
    section = section_at(parent, root)
    keys = list(all_keys(root))
    if section is None:  # the section itself is misspelt
        close = difflib.get_close_matches(path.replace("-", "_").lower(), keys, n=1, cutoff=0.8)
        if close:
            return close[0]
    siblings = list(section.model_fields) if section else []
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return f"{parent}.{close[0]}" if parent else close[0]
    leaves = list(dict.fromkeys(key.rpartition(".")[2] for key in keys))
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    # The one nearest to the root: a section's own setting rather than one of its parts.
    return min((key for key in keys if key.rpartition(".")[2] in close), key=lambda key: key.count("."), default=None)


def unknown_key(path: str, root: type[BaseModel]) -> str:
    """The sentence for one unknown key."""
    if path in set(all_keys(root)):  # a YAML file with `a.b: 1` at its top level
        return f"{path}: dotted keys are for the command line; in a file write the last name below its section"
    near = nearest_key(path, root)
    if near:
        return f"{path}: unknown key; did you mean {near}?"
    parent = path.rpartition(".")[0]
    section = section_at(parent, root) or root
    return f"{path}: unknown key; the keys of {parent or 'a recipe'} are {', '.join(section.model_fields)}"


def key_problems(data: Mapping[Any, Any], model: type[BaseModel], root: type[BaseModel], prefix: str = "") -> list[str]:
    """One sentence for each key that the tree does not have, and for each boolean where a number or text is due."""
    problems: list[str] = []
    for key, value in data.items():
        path = f"{prefix}{key}"
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            problems.append(unknown_key(path, root))
            continue
        section = section_of(field)
        if section is not None and isinstance(value, Mapping):
            problems += key_problems(value, section, root, f"{path}.")
        elif section is None and isinstance(value, bool) and not {bool, Any} & set(_parts(field.annotation)):
            problems.append(f"{path} = {show(value)}: must be {allowed(field)}")
    return problems


def show(value: Any) -> str:
    """A value as the recipe would write it."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def allowed(field: FieldInfo) -> str:
    """In words, what a key takes: `a number > 0 and < 1, or null`."""
    section = section_of(field)
    if section is not None:
        return f"a section with some of the keys {', '.join(section.model_fields)}"
    kinds = []
    for part in _parts(field.annotation):
        if get_origin(part) is Literal:
            choices = [show(choice).strip("'") for choice in get_args(part)]
            kinds.append(choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
        elif part is type(None):
            kinds.append("null")
        else:
            kinds.append(_KINDS.get(get_origin(part) or part, str(part)))
    bounds = []
    for rule in field.metadata:
        bounds += [f"{sign} {getattr(rule, name)}" for name, sign in _BOUNDS if getattr(rule, name, None) is not None]
    if bounds:
        kinds[0] += " " + " and ".join(bounds)
    return ", or ".join(kinds)


def field_at(location: tuple[int | str, ...], root: type[BaseModel]) -> FieldInfo | None:
    """The field that a pydantic error location points at."""
    section: type[BaseModel] | None = root
    field = None
    for name in location:
        found = section.model_fields.get(name) if section and isinstance(name, str) else None
        if found is None:
            return field  # inside a free mapping or a list
        field, section = found, section_of(found)
    return field


def value_problems(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Pydantic's errors as one sentence each: full key path, value, what is allowed."""
    problems: list[str] = []
    for item in error.errors(include_url=False):
        location = item["loc"]
        field = field_at(location, root)
        path = ".".join(str(part) for part in location)
        if item["type"] == "value_error":
            own = str(item.get("ctx", {}).get("error", item["msg"]))
            sentence = f"{path}: {own}" if path and path not in own else own
        elif field is None:
            sentence = f"{path}: {item['msg']}" if path else item["msg"]
        elif item["type"] == "missing":
            sentence = f"{path}: required, and not given; must be {allowed(field)}"
        else:
            quote = "; quote it to make it text" if item["type"] == "string_type" else ""
            kind = allowed(field)
            if item["type"] == "finite_number":
                kind = kind.replace("a number", "a finite number", 1)
            sentence = f"{path} = {show(item['input'])}: must be {kind}{quote}"
        if sentence not in problems:
            problems.append(sentence)
    return problems
