"""The workers: masks, lists and weights inside a step."""
