"""Metrics of SGLang's processes, for `/metrics` with --enable-metrics: each its own share. Import it once an engine has
started: see `itemset.serving.metrics`."""

from itemset.masking.arena import Plan
from itemset.serving import metrics
from itemset.serving.metrics import EngineFigures
from sglang_static import compat

FIGURES = EngineFigures("sum", used="sum")


class SchedulerFigures:
    """Counts of a scheduler, kept by one of its tensor-parallel ranks."""

    def __init__(self, plan: Plan | None) -> None:
        """plan: of the arena; None on the host path."""
        self._plan, self._counted = plan, compat.counts_requests()
        if self._counted:
            for path in ("device", "host"):
                FIGURES.by_path.labels(path).set(0)
            FIGURES.arena.set(plan.nbytes if plan else 0)
        self.memory()

    def memory(self) -> None:
        if self._counted:
            FIGURES.arena_used.set(self._plan.used if self._plan else 0)

    def released(self, number: int) -> None:
        """Do `Plan.release`: a request has ended."""
        assert self._plan is not None
        self._plan.release(number)
        self.memory()

    def admitted(self, path: str) -> None:
        """A request takes the `device` path or the `host` path."""
        if self._counted:
            FIGURES.by_path.labels(path).inc()
            self.memory()

    def refused(self) -> None:
        """A request is ended, because its set has an item too long for it."""
        if self._counted:
            metrics.REFUSED.labels("no room in the context").inc()
