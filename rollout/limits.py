"""The settings that the coordinator decides by."""

from cluster.config import Settings
from cluster.record import Record


class Limits(Record):
    """How often, how long and for how much."""

    attempts: int
    """Tries of a step that infrastructure failed."""
    step_s: float
    """A step that has run this long is abandoned and recorded as `straggler`."""
    episode_s: float
    """A chain whose first step of this sitting started this long ago is ended; what it lacks is recorded as
    `episode-deadline`."""
    grace_s: float
    """How long running steps may still finish after infrastructure was lost for good."""
    data_failures: int
    """More of them than this stop the run."""
    bugs: int
    """More of them than this stop the run."""
    max_cost: float | None
    """US dollars; None: no bound."""
    seed: int

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        """As they are set."""
        rollout = settings.rollout
        return cls(
            attempts=rollout.attempts,
            step_s=rollout.deadlines.step_s,
            episode_s=rollout.deadlines.episode_s,
            grace_s=rollout.grace_s,
            data_failures=rollout.data_failures,
            bugs=rollout.bugs,
            max_cost=settings.run.max_cost,
            seed=settings.run.seed,
        )
