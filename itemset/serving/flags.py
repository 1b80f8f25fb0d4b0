"""The plugin's flags on a server's command line, the same in every engine."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from itemset.serving.config import BACKEND, Paths

OPTIONS = ("item_set_path", "item_set_dir")
"""The flags that are options by the same name."""
NAMED = {"item_set": "item_sets", "item_view": "item_views"}
"""The flags that register something by name, and the options that they add to."""


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
        "item_set. The folder of a published set (see `itemset publish`) is followed: new versions are served as they "
        "come.",
    )
    group.add_argument(
        "--item-set-dir",
        metavar="FOLDER",
        help="Register every published set in this folder under the name of its own folder, those to come too.",
    )
    group.add_argument(
        "--item-view",
        nargs="+",
        action="extend",
        metavar="NAME=SET:FILTER",
        help="Register what a filter leaves of a registered set, such as "
        """fresh='films: {"year": {"$gte": 2020}}', for the request field item_set.""",
    )
    group.add_argument(
        "--item-set-path",
        choices=get_args(Paths),
        help="Where the masks of item sets are computed: on the device, inside the sampler, or on the host. Default: "
        f"on the device {device_where}.",
    )
    group.add_argument(
        "--guided-decoding-backend", choices=[BACKEND], help=f"Another name of {alias_of}, for this backend."
    )


def with_named(options: Mapping[str, Any], option: str, named: Sequence[str]) -> dict[str, Any]:
    """The options with more sets in `item_sets`, each "NAME=FILE", or more views in `item_views`."""
    given = options.get(option, [])
    listed = [f"{name}={value}" for name, value in given.items()] if isinstance(given, Mapping) else list(given)
    return {**options, option: [*listed, *named]}
