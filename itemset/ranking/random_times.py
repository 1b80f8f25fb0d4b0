"""The random numbers and times of exact draws, as the host and Numba's races compute them. Times are logarithms."""

import math

import numpy as np

from itemset.trie.jit import compiled

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)
NOBODY, TOKEN = 0, 1  # numbers of a key: for what lies outside the set, and the first of those for its tokens


@compiled
def mixed(key, n):
    """Return number `n` of a key: splitmix64 (Steele, Lea and Flood 2014)."""
    z = key + (np.uint64(n) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@compiled
def uniform(key, n):
    """Return number `n` of a key as one between 0 and 1, both excluded."""
    return _unit(mixed(key, n))


@compiled
def _unit(bits):
    return (np.float64(bits >> _S12) + 0.5) * 2.0**-52


@compiled
def log_exponential(bits):
    """Return an exponential time of rate 1."""
    return math.log(-math.log(_unit(bits)))


@compiled
def log_left(total):
    """Return the logarithm of 1 - total, where rounding may have brought the total above 1."""
    return math.log1p(-total) if total < 1 else -math.inf


@compiled
def gap(time, earliest):
    """Return the time since the earliest."""
    if time <= earliest:
        return -math.inf
    return time + math.log1p(-math.exp(earliest - time))


@compiled
def log_of_sum(a, b):
    """Return the sum of two times, the first of them not 0."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))
