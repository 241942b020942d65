"""Where settings come from, and one sentence about each that cannot be used.

Reads YAML files and ``--set`` overrides into plain mappings, and turns what pydantic finds wrong into words that name
the source, the field, its value and what is allowed. Knows nothing of what the settings mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elastic_refit.errors import ConfigError

__all__ = ["apply_override", "describe", "read_mapping"]

_VALUE_SHOWN = 80


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but ``1e-5`` is a number and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path) -> dict[str, Any]:
    """The settings in the YAML file at ``path``.

    Raises:
        ConfigError: it cannot be read, is not YAML, is empty, or is not a mapping.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as failure:
        raise ConfigError(f"{path}: cannot be read: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path}: is not UTF-8 text: {failure.reason} at byte {failure.start}") from None
    except yaml.YAMLError as failure:
        raise ConfigError(f"{path}: {_place(failure)}{_problem(failure)}") from None
    if data is None:
        raise ConfigError(f"{path}: is empty; it must hold at least one setting")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, not a {type(data).__name__}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value in ``data``; ``override`` is ``section.field=value`` with a YAML value.

    Raises:
        ConfigError: it has another form, or leads through something that is not a section.
    """
    dotted, equals, text = override.partition("=")
    *sections, name = dotted.strip().split(".")
    if not equals or not all((*sections, name)):
        raise ConfigError(f"--set {override}: must have the form section.field=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as failure:
        raise ConfigError(f"--set {override}: the value is not YAML: {_problem(failure)}") from None
    inner = data
    for section in sections:
        if inner.get(section) is None:
            inner[section] = {}
        inner = inner[section]
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {section} is {_shown(inner)}, not a section with settings")
    inner[name] = value


def describe(
    failure: ValidationError, model: type[BaseModel], *, path: str | Path | None, overrides: Sequence[str]
) -> str:
    """One sentence about the first thing that is wrong, and how many more there are."""
    first, *others = failure.errors(include_url=False)
    dotted = ".".join(str(part) for part in first["loc"])
    source = _source(dotted, path, overrides, of_section=first["type"] == "value_error")
    more = f" (and {len(others)} more)" if others else ""
    return f"{source}: {_complaint(first, dotted, model)}{more}"


def _complaint(error: ErrorDetails, dotted: str, model: type[BaseModel]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return _unknown(dotted, model)
        case "missing":
            return f"{dotted} is required"
        case "value_error":
            why = error.get("ctx", {}).get("error")
            return f"{dotted}: {why}" if dotted else str(why)
        case "invalid_key":
            return f"{dotted} is a setting's name and must be text"
        case "model_type" | "dict_type":
            return f"{dotted} is {_shown(error['input'])}; it must be a mapping of settings"
        case _:
            return f"{dotted} is {_shown(error['input'])}; it {error['msg'].replace('Input should', 'must')}"


def _unknown(dotted: str, model: type[BaseModel]) -> str:
    section, _, name = dotted.rpartition(".")
    everywhere = list(_settings(model))
    here = [each for each in everywhere if each.rpartition(".")[0] == section]
    elsewhere = [each for each in everywhere if each.rpartition(".")[2] == name]
    near = elsewhere or get_close_matches(dotted, here, n=1)
    known = f"the nearest is {near[0]}" if near else f"there are {', '.join(here)}"
    return f"there is no setting {dotted}; {known}"


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted name, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, f"{prefix}{name}.")


def _source(dotted: str, path: str | Path | None, overrides: Sequence[str], *, of_section: bool) -> str:
    """Who gave the value; for a rule about a whole section, everybody who gave a part of it."""
    file = "the defaults" if path is None else str(path)
    for override in reversed(overrides):
        key = override.partition("=")[0].strip()
        if f"{dotted}.".startswith(f"{key}."):
            return f"--set {override}"
        if of_section and (not dotted or key.startswith(f"{dotted}.")):
            return f"{file} with --set {override}"
    return file


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}..."


def _place(failure: yaml.YAMLError) -> str:
    mark = getattr(failure, "problem_mark", None)
    return f"line {mark.line + 1}: " if mark else ""


def _problem(failure: yaml.YAMLError) -> str:
    return getattr(failure, "problem", None) or " ".join(str(failure).split())
