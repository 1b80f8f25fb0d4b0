"""An index of a catalogue of texts that many machines encode, by Ray Data; one machine sorts their token ids.

    pip install "ray[data]" .     # on every machine of the cluster
    python examples/cluster_build.py /shared/films --column title --key movie_id --attribute year \\
        --tokenizer path/to/model --parts /shared/parts -o films.itemset --address auto

Without --address Ray begins on this machine. SOURCE and --parts are Parquet, in a folder or a bucket (`s3://...`) that
all machines reach; a task encodes a row group. The index is, byte for byte, what `itemset build` makes of SOURCE.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import dataset, fs, parquet

from itemset import cli
from itemset.errors import ItemSetError
from itemset.text import encode, load_tokenizer

IDS = "ids"  # the column of the parts that holds token ids


def encoded(table: pa.Table, tokenizer: str, column: str) -> pa.Table:
    """Return a table with token ids for its texts. Raises ItemSetError, which names a bad text."""
    texts = table[column].to_pylist()
    try:
        tokens, offsets = encode(texts, load_tokenizer(tokenizer))
    except ItemSetError as error:
        raise ItemSetError(f"in the rows that begin with {texts[0]!r:.60}: {error}") from error
    return table.drop_columns([column]).append_column(IDS, pa.LargeListArray.from_arrays(offsets, tokens))


def encode_part(row: dict[str, Any], args: argparse.Namespace) -> dict[str, int]:
    """Encode a row group, and write its part, whose name keeps the order. Return its number of items."""
    table = pickle.loads(row["rows"]).to_table(columns=[args.column, args.key, *args.attribute])
    files, folder = fs.FileSystem.from_uri(args.parts)
    made = encoded(table, args.tokenizer, args.column)
    parquet.write_table(made, f"{folder}/{row['number']:08}.parquet", filesystem=files)
    return {"items": len(table)}


def encode_parts(args: argparse.Namespace) -> int:
    """Write the encoded parts; return how many items they have. Raises Ray's errors, which hold those of `encoded`."""
    import ray

    files = sorted(dataset.dataset(args.source, format="parquet").get_fragments(), key=lambda file: str(file.path))
    groups = [pickle.dumps(group) for file in files for group in file.split_by_row_group()]
    rows = [{"number": number, "rows": group} for number, group in enumerate(groups)]
    # A task has one core: without this each would take all of its machine's.
    own: dict[str, Any] = {"num_cpus": args.workers} if args.address is None else {"address": args.address}
    ray.init(runtime_env={"env_vars": {"RAYON_NUM_THREADS": "1"}}, log_to_driver=False, **own)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(encode_part, fn_kwargs={"args": args})
        return int(done.sum("items"))
    finally:
        ray.shutdown()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="SOURCE", help="Parquet: a file, a folder, or one under s3://, gs://")
    parser.add_argument("--column", required=True, help="column of the texts")
    parser.add_argument("--key", required=True, help="column of the keys")
    parser.add_argument("--attribute", action="append", default=[], help="column to keep for filters; may be repeated")
    parser.add_argument("--tokenizer", required=True, help="the model's: a folder that all machines have, or a name")
    parser.add_argument("--parts", required=True, help="a new folder for the encoded parts")
    parser.add_argument("-o", "--output", required=True, help="the index file to write")
    parser.add_argument("--address", help="of the Ray cluster: auto on one of its machines (default: begin one here)")
    parser.add_argument("--workers", type=int, default=2, help="cores of this machine without it (default: 2)")
    args = parser.parse_args(arguments)
    args.parts = args.parts if "://" in args.parts else str(Path(args.parts).absolute())
    files, folder = fs.FileSystem.from_uri(args.parts)
    if files.get_file_info(folder).type != fs.FileType.NotFound:
        parser.exit(1, f"{args.parts} is there already: name a new folder, or delete it\n")
    files.create_dir(folder)
    start = time.perf_counter()
    count = encode_parts(args)
    seconds = time.perf_counter() - start
    print(f"encoded {count:,} items in {seconds:.1f} s, {count / seconds:,.0f} a second", flush=True)
    kept = [word for name in args.attribute for word in ("--attribute", name)]
    built = ["build", args.parts, "--column", IDS, "--key", args.key, *kept, "--tokenizer", args.tokenizer]
    return cli.main([*built, "-o", args.output])


if __name__ == "__main__":
    sys.exit(main())
