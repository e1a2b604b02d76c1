"""How long a step waits before it is tried again: exponential, bounded, spread by a seed.

The spread is drawn from the seed, the forecast and the attempt alone, so that a run replays exactly and the steps of a
worker that died do not all come back in the same moment.
"""

import hashlib

from rollout.record import ForecastKey

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 20.0


def backoff_seconds(seed: int, key: ForecastKey, attempt: int) -> float:
    """Seconds after the failure of `attempt` (from 1): between half and all of min(2^(attempt − 1), 20) s."""
    longest: float = min(FIRST_SECONDS * 2 ** (attempt - 1), LONGEST_SECONDS)
    name = f"{seed}/{key.model}/{key.event}/{key.date}/{key.mode}/{key.rollout}/{attempt}"
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return longest * (0.5 + share / 2)
