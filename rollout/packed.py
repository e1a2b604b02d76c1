"""A finished forecast as bytes for the ledger, packed where it was made: the run's single writer only stores it."""

import zlib

from cluster.failures import Failure
from cluster.record import Record
from rollout.notebook import NotebookState
from rollout.record import ForecastKey, ForecastRecord
from rollout.trajectory import Trajectory


class PackedForecast(Record):
    """What the ledger stores of one forecast, beside what the coordinator has to know of it."""

    key: ForecastKey
    failure: Failure | None
    notebook: NotebookState | None
    """memory-on: what the next step of the chain carries."""
    output_tokens: int
    price: float
    """US dollars; 0 for our own engines. In the ledger, with what attempts that left no record had cost when it was stored:
    the ledger's sum is what the run has cost, while the record itself says what its own attempt did."""
    record: str
    """The ForecastRecord as JSON."""
    trajectory: bytes | None
    """The Trajectory as JSON, compressed by zlib; None if there is none."""


def pack(record: ForecastRecord, trajectory: Trajectory | None) -> PackedForecast:
    """Raises PydanticSerializationError for text that JSON cannot hold."""
    return PackedForecast(
        key=record.key,
        failure=record.failure,
        notebook=record.notebook,
        output_tokens=record.usage.output_tokens,
        price=record.usage.price,
        record=record.model_dump_json(),
        trajectory=None if trajectory is None else zlib.compress(trajectory.model_dump_json().encode(), 6),
    )


def unpack_trajectory(packed: bytes) -> Trajectory:
    """The inverse of `pack` for a trajectory."""
    return Trajectory.model_validate_json(zlib.decompress(packed))
