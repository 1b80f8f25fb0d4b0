"""The fields that an endpoint declares for its body. What it does not declare, a server drops."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Fields = Mapping[str, Any]
"""By name, what a field's type is."""


def of_route(scope: Mapping[str, Any], body: Any) -> Fields:
    """The fields of a request's body, by the route that FastAPI has found for it.

    A route that parses its body on its own, as /invocations does, declares none: it hands the body on to another, so
    those count whose required fields are there.
    """
    if (annotation := _annotation(scope.get("route"))) is not None:
        return of_type(annotation)
    each = [_annotation(route) for route in scope["app"].routes] if isinstance(body, dict) else []
    models = [model for annotation in each for model in _models(annotation) if issubclass(model, BaseModel)]
    return {
        name: inner for model in models if _required(model) <= body.keys() for name, inner in _fields(model).items()
    }


def _annotation(route: Any) -> Any:
    body = getattr(route, "body_field", None)
    return None if body is None else body.field_info.annotation


def of_type(annotation: Any) -> Fields:
    """The fields of objects of a type: of all of a union's; none if they are free, as a dict's are, or if they are
    several in a list."""
    return {name: inner for model in _models(annotation) for name, inner in _fields(model).items()}


def _models(annotation: Any) -> Iterator[type]:
    annotation = getattr(annotation, "__value__", annotation)  # of an alias
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        if issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation) or _is_struct(annotation):
            yield annotation
    elif typing.get_origin(annotation) not in (list, dict, tuple, set, typing.Literal):
        for one in typing.get_args(annotation):
            yield from _models(one)


def _is_struct(annotation: type) -> bool:
    return hasattr(annotation, "__struct_fields__")


def _required(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items() if field.is_required()}


@functools.lru_cache(1024)
def _fields(model: type) -> Fields:
    if issubclass(model, BaseModel):
        ends = model.__module__.startswith("xgrammar")  # a grammar, in which sets may stand, as in a dict
        return {field.alias or name: None if ends else field.annotation for name, field in model.model_fields.items()}
    types: Mapping[str, Any] = {}
    with contextlib.suppress(NameError):  # of names that only type checkers import
        types = typing.get_type_hints(model)
    names = getattr(model, "__struct_fields__", None) or [field.name for field in dataclasses.fields(model)]  # type: ignore[arg-type]
    return {name: types.get(name) for name in names}
