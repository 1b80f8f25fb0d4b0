"""Item sets from files of items, in place of index files: built as a server starts, and opened from a cache after that.

A source is a file that `itemset build` reads, with its options after a `?` (`films.csv?column=title&key=movie_id`), or
a table or a list in memory. Its index lies in a folder beside the private copies, under a hash of all that it is made
of: the next start finds it there.
"""

import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from itemset.building import sources
from itemset.cli import build as building
from itemset.cli import parse
from itemset.errors import ItemSetError
from itemset.published import POINTER
from itemset.serving.private_copies import folder_of
from itemset.storage import SourceFile, is_uri, locked
from itemset.text import fingerprint, load_tokenizer
from itemset.trie.file import FORMAT

KEPT_SECONDS = 30 * 24 * 3600  # that an index stays after a server was last started with it
_WORDS = ("column", "key", "attribute", "prefix", "escape")  # options of `itemset build`
_ITEMS = ("item", "title", "name", "label", "text", "semantic_id", "semantic_ids", "sid", "token_ids", "tokens", "url")
_KEY = re.compile(r"(.*_)?(id|key|sku|asin|isbn)|.*[a-z]Id")


def with_indexes(options: Mapping[str, Any], tokenizer: str) -> dict[str, Any]:
    """Return the plugin's options with an index file in place of each source, built unless it is in the cache.

    tokenizer: the folder or Hugging Face name of the model's. Raises ItemSetError as `itemset build` does: an unknown
    option, a column that is not there, a bad item.
    """
    given = options.get("item_sets")
    cache = options.get("item_set_cache")
    if isinstance(given, Mapping):
        return {**options, "item_sets": {name: _index_of(name, one, tokenizer, cache) for name, one in given.items()}}
    if not isinstance(given, Sequence) or isinstance(given, str):
        return dict(options)
    pairs = [str(entry).partition("=") for entry in given]
    indexes = [f"{name}{mark}{_index_of(name, source, tokenizer, cache)}" for name, mark, source in pairs]
    return {**options, "item_sets": indexes}


def _index_of(name: str, source: Any, tokenizer: str, cache: str | None) -> Any:
    """Return the index of a source, and what is none as it is: `StaticConfig` judges it."""
    given = os.fspath(source) if isinstance(source, os.PathLike) else source
    if given in ("", None) if isinstance(given, str | None) else isinstance(given, bool | int | float | bytes):
        return source
    folder = folder_of(cache) / "built"
    folder.mkdir(mode=0o700, exist_ok=True)
    if isinstance(given, str):
        parsed = _parsed(name, given)
        return source if parsed is None else _built(name, *parsed, tokenizer, folder)
    with tempfile.NamedTemporaryFile(suffix=".parquet", dir=folder) as table:
        pa_parquet.write_table(_table(name, given), table.name)
        return _built(name, table.name, {}, tokenizer, folder)


def _table(name: str, given: Any) -> pa.Table:
    try:
        is_table = isinstance(given, Mapping) or hasattr(given, "columns") or hasattr(given, "__arrow_c_stream__")
        return pa.table(given) if is_table else pa.table({"item": pa.array(list(given))})
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ItemSetError(
            f"the item set {name!r} must be a file, a table (pandas, polars, pyarrow) or a list of texts or token-id "
            f"lists, not {type(given).__name__}: {error}"
        ) from error


def _parsed(name: str, given: str) -> tuple[str, dict[str, list[str]]] | None:
    """Return the path of a source and its options, None if it is an index or a published set."""
    path, mark, query = given.rpartition("?")
    words = parse_qs(query, keep_blank_values=True)
    foreign = (
        not words or any(word not in _WORDS for word in words) or not {*words.get("escape", ())} <= {"json", "text"}
    )
    if not mark or os.path.exists(given) or (foreign and is_uri(given)):  # a web address has options of its own
        path, words, foreign = given, {}, False
    if foreign:
        raise ItemSetError(
            f"{given} has options other than {', '.join(_WORDS)}: write {name}={path}?column=NAME&key=NAME"
        )
    path = os.path.expanduser(path)
    kind = Path(path).suffix.lower()
    if not words and os.path.isdir(path) and not os.path.exists(os.path.join(path, POINTER)):
        with suppress(ItemSetError):  # an empty folder: it may become a published set
            kind = sources.files_of(path)[0].suffix
    return (path, words) if words or kind in sources.SUFFIXES else None


def _built(name: str, path: str, words: dict[str, list[str]], tokenizer: str, folder: Path) -> str:
    """Return the index of a file, from the cache if it is there."""
    files = sources.files_of(path)
    names = sources.columns_of(files[0])
    chosen = dict(words)
    if names:
        _choose(name, path, names, chosen)
    loaded = load_tokenizer(tokenizer)
    digest = hashlib.sha256(repr([FORMAT, sorted(chosen.items()), fingerprint(loaded), names]).encode())
    for file in files:
        digest.update(_content(file))
    index = folder / f"{digest.hexdigest()[:32]}.itemset"
    with locked(folder / "lock", mode=0o600):
        if index.exists():
            os.utime(index)
            return str(index)
        for old in folder.glob("*.itemset"):
            if time.time() - old.stat().st_mtime > KEPT_SECONDS:
                old.unlink()
        given = [f"--{option}={value}" for option, values in chosen.items() for value in values]
        say(f"item set {name!r}: building an index of {path} ({' '.join(given) or 'its items'})")
        others = [other for other in names if not any(other in values for values in chosen.values())]
        if others and "attribute" not in words:
            say(f"columns that requests filter by: {name}={path}?attribute={others[0]} (it has {', '.join(others)})")
        start = time.monotonic()
        args = parse(["build", path, *given, "--tokenizer", tokenizer, "-o", str(index)])
        made = building.write_index(args, index)
        say(f"item set {name!r}: {len(made):,} items in {time.monotonic() - start:.1f} s, for the next start {index}")
    return str(index)


def _choose(name: str, path: str, names: list[str], chosen: dict[str, list[str]]) -> None:
    """Add the columns of the items and of the keys, by their names, if they are not given."""
    taken = {column for option in ("column", "key", "attribute") for column in chosen.get(option, ())}
    free = [column for column in names if column not in taken]
    if "column" not in chosen:
        known = [column for word in _ITEMS for column in free if column.lower() == word]
        others = [column for column in free if not _KEY.fullmatch(column)]
        single = [some[0] for some in (others, free) if len(some) == 1]
        if not known and not single:
            there = ", ".join(map(repr, names))
            raise ItemSetError(f"{path} has the columns {there}: say which has the items, {name}={path}?column=NAME")
        chosen["column"] = (known or single)[:1]
        free.remove(chosen["column"][0])
    keys = [column for column in free if _KEY.fullmatch(column)]
    if "key" not in chosen and keys:
        chosen["key"] = keys[:1]


def _content(file: SourceFile) -> bytes:
    """Return a hash of what is in a file; of one that is elsewhere, what its system says of it, if it says when."""
    if file.system is not None and file.changed is not None:
        return repr((file.name, file.size, file.changed)).encode()
    digest = hashlib.sha256(file.suffix.encode())
    with file.open() as stream:
        while piece := stream.read(1 << 23):
            digest.update(piece)
    return digest.digest()


def say(line: str) -> None:
    """Print a line of the start: no engine's log is set up yet."""
    print(f"static-backend: {line}", file=sys.stderr, flush=True)
