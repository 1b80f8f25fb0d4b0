"""Which columns hold the items and the keys, by their names."""

from __future__ import annotations

import pytest

from itemset import ItemSetError
from itemset.building.names import item_column, key_column


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (["Id", "Title"], "Id"),
        (["ASIN", "Name"], "ASIN"),
        (["TrackID", "Title"], "TrackID"),
        (["productid", "title"], "productid"),
        (["Article ID", "Name"], "Article ID"),
        (["item-id", "name"], "item-id"),
        (["movieId:token", "title:token_seq"], "movieId:token"),
        (["brand_id", "product_id", "title"], "product_id"),
        (["user_id", "seller_id", "sku", "title"], "sku"),
        (["parent_asin", "asin", "title"], "asin"),
        (["genre_id", "title"], None),
        (["title", "year"], None),
        (["imdb_id", "movie_id", "title"], "movie_id"),
        (["imdb_id", "title"], "imdb_id"),
        (["dish_id", "imdb_id", "title"], "dish_id"),
    ],
)
def test_the_key_is_the_items_own(names: list[str], key: str | None) -> None:
    assert key_column(names, ["dishes"[:-2]]) == key


@pytest.mark.parametrize("names", [["item_id", "product_id"], ["imdb_id", "tmdb_id"], ["BookID", "article_id"]])
def test_two_keys_that_are_as_good_are_asked_for(names: list[str]) -> None:
    with pytest.raises(ItemSetError, match=f"'{names[0]}' and '{names[1]}' may have the items' keys: say which"):
        key_column([*names, "title"])


@pytest.mark.parametrize(
    ("names", "item"),
    [
        (["ID", "Title"], "Title"),
        (["id", "year", "film_title"], "film_title"),
        (["SKU", "Product Name", "Price"], "Product Name"),
        (["item_id:token", "title:token_seq", "genre:token_seq"], "title:token_seq"),
        (["id", "anything"], "anything"),
        (["only"], "only"),
        (["a", "b"], None),
    ],
)
def test_the_items_column(names: list[str], item: str | None) -> None:
    assert item_column(names) == item
