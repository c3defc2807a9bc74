"""Which engine runs independent jobs, and with how many workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offmap.distributed import local, ray
from offmap.distributed.local import Job, Report
from offmap.errors import ConfigError, nearest

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Pool:
    """Workers of this machine, or of Ray: its own, or that of a cluster at an address."""

    engine: Literal["local", "ray"] = "local"
    workers: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"Expected the engine to be {nearest(self.engine, ENGINES)}, but got {self.engine!r}.")
        if self.address is not None and self.engine != "ray":
            raise ConfigError(f"Expected an address only with the engine 'ray', but got {self.address!r} with {self.engine!r}.")

    @property
    def here(self) -> bool:
        """Whether jobs run in this very process."""
        return self.engine == "local" and self.workers <= 1

    def run_jobs(self, jobs: Sequence[Job], *, report: Report, shared: tuple[Any, ...] = ()) -> list[Any]:
        """The results in the order of the jobs; `shared` is what each is given first."""
        if self.engine == "ray":
            return ray.run_jobs(jobs, workers=self.workers, report=report, shared=shared, address=self.address)
        return local.run_jobs(jobs, workers=self.workers, report=report, shared=shared)
