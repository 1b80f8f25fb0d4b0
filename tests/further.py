"""Every function that a hook runs around takes an argument more than the engine's, as a later version's may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from itemset.serving import hooks

FURTHER = "of_a_later_version"

_wrap = hooks.wrap


def wrap(target: str, around: Callable[..., Any], put: Any = None) -> None:
    """Do `hooks.wrap`, as if the engine's callers gave the function one argument more, which it must get."""

    def given(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def later(*args: Any, **kwargs: Any) -> Any:
            if FURTHER not in kwargs:
                raise TypeError(f"{target} has lost an argument on its way through our hook")
            del kwargs[FURTHER]
            return function(*args, **kwargs)

        return around(later, *args, **kwargs, **{FURTHER: target})

    _wrap(target, given, put)


if _wrap.__module__ == hooks.__name__:  # once, whoever asks for it
    hooks.wrap = wrap
