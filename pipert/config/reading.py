"""Read a configuration from TOML and the command line, and say in one message all that is wrong with it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pipert.config.config import Config
from pipert.errors import ConfigError
from pipert.gpt_config import GPTConfig


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file.

    Args:
        path: the file.
        overrides: further settings from the command line, such as ``"parallel.pp=4"``; they win. Values are written as
            in TOML; quotes around a text may be left out.

    Raises:
        ConfigError: the file cannot be read, or something in it or in the overrides is unknown, missing, of the wrong
            type, out of range or does not fit the rest. All of it is named, each with its key.
    """
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return parse_config(settings, overrides, source=str(path))


def parse_config(settings: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Check settings, as read from TOML; see `load_config`.

    Args:
        settings: sections, each with its keys.
        overrides: further settings; they win.
        source: where the settings are from, for messages.
    """
    merged = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in settings.items()}
    for override in overrides:
        _override(merged, override)
    problems: list[str] = []
    sections: dict[str, Any] = {}
    for name in merged.keys() | _SCHEMAS.keys():
        if name not in _SCHEMAS:
            problems.append(f"{name}: unknown section{_nearest(name, _SCHEMAS)}")
            continue
        try:
            sections[name] = _SCHEMAS[name].model_validate(merged.get(name, {}))
        except ValidationError as error:
            problems += _explain(name, error)
    if not problems:
        try:
            return Config(**{**sections, "model": _shape(sections["model"])})
        except ConfigError as error:
            problems = str(error).splitlines()
    extra = f" with {' '.join(overrides)}" if overrides else ""
    raise ConfigError("\n  ".join([f"{source}{extra}:", *sorted(problems)]))


def _shape(section: BaseModel) -> GPTConfig:
    try:
        return GPTConfig(**section.model_dump())
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from error


def _model_schema() -> type[BaseModel]:
    """The section [model]: the fields of `GPTConfig`, which says itself what fits together."""
    hints = get_type_hints(GPTConfig)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(GPTConfig)
    }
    return create_model("ModelSection", __config__=ConfigDict(extra="forbid", strict=True), **fields)


_SCHEMAS: dict[str, type[BaseModel]] = {
    field.name: _model_schema() if field.name == "model" else get_type_hints(Config)[field.name]
    for field in dataclasses.fields(Config)
}


def _override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"{override!r} is not a setting; write section.key=value, such as parallel.pp=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    keys = settings.setdefault(section, {})
    if isinstance(keys, dict):
        keys[key] = value


def _explain(section: str, error: ValidationError) -> Iterator[str]:
    """Each fault of a section in one line that starts with the key."""
    known = _SCHEMAS[section].model_fields
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        place = f"{section}.{key}" if key else section
        match fault["type"]:
            case "extra_forbidden":
                yield f"{place}: unknown key{_nearest(key, known) or _elsewhere(key)}"
            case "missing":
                yield f"{place} is missing"
            case "model_type" | "model_attributes_type":
                yield f"{place} is {fault['input']!r}; it must be a section: [{place}]"
            case "tuple_type":
                yield f"{place} is {fault['input']!r}; it should be a list: [{fault['input']!r}]"
            case _:
                yield f"{place} is {fault['input']!r}; {fault['msg'].replace('Input', 'it', 1)}"


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _elsewhere(key: str) -> str:
    """The same key or one like it in another section, or the sections there are."""
    places = {name: f"{section}.{name}" for section, schema in _SCHEMAS.items() for name in schema.model_fields}
    near = get_close_matches(key, places, n=1)
    return f"; did you mean {places[near[0]]}?" if near else ""
