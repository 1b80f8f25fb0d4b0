"""The memory that a worker keeps for the beams of lists."""

from typing import NamedTuple


class Room(NamedTuple):
    """What lists get. blocks: of the KV cache, which the scheduler does not know: the memory of beams' own tokens.
    beams: that have room in it. tokens: whose logits may stand in memory."""

    blocks: int
    beams: int
    tokens: int


NO_ROOM = Room(0, 0, 0)
