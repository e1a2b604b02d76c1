"""The record of a forecast that ends without a worker's: infrastructure, data or a bug of ours had the last word.

It has no report and is scored by the named policy; a memory-on episode carries its last valid notebook on.
"""

from collections.abc import Callable, Mapping, Sequence

from cluster.failures import Failure
from rollout.notebook import NotebookState, not_updated
from rollout.packed import PackedForecast, pack
from rollout.prompts import prompt_hash
from rollout.record import CarriedNotebook, ForecastKey, ForecastRecord

WriteOff = Callable[[ForecastKey, Failure, NotebookState | None, int], PackedForecast]
"""The record of a forecast that ends without a worker's: (key, failure, what it would have carried, attempts)."""


class WriteOffs:
    """Makes such records for the events of one run."""

    def __init__(self, options: Mapping[str, Sequence[str]], variant: str, weights: str) -> None:
        """`options` by event id; `variant` of the prompt and `weights` as the run's manifest says."""
        self._options, self._variant, self._weights = options, variant, weights

    def __call__(
        self, key: ForecastKey, failure: Failure, carried: NotebookState | None, attempts: int
    ) -> PackedForecast:
        """`carried` is what the step had, or would have had, to begin with."""
        notebook = not_updated(carried, key.date, failure.reason) if key.mode == "memory-on" else None
        record = ForecastRecord(
            key=key,
            options=tuple(self._options[key.event]),
            report=None,
            notebook=notebook,
            carried=CarriedNotebook.of(carried),
            failure=failure,
            attempts=attempts,
            prompt=prompt_hash(key.mode, self._variant),
            weights=self._weights,
        )
        return pack(record, None)
