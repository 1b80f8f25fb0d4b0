"""Item sets from files of items, in place of index files: built as a server starts, and opened from a cache after that.

A source is a file that `itemset build` reads, with its options after a `?` (`films.csv?column=title&key=movie_id`), or
a table or a list in memory. Its index lies beside the private copies, named by a hash of all that it is made of.
"""

import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, unquote_plus, urlencode

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from itemset.building import sources
from itemset.building.dialects import WORDS
from itemset.building.names import is_known
from itemset.building.readers import as_rows as rows_of
from itemset.building.streams import format_of, guarded
from itemset.cli import build as building
from itemset.cli import parse
from itemset.errors import ItemSetError
from itemset.published import POINTER
from itemset.serving.private_copies import folder_of_indexes
from itemset.storage import file_at, is_uri, locked
from itemset.text import decode, fingerprint
from itemset.trie.attributes import kind_of
from itemset.trie.file import FORMAT, MAGIC

KEPT_SECONDS = 30 * 24 * 3600  # that an index stays after a server was last started with it
_FLAGS = ("keys_repeat", "keep_text")  # =yes
_WORDS = ("column", "key", "attribute", "prefix", "escape", *WORDS, *_FLAGS)  # options of `itemset build`
RULES = 5  # of how files are judged: an index that others have made is built anew


def with_indexes(options: Mapping[str, Any], tokenizer: Callable[[], Any]) -> dict[str, Any]:
    """Return the plugin's options with an index file in place of each source, built unless it is in the cache.

    tokenizer: loads the model's as the engine does.
    Raises ItemSetError as `itemset build` does: an unknown option, a column that is not there, a bad item.
    """
    tokenizer = functools.cache(tokenizer)
    given = options.get("item_sets")
    cache = options.get("item_set_cache")
    if isinstance(given, Mapping):
        return {**options, "item_sets": {name: _index_of(name, one, tokenizer, cache) for name, one in given.items()}}
    if not isinstance(given, Sequence) or isinstance(given, str):
        return dict(options)
    pairs = [str(entry).partition("=") for entry in given]
    indexes = [f"{name}{mark}{_index_of(name, source, tokenizer, cache)}" for name, mark, source in pairs]
    return {**options, "item_sets": indexes}


def _index_of(name: str, source: Any, tokenizer: Callable[[], Any], cache: str | None) -> Any:
    """Return the index of a source, and what is none as it is: `StaticConfig` judges it."""
    given = os.fspath(source) if isinstance(source, os.PathLike) else source
    if given in ("", None) if isinstance(given, str | None) else isinstance(given, bool | int | float | bytes):
        return source
    folder = folder_of_indexes(cache)
    if isinstance(given, str):
        parsed = _parsed(name, given)
        return source if parsed is None else _built(name, *parsed, tokenizer, folder)
    words: dict[str, list[str]] = {}
    if isinstance(given, Mapping) and "data" in given and given.keys() <= {"data", "column", "key", "attributes"}:
        words = {"attribute": list(given["attributes"])} if given.get("attributes") else {}
        words |= {word: [given[word]] for word in ("column", "key") if word in given}
        given = given["data"]
    with tempfile.NamedTemporaryFile(suffix=".parquet", dir=folder) as table:
        pa_parquet.write_table(_table(name, given), table.name)
        try:
            return _built(name, table.name, words, tokenizer, folder)
        except ItemSetError as error:
            named = '{"data": ..., "column": NAME, "key": NAME, "attributes": [NAMES]}'
            message = str(error).replace(f", {name}={table.name}?column=NAME", "")
            message = message.replace(table.name, f"the item set {name!r}")
            raise ItemSetError(f"{message} (of a table or list say it so: {name!r}: {named})") from error


def _table(name: str, given: Any) -> pa.Table:
    try:
        if isinstance(given, Mapping) and not any(map(is_known, map(str, given))):  # else it is one of columns
            numbers = all(isinstance(key, int) or str(key).isdecimal() for key in given)
            if numbers or all(isinstance(one, str) for one in given.values()):
                return pa.Table.from_pylist(rows_of(given, f"the item set {name!r}"))
        if hasattr(given, "columns") or isinstance(given, Mapping):
            return pa.table(given)
        if not isinstance(given, pa.Array | pa.ChunkedArray):
            given = pa.chunked_array(given) if hasattr(given, "__arrow_c_stream__") else pa.array(list(given))
        return pa.table({"item": given})
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ItemSetError(
            f"the item set {name!r} must be a file, a table (pandas, polars, pyarrow) or a list of texts or token-id "
            f"lists, not {type(given).__name__}: {error}"
        ) from error


def _parsed(name: str, given: str) -> tuple[str, dict[str, list[str]]] | None:
    """Return the path of a source and its options, None if it is an index or a published set."""
    path, mark, query = given.rpartition("?")
    words = parse_qs(query, keep_blank_values=True)
    foreign = not words or bool(words.keys() - {*_WORDS} or {*words.get("escape", ())} - {"json", "text"})
    if not mark or os.path.exists(given) or (foreign and is_uri(given)):  # a web address has options of its own
        path, words, foreign = given, {}, False
    if foreign:
        mend = f"write {name}={path}?column=NAME&key=NAME"
        raise ItemSetError(f"{given} has options other than {', '.join(_WORDS)}: {mend}")
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        if words or os.path.exists(os.path.join(path, POINTER)) or not any(os.scandir(path)):
            return (path, words) if words else None  # an empty folder may become a published set
    elif not words and "*" not in path and _is_index(path):
        return None
    return path, words


def _is_index(path: str) -> bool:
    """Return whether this is an index, or not there, which is judged elsewhere."""
    try:
        file = file_at(path)
        with file.open() as stream:
            return stream.read(len(MAGIC)) == MAGIC or format_of(file) == ".itemset"
    except (ItemSetError, OSError):
        return not any(path.lower().endswith(suffix) for suffix in sources.SUFFIXES)


def _built(name: str, path: str, words: dict[str, list[str]], tokenizer: Callable[[], Any], folder: Path) -> str:
    """Return the index of a file, from the cache if it is there."""
    files = sources.files_of(path)  # all of one kind
    args = parse(["build", path, "-o", str(folder)])
    single = {word: values[-1] for word, values in words.items()} | {"attribute": words.get("attribute", [])}
    flags = {word: single[word] for word in _FLAGS if word in single}
    for word, value in flags.items():
        if value not in ("yes", "no"):
            raise ItemSetError(f"{path}: {word} must be yes or no, not {value}")
    vars(args).update(single | {word: value == "yes" for word, value in flags.items()})
    names, dialect = building.columns_of(args, name)
    if names and not args.column:
        there = ", ".join(map(repr, names))
        raise ItemSetError(f"{path} has the columns {there}: say which has the items, {name}={path}?column=NAME")
    chosen = {word: value for word in _WORDS if (value := getattr(args, word))}
    digest = hashlib.sha256(repr([FORMAT, RULES, chosen, fingerprint(tokenizer()), names]).encode())
    for file in files:
        if file.system is not None and file.changed is not None:  # elsewhere, and its system says when it was changed
            digest.update(repr((file.name, file.size, file.changed)).encode())
            continue
        with guarded(file), file.open() as stream:
            kind = hashlib.sha256(format_of(file).encode())
            digest.update(hashlib.file_digest(cast(Any, stream), kind.copy).digest())
    index = folder / f"{digest.hexdigest()[:32]}.itemset"
    written = {word: "yes" if value is True else value for word, value in chosen.items()}
    taken = (unquote_plus(urlencode(written, doseq=True)) or "its items") + (f", {dialect}" if dialect.names else "")
    with locked(folder / "lock", mode=0o600):
        if index.exists():
            os.utime(index)
            say(f"item set {name!r}: {path} ({taken}), as it was built before: {index}")
            return str(index)
        for old in folder.glob("*.itemset"):
            with suppress(OSError):  # `delete_unused` may be faster
                if time.time() - old.stat().st_mtime > KEPT_SECONDS:
                    old.unlink()
        say(f"item set {name!r}: building an index of {path} ({taken})")
        if names and not (args.key or args.keep_text):
            say(f"item set {name!r}: no column has the keys, row numbers are the keys ({name}={path}?key=COLUMN)")
        others = [other for other in names if other and other not in (args.column, args.key, *args.attribute)]
        if others and "attribute" not in words:
            more = urlencode({**words, "attribute": others[0]}, doseq=True)
            say(f"columns that requests filter by: {name}={path}?{more} (it has {', '.join(others)})")
        start = time.monotonic()
        args.tokenizer = tokenizer()
        made = building.write_index(args, index)
        if sources.files_of(path) != files:  # the index has the name of what was read before
            index.unlink()
            raise ItemSetError(f"{path} was changed while it was read: start again")
        took = f"{len(made):,} items in {time.monotonic() - start:.1f} s, for the next start {index}"
        folded = f" ({made.duplicates:,} equal ones folded)" if made.duplicates else ""
        typed = ", ".join(f"{one.name} ({kind_of(one.type)})" for one in made.attributes.schema)
        say(f"item set {name!r}: {took}{folded}" + (f"; attributes {typed}" if typed else ""))
        item = next(iter(made.items()))
        shown = decode([int(token) for token in item], args.tokenizer)
        say(f"item set {name!r}: such as {shown!r:.80} of {len(item)} tokens, key {made.keys_of([item])[0][0]!r}")
    return str(index)


def say(line: str) -> None:
    """Print a line of the start: no engine's log is set up yet."""
    print(f"static-backend: {line}", file=sys.stderr, flush=True)
