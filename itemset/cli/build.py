"""The subcommands `build` and `update`: what writes index files."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import itemset
from itemset.building import sources
from itemset.building.columns import names_in
from itemset.building.dialects import Dialect
from itemset.building.external import build_external
from itemset.building.items import Encoding, Items
from itemset.building.key_rows import changes, refuse_repeated
from itemset.building.names import item_column, key_column
from itemset.building.progress import build_bar
from itemset.building.scratch import scratch_folder
from itemset.cli.options import Command, add_tokenizer, facts, positive, print_table, size, tokenizer_of
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.storage import is_uri
from itemset.trie.keys import are_row_numbers


def add_to(command: Command) -> None:
    sub = command(
        "build", build, "itemset build films.csv --column title --key movie_id --tokenizer DIR -o films.itemset"
    )
    formats = ", ".join(sources.SUFFIXES)
    places = (
        "a file, a folder of such, a glob in quotes ('parts/*.parquet'), or one under s3://, gs://, hf://, https://"
    )
    sub.add_argument("source", metavar="SOURCE", help=f"{formats}: {places}")
    sub.add_argument("--column", metavar="C", help="column of the items (default: chosen by name)")
    sub.add_argument("--key", metavar="K", help="column of the keys (default: chosen by name; '': row numbers)")
    add_encoding(sub)
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the index file to write")

    sub = command(
        "update",
        update,
        "itemset update films.itemset --add new.csv --column title --key movie_id --tokenizer DIR --remove gone.txt "
        "-o films2.itemset\n  itemset update films.itemset --from tomorrow.csv --tokenizer DIR -o films2.itemset",
    )
    sub.add_argument("file", metavar="FILE", help="the index file to begin with; -o may name it, too")
    sub.add_argument("--add", metavar="SOURCE", help="items to add, in any format that build reads")
    whole = "the whole new file, in place of --add and --remove: what is not in it is gone"
    sub.add_argument("--from", metavar="SOURCE", dest="source", help=whole)
    sub.add_argument("--column", metavar="C", help="column of the items to add: texts or lists of token ids")
    sub.add_argument("--key", metavar="K", help="column of the keys (default: numbers after the highest key)")
    _add_columns(sub)
    sub.set_defaults(prefix=None, escape=None, vocab_size=None, memory=None)
    add_tokenizer(sub, "the tokenizer that the set was built with")
    sub.add_argument("--remove", metavar="KEYS", help="keys to remove: lines of a .txt file, or the column --key")
    sub.add_argument("--missing-ok", action="store_true", help="keys to remove need not be in the set")
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the index file to write")


def add_encoding(sub: argparse.ArgumentParser) -> None:
    """Add what a build is told beside its columns of items and keys."""
    add_tokenizer(sub, "the model's tokenizer: a folder or a Hugging Face name")
    _add_columns(sub)
    sub.add_argument("--prefix", metavar="S", help="text before every item, for instance a space")
    escape = "for items that stand inside longer answers: in JSON strings (escaped as such), or in other text"
    sub.add_argument("--escape", choices=["json", "text"], help=escape)
    sub.add_argument("--vocab-size", metavar="N", type=positive, help="refuse token ids of N and above")
    memory = "memory to sort in, such as 4GB (default: half of what is available); the rest is on disk, beside FILE"
    sub.add_argument("--memory", metavar="SIZE", type=size, help=memory)


def _add_columns(sub: argparse.ArgumentParser) -> None:
    """Add what is kept beside the items, and the options of delimited text, which is judged without them."""
    kept = "column to keep for filters: bools, numbers, strings, dates, times or lists of strings; may be repeated"
    sub.add_argument("--attribute", metavar="A", action="append", default=[], help=kept)
    sub.add_argument("--keys-repeat", action="store_true", help="let different items have the same key")
    sub.add_argument("--keep-text", action="store_true", help="the texts are the keys, as the tokenizer may alter them")
    sub.add_argument("--delimiter", metavar="D", help="between the fields of a text file: ',', ';', tab, '|', '::'")
    sub.add_argument("--quotes", choices=["csv", "text"], help="fields may stand in quotes, or quotes are characters")
    sub.add_argument("--header", choices=["yes", "no"], help="whether the first line has the columns' names")
    split = "between strings in one field: an attribute that has it, such as 'Action|Comedy', is a list of strings"
    sub.add_argument("--split", metavar="S", help=split)
    sub.add_argument("--encoding", metavar="E", help="of a text file, such as latin-1 (default: UTF-8)")


def _output_file(given: str, *sources: str | None) -> Path:
    """Return the file to be written. Raises ItemSetError if it cannot be one, or is one of the sources."""
    output = Path(given)
    if is_uri(given):
        raise ItemSetError(f"cannot write {given}: name a file of this machine, and copy it there when it is whole")
    if output.is_dir() or not output.parent.is_dir():
        raise ItemSetError(f"cannot write {output}: name a file in a folder that exists")
    if output.exists() and any(source and os.path.exists(source) and output.samefile(source) for source in sources):
        raise ItemSetError(f"{output} is the source itself: give the index file another name")
    return output


def build(args: argparse.Namespace) -> None:
    output = _output_file(args.output, args.source)
    start, taken = time.perf_counter(), choose_columns(args, output.stem, None)
    _print_written(write_index(args, output), output, start, ("read", taken))


def write_index(args: argparse.Namespace, output: Path, before: ItemSet | None = None) -> ItemSet:
    """Write the index that the arguments ask for, and return its set. before: the set of an earlier file."""
    given = how_of(args)
    try:
        with scratch_folder(output) as folder, build_bar() as progress:
            s = build_external(args.source, before=before, folder=folder, progress=progress, **given)
            if not args.keys_repeat:
                refuse_repeated(args.source, args.key, s, given["tokenizer"], args.memory, folder)
            progress("writing", 0.0)
            s.save(folder / output.name)
            os.replace(folder / output.name, output)
            progress("writing", 1.0)
    except OSError as error:
        raise ItemSetError(f"cannot write {output}: {error.strerror}: choose a folder you can write to") from error
    return s


def how_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `build_external` that the arguments have."""
    alike = ("column", "key", "prefix", "escape", "vocab_size", "memory", "keep_text")
    given: dict[str, Any] = {name: getattr(args, name) for name in alike}
    return given | {
        "attributes": [name for name in args.attribute if name] if args.attribute else None,
        "tokenizer": tokenizer_of(args),
        "dialect": Dialect.of(vars(args)),
    }


def taken_of(args: argparse.Namespace) -> str:
    """Return what is read of a source by these arguments, for people."""
    given = [name for name in (args.column, args.key, *args.attribute) if name]
    names, dialect = names_in(sources.files_of(args.source)[0], Dialect.of(vars(args)), given)
    if not names:
        return f"its items, with {'their texts' if args.keep_text else 'row numbers'} as keys"
    others = ", ".join(repr(name) for name in names if name not in given)
    keys = f"keys of {args.key!r}" if args.key else "texts as keys" if args.keep_text else "row numbers as keys"
    items = f"items of {args.column!r}" if args.column else "its items"
    taken = f"{items}, {keys}" + (f", nothing of {others} (--attribute)" if others and args.column else "")
    return f"{taken}; {dialect}" if dialect.names else taken


def choose_columns(args: argparse.Namespace, about: str, before: ItemSet | None) -> str:
    """Choose the columns of the items and keys by their names, unless they are given; return what is taken, for people.

    about: the set's name. before: the set of an earlier file, which has no keys of its own if they are row numbers.
    """
    args.attribute = args.attribute or ([] if before is None else before.attributes.column_names)
    numbered = before is not None and args.key is None and are_row_numbers(before.keys)
    columns_of(args, about)
    if numbered and args.key is not None:
        raise ItemSetError(
            f"{args.source}: the keys before are 0, 1, 2, ...: say whether these are row numbers (--key '') or of "
            f"a column (--key {args.key})"
        )
    return taken_of(args)


def columns_of(args: argparse.Namespace, about: str) -> tuple[list[str], Dialect]:
    """Choose the columns as `choose_columns` does; return the names of all, none without a table, and its dialect."""
    given = [name for name in (args.column, args.key, *args.attribute) if name]
    names, dialect = names_in(sources.files_of(args.source)[0], Dialect.of(vars(args)), given)
    if names:
        named = item_column([name for name in names if name != args.key])  # an attribute may be that, too
        args.column = args.column or named or item_column([name for name in names if name not in given])
        if args.key is None and not args.keep_text:
            free = [name for name in names if name not in (*given, args.column)]
            args.key = key_column(free, [about, Path(args.source.partition("*")[0]).stem], args.source)
    return names, dialect


def update(args: argparse.Namespace) -> None:
    """Write the index of a set with items removed and added."""
    if bool(args.source) == bool(args.add or args.remove) or (not args.source and (args.attribute or args.keep_text)):
        args.error("update needs --add, --remove or both, or --from alone, which takes --attribute and --keep-text")
    output = _output_file(args.output, args.add, args.source, args.remove)
    start = time.perf_counter()
    before = itemset.load(args.file)
    if args.source:
        taken = choose_columns(args, Path(args.file).stem, before)
        after = write_index(args, output, before)
        changed = str(changes(before, after, by_key=bool(args.key or args.keep_text), folder=output.parent))
        _print_written(after, output, start, ("read", taken), ("changes", changed))
        return
    removed: Any = () if args.remove is None else sources.read_keys(args.remove, args.key, Dialect.of(vars(args)))
    source, new, names, taken = Items(), dict[str, Any](), before.attributes.column_names, ""
    if args.add:
        args.source = args.add
        args.key = "" if args.key is None and are_row_numbers(before.keys) else args.key  # then they go on
        taken, args.key = choose_columns(args, Path(args.file).stem, before), args.key or None
        source = sources.read(
            args.add, column=args.column, key=args.key, attributes=names, dialect=Dialect.of(vars(args))
        )
        Encoding(args.tokenizer).check(args.add, texts=source.texts is not None)
        tokenizer = tokenizer_of(args, before)
        new = {
            "add": source.tokens if source.texts is None else source.texts,
            "tokenizer": None if source.texts is None else tokenizer,
            "keys": None if source.keys is None else _keys_as_in(before, source.keys, args.add),
            "attributes": source.attributes if names else None,
        }
    after = before.updated(remove=_keys_as_in(before, removed, args.remove), missing_ok=args.missing_ok, **new)
    if args.add and not args.keys_repeat:
        refuse_repeated(args.add, args.key, after, new["tokenizer"], args.memory, output.parent, among=new["keys"])
    after.save(output)
    added = len(source)  # of the keys, for an item may have several: one that is removed and added is both
    changed = f"{len(before.keys) + added - len(after.keys):,} keys removed, {added:,} added"
    _print_written(after, output, start, *([("read", taken)] if taken else []), ("changes", changed))


def _print_written(s: ItemSet, output: Path, start: float, *more: tuple[str, str]) -> None:
    size, seconds = output.stat().st_size, time.perf_counter() - start
    print_table([*facts(s), ("file", f"{output} ({size:,} bytes)"), *more, ("time", f"{seconds:.1f} s")])


def _keys_as_in(before: ItemSet, keys: Any, path: str) -> Any:
    """Return keys as the set has them: a file does not say whether what is written as integers are strings."""
    if not len(keys) or keys.type == before.keys.type:
        return keys
    try:
        return keys.cast(before.keys.type)
    except pa.ArrowException as error:
        raise ItemSetError(f"{path}: the keys of the set are integers: {error}") from error
