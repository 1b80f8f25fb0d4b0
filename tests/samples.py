"""How often tests draw, and how often each item should come."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

# How many tokens the tests of distributions draw; 20,000 take four minutes in Triton's interpreter.
SAMPLES = int(os.environ.get("STATIC_SAMPLES", 2_000))

# How many ranked lists come and go where nothing may be left of them.
CHURNED = int(os.environ.get("STATIC_CHURNED", 48))

FEW = [[100, 200], [100, 201], [100, 202, 300], [101, 200], [101, 202], [700]]
TEMPERATURE = 1 / 3


def exact(items: list[list[int]], logits_of: Callable[[list[int], list[int]], list[float]]) -> np.ndarray:
    """Each item's probability at TEMPERATURE: the product over its tokens of their share among the legal ones.

    logits_of: the model's own logits of some tokens behind a prefix of an item, up to a constant.
    """
    probabilities = []
    for item in items:
        probability = 1.0
        for i, token in enumerate(item):
            legal = sorted({other[i] for other in items if other[:i] == item[:i]})
            logits = np.array(logits_of(item[:i], legal)) / TEMPERATURE
            shares = np.exp(logits - logits.max())
            probability *= shares[legal.index(token)] / shares.sum()
        probabilities.append(probability)
    return np.array(probabilities)
