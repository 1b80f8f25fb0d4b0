"""One item set's tables: made from rows, walked, numbered, kept in a file."""
