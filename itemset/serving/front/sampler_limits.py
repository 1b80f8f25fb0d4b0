"""Which sampling parameters a sampler can hold beside a mask: its tensors are of float32, and of integers.

A number beyond these becomes infinite there, and no number at all where the mask is -inf. The sampler would then answer
with any token, or end the engine with all of its requests.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError

_SIZES = {
    "temperature": (1e-37, 1e10),
    **dict.fromkeys(("top_p", "min_p"), (1e-30, 1)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0, 100)),
    "repetition_penalty": (1e-6, 1e6),
    "logit_bias": (0, 1e20),
}
"""How small and how large a number may be, unless it is 0: no logit becomes infinite by all of them together."""
_BITS = {
    **dict.fromkeys(("top_k", "min_tokens", "min_new_tokens"), 31),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "seed", "sampling_seed"), 63),
}
PARAMETERS = (*_SIZES, *_BITS)
"""Those of an engine's own object that are looked at: to its stop tokens it adds the model's."""


def refuse_unsampled(given: Mapping[str, Any], vocab_size: int) -> None:
    """Raises RefusedError for a sampling parameter that no sampler can hold. given: by name, None for none."""
    for name, (least, most) in _SIZES.items():
        for value in _values(name, given.get(name)):
            number = isinstance(value, int | float)
            if not (number and (value == 0 or least <= abs(value) <= most)):
                raise _refusal(name, value, f"a number of {least:g} to {most:g}" + (", or 0" if least else ""))
    for name, bits in _BITS.items():
        value = given.get(name)
        if value is not None and not (isinstance(value, int) and -(1 << bits) <= value < 1 << bits):
            raise _refusal(name, value, f"an integer below 2^{bits}")
    for token in _values("stop_token_ids", given.get("stop_token_ids")):
        if not (isinstance(token, int) and 0 <= token < vocab_size):
            raise _refusal("stop_token_ids", token, f"token ids of 0 to {vocab_size - 1}")


def _values(name: str, given: Any) -> Iterable[Any]:
    """Return the numbers of a parameter. Raises RefusedError if those of several do not stand in the right kind."""
    if given is None:
        return ()
    if name == "logit_bias":
        if not isinstance(given, Mapping):
            raise _refusal(name, given, 'an object such as {"42": 1.5}')
        return given.values()
    if name == "stop_token_ids":
        if not isinstance(given, list | tuple | set | frozenset):
            raise _refusal(name, given, "a list of token ids")
        return [token for token in given if token is not None]
    return (given,)


def _refusal(name: str, value: Any, mend: str) -> RefusedError:
    message = f"{name} cannot be {shown(value)} beside an item set, where no sampler can hold it: give {mend}"
    return RefusedError("sampling parameter", message, name)
