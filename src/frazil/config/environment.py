"""Environment variables over the TOML file: `FRAZIL_SECTION__KEY`.

In: the parsed file and the variables. Out: the same document, with the settings that variables
name, and the origin of each. A variable that names no setting raises `ConfigError`. A secret stays
out of the document: the setting refers to its variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from frazil.config import origins
from frazil.config.messages import within
from frazil.config.section_builder import check_section
from frazil.config.settings import SECRET, is_reference, settings_of
from frazil.errors import ConfigError


def overlay(
    document: dict[str, Any], environ: Mapping[str, str], locations: origins.Origins | None = None
) -> dict[str, Any]:
    """`FRAZIL_SINK__ID=a` sets `[sink] id`; `FRAZIL_KAFKA__BOOTSTRAP_SERVERS` a dotted key;
    `FRAZIL_TABLE__0__NAME` a field of the first table; `FRAZIL_SINK__TOPICS=a,b` a list."""
    for name in sorted(environ):
        if not name.startswith("FRAZIL_") or "__" not in name:
            continue
        section, *rest = name.removeprefix("FRAZIL_").lower().split("__")
        where: Any = document
        path = [section]
        several = section in ("table", "route")
        numbered = several and _NUMBER.fullmatch(rest[0])
        depth = 1 + bool(numbered) + (rest[0] == "registry")
        if len(rest) != depth or not isinstance(where.get(section, {}), (dict, list)):
            raise ConfigError(
                f"cannot read environment variable {name}: expected FRAZIL_SECTION__KEY"
            )
        where = where.setdefault(section, [] if several else {})
        if several:
            index = int(rest.pop(0)) if numbered else 0
            path.append(str(index))
            if isinstance(where, list):
                where = _numbered(name, index, where, environ)
        if not isinstance(where, dict):
            raise ConfigError(
                f"cannot read environment variable {name}: the file says [{section}] "
                f"is {where!r}; expected a table of keys"
            )
        if section == "decode" and rest[0] == "registry" and len(rest) > 1:
            where = where.setdefault(rest.pop(0), {})
            check_section("decode.registry", where)
            section = "registry"
            path.append(section)
        key = rest[0]
        if section in ("kafka", "catalog", "spark", "registry"):
            with within(*path):
                flat = settings_of(section, where)  # TOML nests unquoted dotted keys
            where.clear()
            where.update(flat)
            alike = [k for k in where if re.sub(r"[.\-]", "_", k).lower() == key]
            key = alike[0] if alike else key if key == "name" else key.replace("_", ".")
        lists = (
            "topics",
            "partition_by",
            "sort_by",
            "identifier_fields",
            "to",
            "values",
            "events",
            *(["key"] if section == "table" else []),
        )
        where[key] = _listed(name, environ[name]) if key in lists else environ[name]
        passed = section in ("kafka", "catalog", "spark", "registry")
        if passed and SECRET.search(key) and not is_reference(key, environ[name]):
            where[key] = f"env:{name}"  # a secret may be in the environment
        if locations is not None:
            locations[".".join((*path, key))] = f"environment variable {name}"
            locations.setdefault(path[0], f"environment variable {name}")
    return document


_NUMBER = re.compile(r"[0-9]{1,9}")


def _numbered(name: str, index: int, sections: list[Any], environ: Mapping[str, str]) -> Any:
    """The table or route number `index`. Variables may add sections without gaps, so the number is
    bounded by the count of variables, whatever number a variable names."""
    section = name.split("__")[0]
    known = len(sections) + sum(variable.startswith(f"{section}__") for variable in environ)
    if index >= known:
        raise ConfigError(
            f"cannot read environment variable {name}: there is no number {index}; "
            f"expected 0 to {known - 1}"
        )
    sections.extend({} for _ in range(len(sections), index + 1))
    return sections[index]


def _listed(name: str, text: str) -> list[str]:
    # commas inside parentheses belong to a transform: bucket(16, id)
    items = [item.strip() for item in re.split(r",(?![^(]*\))", text)] if text.strip() else []
    if "" in items:
        raise ConfigError(
            f"cannot read environment variable {name}: an item of the list is empty; "
            f"expected items with a comma between them, found {text!r}"
        )
    return items
