"""From an index file, mapped or in memory, to the item set in it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError
from itemset.item_set import ItemSet, Origin
from itemset.trie import file as index_file
from itemset.trie.keys import Keys
from itemset.trie.tables import NONE, SECTIONS, Tables, Trie
from itemset.trie.targets import far_block_of
from itemset.trie.validate import check_items, check_shapes, digest_of


def load(path: str | os.PathLike[str], *, check: bool = True) -> ItemSet:
    """Open an index file by memory map. Raises ItemSetError, which says what is wrong with the file.

    check: compare every section with its checksum first, which reads the file once. Without it opening takes
    milliseconds at any size; a damaged file may then answer wrongly, but no walk reads outside the tables.
    The set reads from the file while it lives. You may replace the file, as `save` and `mv` do, or delete it. Do not
    change it in place, as `cp` does: answers would change, and if it gets shorter the system ends the process (SIGBUS).
    """
    return from_index(*index_file.read(path), name=str(path), check=check)


def from_bytes(data: bytes, name: str = "the index") -> ItemSet:
    """Open the set that `ItemSet.to_bytes` wrote. Raises ItemSetError as `load` does."""
    return from_index(*index_file.parse(data, name), name=name, check=True)


def verify(
    path: str | os.PathLike[str], *, name: str = "", progress: Callable[[int, int], object] = lambda nbytes, total: None
) -> ItemSet:
    """Read the whole file and check it: checksums, digest, attributes, and the tables to the end of every item.

    Two other threads read it for the checksums and the digest. name: for errors; its path by default. progress: called
    by all three with the bytes that it has read, and how many all read. Raises ItemSetError at the first fault.
    """
    name = name or str(path)
    header, arrays = index_file.read(path, name)
    walked = sum(arrays[section].nbytes for section in SECTIONS if section in arrays)
    total = sum(array.nbytes for array in arrays.values()) + 2 * walked

    def read(nbytes: int) -> None:
        progress(nbytes, total)

    with ThreadPoolExecutor(2) as other:
        checked = other.submit(index_file.check, header, arrays, name, read)
        try:
            item_set = from_index(header, arrays, name=name, check=False)
            digest = other.submit(digest_of, item_set.trie.tables, read)
            check_items(item_set.trie)
            read(walked)
        except (ItemSetError, ValueError) as error:
            checked.result()  # what a checksum tells comes first
            if isinstance(error, ItemSetError):
                raise
            raise ItemSetError(f"{name} is corrupted, {error}: {AGAIN}") from error
        checked.result()
        _ = item_set.attributes  # which checks them
    if item_set.digest != digest.result():
        raise ItemSetError(f"{name} is corrupted, its digest does not match its tables: {AGAIN}")
    return item_set


def from_index(header: index_file.Header, arrays: dict[str, NDArray[Any]], *, name: str, check: bool) -> ItemSet:
    """Return the set over what `index_file` has read. Raises ItemSetError as `load` does."""
    if check:
        index_file.check(header, arrays, name)
    try:
        sections = {field: arrays[field] for field in SECTIONS}
        far_block = far_block_of(sections["targets"], sections["tail_base"], header.tail_tokens)
        sections["potential"] = one = arrays.get("potential", NONE)  # of a small set that came with a request
        places = len(sections["labels"]) + 1, len(sections["labels"]) + len(sections["row_offsets"]) - 1
        if len(one) and (one.dtype != np.uint32 or len(one) not in places):
            raise ValueError("its potentials do not fit its edges")
        tables = Tables(**sections, alive=NONE, dead=NONE, token_bits=header.token_bits, far_block=far_block)
        extent = header.items, header.shortest, header.longest
        trie = Trie(tables, *extent, header.level_nodes, header.level_edges, header.tail_tokens)
        check_shapes(trie)
        keys = Keys.from_sections(arrays, trie.items)
    except KeyError as missing:
        raise ItemSetError(f"{name} is corrupted, it has no section {missing}: {AGAIN}") from missing
    except ValueError as error:
        raise ItemSetError(f"{name} is corrupted, {error}: {AGAIN}") from error
    origin, attributes = Origin(*(getattr(header, field) for field in Origin._fields)), arrays.get("attributes")
    return ItemSet(trie, keys, origin, digest=header.digest, duplicates=header.duplicates, attributes=attributes)
