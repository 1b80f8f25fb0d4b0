"""What the user configures, the same in every engine: the registered item sets and the limits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from itemset.errors import ItemSetError

BACKEND = "static"
REFERENCE = "item_set"
"""Key under which a request carries the name of a registered set; in the engine also an inline set's reference."""
INDEX = "item_set_index"
"""Key under which it carries an inline set's index file towards the engine."""

INLINE_ITEM_LIMIT = 100_000
INLINE_TEXT_LIMIT = 10_000_000  # characters
RANKED_LIST_LIMIT = 1_000
RANKED_LIST_PASSES = 10_000
INLINE_MEMORY = 64 << 20  # bytes of device memory for inline sets
PATHS = ("auto", "device", "host")
KERNELS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class StaticConfig:
    """The plugin's options: `additional_config` in vLLM, flags or arguments of the engine in SGLang.

    item_sets: file of each registered set by name. inline_item_limit: items an inline set may have.
    inline_text_limit: characters that all items of an inline set may have together.
    item_set_path: where masks are computed; "auto" takes the device wherever it can.
    inline_set_memory: bytes of each device for inline sets, beside what the registered ones take.
    item_set_kernels: "auto" takes Triton on an accelerator and torch on a CPU.
    ranked_list_limit: beams that a request for a ranked list may ask for.
    ranked_list_passes: forward passes after which the proof of an exact list ends, and that max_passes may ask for.
    forced_drafts: whether n-gram speculation proposes, for requests with a set, what the set forces.
    item_set_cache: folder of the copies that are served (`held`); the user's cache folder where None.
    item_set_versions: version of each registered set by name. Internal: the process that starts an engine sets it.
    """

    item_sets: Mapping[str, str] = field(default_factory=dict)
    inline_item_limit: int = INLINE_ITEM_LIMIT
    inline_text_limit: int = INLINE_TEXT_LIMIT
    item_set_path: str = "auto"
    inline_set_memory: int = INLINE_MEMORY
    item_set_kernels: str = "auto"
    ranked_list_limit: int = RANKED_LIST_LIMIT
    ranked_list_passes: int = RANKED_LIST_PASSES
    forced_drafts: bool = True
    item_set_cache: str | None = None
    item_set_versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> StaticConfig:
        """From ``{"item_sets": {NAME: FILE} or ["NAME=FILE"], "inline_item_limit": N, ...}``; other keys are not ours.

        Raises ItemSetError: a name given twice or empty, or a value of another form.
        """
        options = given if isinstance(given, Mapping) else {}
        ours = [option.name for option in fields(cls)]
        for key in options:
            if str(key).startswith(("item_set", "inline_", "ranked_", "forced_")) and key not in ours:
                raise ItemSetError(f"there is no option {key!r}: the plugin's options are {', '.join(ours)}")
        return cls(
            _by_name(options.get("item_sets", {})),
            _number(options, "inline_item_limit", INLINE_ITEM_LIMIT, "items"),
            _number(options, "inline_text_limit", INLINE_TEXT_LIMIT, "characters"),
            _one_of(options, "item_set_path", PATHS),
            _number(options, "inline_set_memory", INLINE_MEMORY, "bytes"),
            _one_of(options, "item_set_kernels", KERNELS),
            _number(options, "ranked_list_limit", RANKED_LIST_LIMIT, "beams"),
            _number(options, "ranked_list_passes", RANKED_LIST_PASSES, "forward passes"),
            bool(options.get("forced_drafts", True)),
            _folder(options),
            dict(options.get("item_set_versions", {})),
        )


def _number(options: Mapping[str, Any], key: str, default: int, unit: str) -> int:
    value = options.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ItemSetError(f"{key} must be a number of {unit}, not {value!r}")
    return value


def _folder(options: Mapping[str, Any]) -> str | None:
    value = options.get("item_set_cache")
    if value is not None and not (isinstance(value, str) and value):
        raise ItemSetError(f"item_set_cache must be the path of a folder, not {value!r}")
    return value


def _one_of(options: Mapping[str, Any], key: str, values: tuple[str, ...]) -> str:
    value = options.get(key, values[0])
    if value not in values:
        raise ItemSetError(f"{key} must be one of {', '.join(values)}, not {value!r}")
    return str(value)


def _by_name(item_sets: Any) -> dict[str, str]:
    pairs: list[tuple[Any, ...]]
    if isinstance(item_sets, Mapping):
        pairs = list(item_sets.items())
    elif isinstance(item_sets, Sequence) and not isinstance(item_sets, str):
        pairs = [tuple(str(entry).split("=", 1)) for entry in item_sets]
    else:
        pairs = [()]
    named: dict[str, str] = {}
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ItemSetError(
                'item_sets must be {"NAME": "FILE"} or ["NAME=FILE"], such as --item-set films=films.itemset; '
                f"got {item_sets!r:.200}"
            )
        name, path = pair
        if name in named:
            raise ItemSetError(f"the item set {name!r} is given twice ({named[name]} and {path}): rename one")
        if ":" in name:
            raise ItemSetError(f"the name of the item set {name!r} holds a colon: choose one without")
        named[name] = path
    return named


def add_flags(parser: argparse.ArgumentParser, *, device_where: str, alias_of: str) -> None:
    """The command-line flags that every plugin brings.

    device_where: in which case masks are computed on the device by default. alias_of: the engine's own flag that
    chooses the backend.
    """
    group = parser.add_argument_group("static-backend", "Structured output over finite item sets.")
    group.add_argument(
        "--item-set",
        nargs="+",
        action="extend",
        metavar="NAME=FILE",
        help="Register the item sets in these files (see `itemset build`) under their names, for the request field "
        "item_set.",
    )
    group.add_argument(
        "--item-set-path",
        choices=PATHS,
        help="Where the masks of item sets are computed: on the device, inside the sampler, or on the host. Default: "
        f"on the device {device_where}.",
    )
    group.add_argument(
        "--guided-decoding-backend", choices=[BACKEND], help=f"Another name of {alias_of}, for this backend."
    )


def with_sets(options: Mapping[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options with more sets, each "NAME=FILE"."""
    given = options.get("item_sets", [])
    listed = [f"{name}={path}" for name, path in given.items()] if isinstance(given, Mapping) else list(given)
    return {**options, "item_sets": [*listed, *named]}
