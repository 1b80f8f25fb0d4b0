"""Sets on a device, for engines and decode loops of your own. These import torch."""

from itemset.masking.arena import Arena, room_for
from itemset.masking.arena_plan import Plan
from itemset.masking.batch import Batch
from itemset.masking.host import HostState
from itemset.masking.slots import Children, Slots
from itemset.ranking.beams import Beams

__all__ = ["Arena", "Batch", "Beams", "Children", "HostState", "Plan", "Slots", "room_for"]
