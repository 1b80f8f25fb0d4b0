"""What the user configures, the same in every engine: registered sets, limits, flags; and the errors of the start."""

import argparse
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from msgspec import Meta

from itemset import published
from itemset.errors import ItemSetError, ItemSetWarning
from itemset.masking import Kernels
from itemset.storage import is_uri

BACKEND = "static"
Paths = Literal["auto", "device", "host"]
Switch = Literal["auto", "on", "off"]
_Path = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=0)]
_Rows = Annotated[int, Meta(ge=1)]
FLAGS = ("item_set_path", "item_set_dir", "item_set_models")  # the flags that are options by the same name
_SET = "--item-set films=films.itemset"


@dataclass(frozen=True)
class Words:
    """An engine's own terms, for messages to its users."""

    context: str  # the limit of prompt and output together
    context_flag: str
    min_tokens: str  # a request's limit of its output
    options: str  # where the plugin's options stand

    def option(self, name: str) -> str:
        """Return how to set an option that is a number."""
        return f'{{"{name}": N}} in {self.options}'


@dataclass(frozen=True)
class ModelLimits:
    vocab_size: int  # their token ids are below
    context: int  # tokens of prompt and output together
    reserved: int  # of these, what the engine keeps
    end_tokens: Collection[int]  # at which the model ends an answer


class StaticConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin's options: `additional_config` in vLLM, flags or arguments of the engine in SGLang.

    docs/serving.md says what each is. item_set_versions is internal: that of each set, as chosen at the start.
    """

    item_sets: dict[str, str] = {}
    item_set_dir: Annotated[_Path | None, Meta(description="the path of a folder")] = None
    item_set_refresh_seconds: Annotated[float, Meta(ge=0.01, description="a number of seconds from 0.01")] = 1.0
    item_set_headroom: Annotated[_Count | None, Meta(description="a number of bytes")] = None
    item_key_limit: Annotated[int, Meta(ge=0, description="a whole number of keys")] = 10_000
    inline_item_limit: Annotated[int, Meta(ge=0, description="a whole number of items")] = 100_000
    inline_text_limit: Annotated[int, Meta(ge=0, description="a whole number of characters")] = 10_000_000
    inline_enum_size: Annotated[int, Meta(ge=0, description="a whole number of texts")] = 100
    item_set_token_healing: Annotated[bool, Meta(description="true or false")] = True
    item_set_models: Annotated[bool, Meta(description="true or false")] = False
    item_set_path: Annotated[Paths, Meta(description="one of auto, device, host")] = "auto"
    inline_set_memory: Annotated[int, Meta(ge=0, description="a whole number of bytes")] = 64 << 20
    inline_set_host_memory: Annotated[int, Meta(ge=0, description="a whole number of bytes")] = 256 << 20
    item_set_kernels: Annotated[Kernels, Meta(description="one of auto, numba, triton")] = "auto"
    ranked_list_limit: Annotated[int, Meta(ge=0, description="a whole number of beams")] = 1_000
    ranked_list_passes: Annotated[int, Meta(ge=0, description="a whole number of forward passes")] = 10_000
    ranked_list_beams: Annotated[_Count | None, Meta(description="a whole number of beams")] = None
    max_list_rows_per_step: Annotated[_Rows | None, Meta(description="a whole number of rows from 1")] = None
    item_set_list_graphs: Annotated[Switch, Meta(description="one of auto, on, off")] = "auto"
    item_set_narrow_head: Annotated[Switch, Meta(description="one of auto, on, off")] = "auto"
    item_set_child_sampling: Annotated[Switch, Meta(description="one of auto, on, off")] = "auto"
    item_set_head_memory: Annotated[int, Meta(ge=0, description="a whole number of bytes")] = 256 << 20
    item_set_draft_head: Annotated[_Path | None, Meta(description="the path of a file")] = None
    forced_drafts: Annotated[bool, Meta(description="true or false")] = True
    item_set_cache: Annotated[_Path | None, Meta(description="the path of a folder")] = None
    item_set_audit_log: Annotated[_Path | None, Meta(description="the path of a folder")] = None
    item_set_versions: Annotated[dict[str, str] | None, Meta(description="versions by name")] = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """From ``{"item_sets": {NAME: FILE} or ["NAME=FILE"], "inline_item_limit": N, ...}``; other keys are not ours.

        Raises ItemSetError: a name given twice or empty, or a value of another form.
        """
        options = given if isinstance(given, Mapping) else {}
        ours = {option.name: option.type for option in msgspec.structs.fields(cls)}
        for key in options:
            if str(key).startswith(("item_", "inline_", "ranked_", "max_list_", "forced_")) and key not in ours:
                raise ItemSetError(f"there is no option {key!r}: the plugin's options are {', '.join(ours)}")
        values = {key: options[key] for key in ours if key in options}
        values["item_sets"] = _by_name(values.get("item_sets", {}))
        for key, value in values.items():
            try:
                msgspec.convert(value, ours[key])
            except msgspec.ValidationError as error:
                what = get_args(ours[key])[1].description
                raise ItemSetError(f"{key} must be {what}, not {value!r:.200}") from error
        return cls(**values)

    def where(self, name: str) -> Path | str:
        """Return the file of a set or its URI, or the folder of a published one."""
        given = self.item_sets.get(name) or Path(self.item_set_dir or "", name)
        return str(given) if is_uri(given) else Path(given).expanduser()

    def at_start(self) -> dict[str, tuple[str | None, Path | str]]:
        """Return the version and the file of each set that a process begins with; None for the file's own version.

        A bad pointer in `item_set_dir` omits its set (`left_out`); others raise ItemSetError, as `published.current`.
        """
        versions, in_folder = self.item_set_versions, set[str]()
        if versions is not None:
            in_folder = {*versions}
        elif self.item_set_dir is not None:
            in_folder = published.sets_in(self.item_set_dir)
        sets: dict[str, tuple[str | None, Path | str]] = {}
        for name in (*self.item_sets, *sorted(in_folder - self.item_sets.keys())):
            path, version = self.where(name), versions[name] if versions is not None else None
            if os.path.isdir(path) or (version is not None and name not in self.item_sets):
                try:
                    version = version or published.current(path).name
                except ItemSetError as error:
                    self.left_out(name, ItemSetError(f"the item set {name!r} cannot be opened: {error}"))
                    continue
                path = published.file_of(path, version)
            sets[name] = version, path
        return sets

    def why_on_host(self, reason: str | None) -> str | None:
        """Return why masks are made on the host; None on the device path. reason: what keeps the engine from that path.

        Raises ItemSetError if the options insist on it.
        """
        if self.item_set_path == "device" and reason is not None:
            raise ItemSetError(f"item_set_path is device, but {reason}: leave item_set_path out for the host path")
        return "as configured" if self.item_set_path == "host" else reason

    def left_out(self, name: str, error: ItemSetError) -> None:
        """Warn that a set of `item_set_dir` is not served, and why: it is tried again. Raises the error for others."""
        if name in self.item_sets:
            raise error
        warnings.warn(f"{error}. Other sets are served, and this one once that is mended", ItemSetWarning, stacklevel=3)


def _by_name(given: Any) -> dict[str, str]:
    pairs: list[tuple[Any, ...]] = [()]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [tuple(str(entry).split("=", 1)) for entry in given]
    named: dict[str, str] = {}
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ItemSetError(
                f'item_sets must be {{"NAME": "FILE"}} or ["NAME=FILE"], such as {_SET}; got {given!r:.200}'
            )
        name, value = pair
        if name in named:
            raise ItemSetError(f"the item set {name!r} is given twice ({named[name]} and {value}): rename one")
        if ":" in name:
            raise ItemSetError(f"the name of the item set {name!r} holds a colon: choose one without")
        named[name] = value
    return named


def add_flags(parser: argparse.ArgumentParser, *, device_where: str, alias_of: str) -> None:
    """Add the flags that every plugin brings.

    device_where: when masks are made on the device by default. alias_of: the engine's own flag for its backend.
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
        "--item-set-models",
        action="store_true",
        default=None,
        help="Let a request name a set after its model, as MODEL:SET, for gateways that pass on no item_set.",
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


def from_environment(variable: str) -> dict[str, Any]:
    """Return the plugin's options, JSON in an environment variable. Raises ItemSetError if it is no JSON object."""
    text = os.environ.get(variable) or "{}"
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError):
        message = f'{variable} must be a JSON object such as {{"item_sets": {{...}}}}, not {text!r:.100}'
        raise ItemSetError(message) from None


def with_named(options: Mapping[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Return the options with more sets in `item_sets`, each "NAME=FILE"."""
    given = options.get("item_sets", [])
    listed = [f"{name}={value}" for name, value in given.items()] if isinstance(given, Mapping) else list(given)
    return {**options, "item_sets": [*listed, *named]}


_from_flags: list[bool] = []


@contextmanager
def start_up(*, from_flags: bool = False) -> Iterator[None]:
    """Run the plugin's code at the start. In a process that was started with an engine's flags, as `from_flags` says
    once, a ValueError, as ItemSetError, ends it without a traceback, which would bury its sentence."""
    if from_flags:
        _from_flags[:] = [True]
    try:
        yield
    except ValueError as error:
        if not _from_flags:
            raise
        raise SystemExit(f"static-backend: {error}") from None
