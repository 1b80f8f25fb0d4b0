"""The next version of a published set, out of a whole file of its items."""

import warnings
from pathlib import Path
from typing import Unpack

from itemset.building.external import Progress, Source, build_external
from itemset.building.key_rows import Changes, changes, refuse_repeated
from itemset.building.scratch import scratch_folder
from itemset.errors import ItemSetError, ItemSetWarning
from itemset.item_set import ItemSet
from itemset.published import KEEP, POINTER, Version, load_current, publish, versions
from itemset.storage import PathLike


def publish_source(
    source: PathLike, folder: PathLike, *, keep: int = KEEP, keys_repeat: bool = False, force: bool = False,
    memory: int | None = None, progress: Progress = lambda stage, share: None, **how: Unpack[Source],
) -> tuple[Version, Changes | None]:  # fmt: skip
    """Build the set of a file's items, and make it the current version of the set in `folder`, which may be new.

    The file is the whole set: what is not in it any more is gone. The version is byte for byte a build of the file.
    keep: as for `publish`. keys_repeat: whether different items may have the same key. force: whether to publish what
    looks like a broken file (`Changes.alarming`). memory, progress, how: as for `build_external`; what is not given of
    attributes, prefix, escape and vocab_size is that of the current version.
    Returns the version, and what has changed since the current one, None if there was none that can be read.
    Raises ItemSetError as `build_external` and `publish`, for keys that repeat, and for a file that looks broken. Then
    the set is what it was.
    """
    folder = Path(folder).absolute()
    before = current_set(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder) as scratch:
            s = build_external(source, before=before, memory=memory, folder=scratch, progress=progress, **how)
            if not keys_repeat:
                refuse_repeated(source, how.get("key"), s, how.get("tokenizer"), memory, scratch)
            s.save(scratch / "index")
            by_key = bool(how.get("key") or how.get("keep_text"))
            said = None if before is None else changes(before, s, by_key=by_key, memory=memory, folder=scratch)
            if said is not None and said.alarming and not force:
                raise ItemSetError(f"{source} looks broken and is not published ({said}): if all is meant, add --force")
            return publish(scratch / "index", folder, keep=keep), said
    except OSError as error:
        raise ItemSetError(
            f"cannot publish to {folder}: {error.strerror}: choose a folder that you can write to, with room"
        ) from error


def current_set(folder: PathLike) -> ItemSet | None:
    """Return the current version's set; None if there is none, or one that is damaged, of which a warning is given."""
    if not Path(folder, POINTER).exists():
        return None
    versions(folder)  # of a damaged pointer nothing can be published
    try:
        return load_current(folder)[1]
    except ItemSetError as error:
        warnings.warn(f"{error}. The next version is made without it", ItemSetWarning, stacklevel=2)
        return None
