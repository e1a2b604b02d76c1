"""Vectors out of an embeddings answer, or the fault that it is: nothing is filled in, cut or put in another order by guess."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.endpoint.answer import EndpointFault
from cluster.endpoint.fault import Fault, of_body
from cluster.failures import SettingsError


def embeddings_of(answer: Mapping[str, Any], rows: int, dimension: int) -> NDArray[np.float32]:
    """float32 [rows, dimension], unit rows in the order of the texts, whatever the order of the answer's own rows.

    Raises EndpointFault for anything but one finite vector with a direction for each text, SettingsError for another dimension.
    """
    if answer.get("error"):
        raise EndpointFault(of_body(answer["error"]))
    data = answer.get("data")
    if not isinstance(data, list) or len(data) != rows or not all(isinstance(row, Mapping) for row in data):
        found = f"{len(data)} vectors" if isinstance(data, list) else "no list of vectors"
        raise _malformed(f"{found} for {rows} texts")
    vectors = np.empty((rows, dimension), np.float64)
    for place, row in zip(_places(data), data, strict=True):
        vector = _vector(row.get("embedding"))
        if len(vector) != dimension:
            raise SettingsError(
                f"the server's vectors have {len(vector)} dimensions, but encoder.dimension is {dimension}; set that, or "
                "the model that index.encoder names"
            )
        vectors[place] = vector
    lengths = np.linalg.norm(vectors, axis=1)
    wrong = ~(np.isfinite(lengths) & (lengths > 0))
    if wrong.any():
        raise _malformed(f"the vector of text {int(wrong.argmax())} is not finite, or zero")
    unit: NDArray[np.float32] = (vectors / lengths[:, None]).astype(np.float32)
    return unit


def tokens_of(answer: Mapping[str, Any]) -> int | None:
    """What the server counted; None if it did not."""
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return total if isinstance(total, int) and not isinstance(total, bool) and total >= 0 else None


def _places(data: Sequence[Mapping[str, Any]]) -> Sequence[int]:
    """The text that each row of the answer belongs to; where no row says so, they come in order."""
    stated = [row.get("index") for row in data]
    if all(place is None for place in stated):
        return range(len(data))
    places = [place for place in stated if isinstance(place, int) and not isinstance(place, bool)]
    if sorted(places) != list(range(len(data))):
        raise _malformed(f"the vectors are numbered {stated[:8]}, which does not name each of {len(data)} texts once")
    return places


def _vector(value: Any) -> NDArray[np.float64]:
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), "<f4").astype(np.float64)
        vector = np.asarray(value)
    except (binascii.Error, ValueError) as error:
        raise _malformed(f"a vector is not one: {error}") from None
    if vector.ndim != 1 or vector.dtype.kind not in "fiu":
        raise _malformed(f"a vector is not a list of numbers: {str(value)[:100]}")
    return vector.astype(np.float64)


def _malformed(detail: str) -> EndpointFault:
    return EndpointFault(Fault(kind="malformed", detail=detail))
