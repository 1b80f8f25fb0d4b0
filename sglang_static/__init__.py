"""The SGLang plugin: `--grammar-backend static`, whose grammar is a finite item set."""
