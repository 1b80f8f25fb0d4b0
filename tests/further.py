"""Every function that a hook runs around takes an argument more than the engine's, as a later version's may.

With STATIC_HOOKS_CALLED=folder each process leaves a file there for every such function that it calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from itemset.serving import hooks

FURTHER = "of_a_later_version"
CALLED = "STATIC_HOOKS_CALLED"

_wrap = hooks.wrap


def wrap(target: str, around: Callable[..., Any], put: Any = None) -> None:
    """Do `hooks.wrap`, as if the engine's callers gave the function one argument more, which it must get."""

    folder = os.environ.get(CALLED)
    calls: list[None] = []

    def given(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if folder and not calls:
            calls.append(None)
            Path(folder, target).touch()

        def later(*args: Any, **kwargs: Any) -> Any:
            if FURTHER not in kwargs:
                raise TypeError(f"{target} has lost an argument on its way through our hook")
            del kwargs[FURTHER]
            return function(*args, **kwargs)

        return around(later, *args, **kwargs, **{FURTHER: target})

    _wrap(target, given, put)


if _wrap.__module__ == hooks.__name__:  # once, whoever asks for it
    hooks.wrap = wrap
