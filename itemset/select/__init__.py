"""Which of a set's items: filters over their attributes, and views that need no second trie."""
