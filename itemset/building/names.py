"""Which of a table's columns holds the items and which their keys, by the columns' names."""

import re
from collections.abc import Collection, Sequence

from itemset.errors import ItemSetError

_ITEMS = ("item", "title", "name", "label", "text", "semantic_id", "semantic_ids", "sid", "sids", "token_ids", "tokens")
_LAST_ITEMS = ("url", "category", "class")
_KEYS = ("id", "key", "sku", "asin", "isbn", "isbn13", "isbn10", "ean", "upc", "gtin", "uuid", "guid")
_OWN = {
    "item", "product", "article", "movie", "film", "book", "song", "track", "news", "video", "game", "doc", "document",
}  # fmt: skip
_FOREIGN = {
    "category", "parent", "brand", "user", "customer", "seller", "vendor", "supplier", "store", "shop", "genre",
    "author", "artist", "album", "publisher", "director", "type", "class", "session", "order", "region", "country",
}  # fmt: skip


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case. RecBole's type after the name (`item_id:token`) is none."""
    name = re.sub(r":(token|float)(_seq)?$", "", name.strip().strip("\"'"))
    name = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3_\2\4", name)  # MovieID, productId, IDNumber
    words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
    joint = words[-1].removesuffix("id") if words and words[-1].endswith("id") else ""
    return [*words[:-1], joint, "id"] if joint in _OWN | _FOREIGN else words  # productid


def is_known(name: str) -> bool:
    """Return whether a name is one that columns have (`title`) or, without a space in it, ends as one (`film_id`)."""
    words = words_of(name)
    end = words[-1] if len(words) > 1 and " " not in name else "_".join(words)
    return not {end, end.removesuffix("s")}.isdisjoint((*_ITEMS, *_LAST_ITEMS, *_KEYS))


def item_column(names: Sequence[str]) -> str | None:
    """Return the column of the items, None if the names do not say.

    It is called as one (`title`), else is the only one whose name ends so (`film_title`), or that has no keys.
    """
    called = {name: "_".join(words_of(name)) for name in names}
    for word in (*_ITEMS, *_LAST_ITEMS):
        for name in names:
            if called[name] == word:
                return name
    ending = [name for name in names if not _is_key(name) and words_of(name)[-1:] and words_of(name)[-1] in _ITEMS]
    others = [name for name in names if not _is_key(name)]
    return next((some[0] for some in (ending, others, list(names)) if len(some) == 1), None)


def key_column(names: Sequence[str], about: Collection[str] = (), path: object = "the source") -> str | None:
    """Return the column of the items' keys, None if there is none.

    It is called as one in any case (`id`, `SKU`), else its name ends so: the item's own (`movie_id`) before others,
    and never another thing's (`category_id`). about: words that name the items, such as the set's name.
    Raises ItemSetError if two columns are as good.
    """
    for word in _KEYS:
        for name in names:
            if "_".join(words_of(name)) == word:
                return name
    these = {word.removesuffix("s") for one in about for word in words_of(one)} - _OWN
    before = {name: set(words_of(name)[:-1]) for name in names if _is_key(name)}
    ours = [name for name, words in before.items() if words & these]
    own = [name for name, words in before.items() if words & _OWN and not words & _FOREIGN]
    others = [name for name, words in before.items() if not words & (_FOREIGN | _OWN)]
    for some in (ours, own, others):
        if len(some) > 1:
            raise ItemSetError(
                f"{path}: {' and '.join(map(repr, some))} may have the items' keys: say which, with ?key={some[0]} "
                f"(--key), or ?key= for the row numbers"
            )
        if some:
            return some[0]
    return None


def _is_key(name: str) -> bool:
    return bool(words := words_of(name)) and words[-1] in _KEYS
