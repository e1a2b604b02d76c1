"""Where a training stands: the one record that a trainer reports while it works."""

from collections.abc import Callable

from cluster.record import Record


class TrainingProgress(Record):
    """State after an optimizer step."""

    step: int
    steps: int
    loss: float
    """Mean over the learned tokens of this step, nats."""
    tokens: int
    """Tokens read so far, padding excluded."""
    seconds: float
    """Since the first step began."""

    @property
    def tokens_per_second(self) -> float:
        """Mean speed so far."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Progress = Callable[[TrainingProgress], None]
