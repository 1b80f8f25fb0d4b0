"""The one exception of `itemset`: a bad item, set, key or file."""


class ItemSetError(ValueError):
    """Names the input that is wrong and what to do about it."""
