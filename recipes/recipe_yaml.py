"""The YAML that recipes are written in: safe, YAML 1.2 scalars, no duplicate keys, `${VAR}` from the environment.

PyYAML follows YAML 1.1, in which `1e-6` is a text and `yes` a boolean. Loader and dumper here share one set of scalar
forms, so that what is dumped is read back as the same value.

Does not know what a recipe may contain: see `recipe_keys`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

VARIABLE = re.compile(r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
"""`${NAME}`, `${NAME:-default}`, and `$${` for a literal `${`."""

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


MAX_DEPTH = 40
MAX_VALUES = 100_000
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels, or an anchor that holds itself; a recipe needs neither"


class RecipeYamlError(Exception):
    """The text is not acceptable YAML; the message has the line where one is known."""


def expand_variables(text: str, *, where: str) -> str:
    """Put environment variables in. Raises RecipeYamlError naming a variable that is not set."""

    def value_of(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "${"
        value = os.environ.get(match["name"])
        if match["default"] is not None:
            return value or match["default"]
        if value is None:
            raise RecipeYamlError(
                f"{where}: the environment variable {match['name']} is not set; set it, or write "
                f"${{{match['name']}:-default}}"
            )
        return value

    return VARIABLE.sub(value_of, text)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute; 1.2 forms are added below)
    origin = "recipe"
    has_lines = True

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        """A text, or what a plain `${VAR}` stands for: `seed: ${SEED}` is a number, `"${SEED}"` a text."""
        text = expand_variables(node.value, where=self.place(node))
        if node.style is None and text and text != node.value:
            tag = self.resolve(yaml.ScalarNode, text, (True, False))
            if tag != node.tag:
                return self.construct_object(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark))
        return text

    def place(self, node: yaml.Node) -> str:
        return f"{self.origin}, line {node.start_mark.line + 1}" if self.has_lines else self.origin

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """YAML 1.2: `010` is ten (PyYAML reads it as octal), `0x10` sixteen."""
        return int(node.value, 16 if node.value.startswith("0x") else 10)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                first = f" (first in line {lines[key.value]})" if self.has_lines else ""
                raise RecipeYamlError(f"{self.place(key)}: the key '{key.value}' is given twice{first}; keep one")
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (as above)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        breaks = set(text) & set("\r\x85\u2028\u2029\ufeff")  # PyYAML would fold these in a plain text
        style = '"' if breaks else None
        return self.represent_scalar("tag:yaml.org,2002:str", text.replace("${", "$${"), style=style)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)
_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, *, origin: str) -> Any:
    """The value that `text` stands for; `origin` names it in errors. Raises RecipeYamlError."""
    loader: _Loader | None = None
    has_lines = "\n" in text
    try:
        loader = _Loader(text)
        loader.origin, loader.has_lines = origin, has_lines
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark and has_lines else ""
        raise RecipeYamlError(f"{origin}{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else ord(error.character)
        place = f", line {text.count(chr(10), 0, error.position) + 1}" if has_lines else ""
        raise RecipeYamlError(
            f"{origin}{place}: not valid YAML: the character U+{code:04X} may not stand in it"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeYamlError(f"{origin}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise RecipeYamlError(f"{origin}: {_TOO_DEEP}") from error
    except ValueError as error:
        raise RecipeYamlError(f"{origin}: not valid YAML: {error}") from error
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # from PyYAML: `!!bool maybe`
        raise RecipeYamlError(f"{origin}: not valid YAML: a value does not fit its `!!` tag ({error})") from error
    finally:
        if loader is not None:
            loader.dispose()
    _check_size(value, origin)
    return value


def _check_size(value: Any, origin: str) -> None:
    """Raises RecipeYamlError for data too deep or too large to be a recipe, as aliases make it out of a short text."""
    pending, num_values = [(value, 0)], 0
    while pending:
        part, depth = pending.pop()
        num_values += 1
        if depth > MAX_DEPTH:
            raise RecipeYamlError(f"{origin}: {_TOO_DEEP}")
        if num_values > MAX_VALUES:
            raise RecipeYamlError(f"{origin}: more than {MAX_VALUES} values, aliases written out; a recipe is smaller")
        inner = [*part.keys(), *part.values()] if isinstance(part, dict) else part
        if isinstance(inner, (list, tuple, set)):
            pending.extend((item, depth + 1) for item in inner)


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML that `parse_yaml` reads back as equal data, whatever the environment; keys keep their order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
