"""The one exception of `itemset`: a bad item, set, key or file; and its one warning."""


class ItemSetError(ValueError):
    """Names the input that is wrong and what to do about it."""


class ItemSetWarning(UserWarning):
    """What was built may not be what was meant: says what, and what to do about it."""
