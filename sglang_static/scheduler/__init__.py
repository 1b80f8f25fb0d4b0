"""The schedulers, which share their processes with the workers: grammars, masks, lists."""
