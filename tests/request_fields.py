"""The fields of an engine's own requests, which no check of ours may take for a misspelled word."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil

from pydantic import BaseModel


def fields_of(package: str) -> set[str]:
    """The names and aliases of the fields of all request classes, by their names, in a package's protocol modules."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] not in ("protocol", "io_struct"):
            continue
        with contextlib.suppress(ImportError):
            for value in vars(importlib.import_module(module.name)).values():
                if not isinstance(value, type) or "Req" not in value.__name__:
                    continue
                if issubclass(value, BaseModel):
                    found |= value.model_fields.keys()
                    found |= {field.alias for field in value.model_fields.values() if field.alias}
                elif dataclasses.is_dataclass(value):
                    found |= {field.name for field in dataclasses.fields(value)}
    return found
