"""The bounds against vectors made to break them: half-way cases of the rounding, cancellation, huge ranges of exponents."""

import datetime as dt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.failures import InfrastructureError
from retrieval.blocks import Block
from retrieval.bounds import Bound, Norms, largest_norm
from retrieval.canonical import canonical_scores
from retrieval.days import DayTable
from retrieval.exact import Exact
from retrieval.half import copy_norms, from_half, to_half
from retrieval.kernel import Kernel
from retrieval.kernel_device import DeviceKernel
from retrieval.kernel_float import FloatKernel, FloatRows, product
from retrieval.kernel_half import HalfKernel
from retrieval.kinds import rescorer
from retrieval.mask import Vectors
from retrieval.shard import Shard
from retrieval.tensors import as_tensor, torch_is_exact

HALF_WAY = np.float32(1 + 2**-8)
"""Lies between two bfloat16 numbers: the largest relative error a rounding can make."""


@st.composite
def matrices(draw: st.DrawFn, rows: int, dimension: int) -> Vectors:
    """float32 [rows, dimension]: signs, exponents and last bits of very different kinds."""
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    shape = (rows, dimension)
    spread = draw(st.sampled_from([0.0, 1.0, 8.0, 40.0]))
    size = np.exp2(random.uniform(-spread, spread / 4, shape)).astype(np.float32)
    values = draw(st.sampled_from(["half-way", "gaussian", "just below", "all equal", "sparse"]))
    mantissa = {
        "half-way": np.full(shape, HALF_WAY),
        "just below": np.full(shape, np.nextafter(HALF_WAY, np.float32(0))),
        "gaussian": random.standard_normal(shape),
        "all equal": np.full(shape, np.float32(1 / 3)),
        "sparse": random.standard_normal(shape) * (random.random(shape) < 0.1),
    }[values]
    signs = {"plus": 1.0, "random": random.choice([-1.0, 1.0], shape), "alternating": (-1.0) ** np.arange(dimension)}
    made = (mantissa * size * signs[draw(st.sampled_from(sorted(signs)))]).astype(np.float32)
    if draw(st.booleans()):
        made = made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), np.float32(1e-20))
    return made


def scores_of(kernel: Kernel, queries: Vectors, rows: int) -> tuple[Vectors, Bound]:
    prepared = kernel.prepared(queries)
    lowest = np.full(len(queries), -np.inf, np.float32)
    found = prepared.reaching(Block(0, rows, np.arange(len(queries))), lowest)
    scores = np.empty((len(queries), rows), np.float32)
    scores[found.queries, found.rows] = found.scores
    assert len(found.rows) == scores.size
    return scores, prepared.bound


@given(st.data(), st.sampled_from([1, 3, 64, 384, 1025, 2048]), st.sampled_from([1, 2, 5, 9, 20]))
@settings(max_examples=120, deadline=None)
def test_every_score_of_a_scan_lies_within_its_bound(data: st.DataObject, dimension: int, count: int) -> None:
    vectors, queries = data.draw(matrices(30, dimension)), data.draw(matrices(count, dimension))
    half = to_half(vectors)
    norms = copy_norms(vectors, half)
    kernels: list[Kernel] = [
        FloatKernel(vectors, Norms(row=largest_norm(vectors))),
        HalfKernel(half, norms),
        DeviceKernel(vectors, norms, "cpu"),
        DeviceKernel(half, norms, "cpu"),
    ]
    true = np.array([canonical_scores(vectors, np.arange(30), q[None, :], np.zeros(30, np.int64)) for q in queries])
    for kernel in kernels:
        scores, bound = scores_of(kernel, queries, 30)
        assert (np.abs(scores - true) <= bound.absolute[:, None] + bound.relative * np.abs(scores)).all()
    with pytest.MonkeyPatch.context() as patch:
        # what multiplies large blocks is not what multiplies small ones
        patch.setattr("retrieval.kernel_float._SMALL_BLOCK", 0)
        scores, bound = scores_of(kernels[0], queries, 30)
    assert (np.abs(scores - true) <= bound.absolute[:, None]).all()


@pytest.mark.parametrize("dimension", [1, 384, 1_024, 4_096])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 33])
def test_every_way_to_multiply_gives_the_same_product(dimension: int, count: int) -> None:
    random = np.random.default_rng(dimension)
    vectors = random.standard_normal((2_800, dimension)).astype(np.float32)
    queries = random.standard_normal((count, dimension)).astype(np.float32)
    for rows in (1, 500, 2_800):
        some, out = FloatRows(vectors, as_tensor(vectors))[:rows], np.empty((rows, count), np.float32)
        for with_torch in (True, False):
            scores = product(some, queries, out, with_torch=with_torch)
            assert (scores.dtype, scores.flags.c_contiguous) == (np.float32, True)
            np.testing.assert_allclose(scores, vectors[:rows] @ queries.T, atol=1e-5 * dimension)


def test_torch_multiplies_only_where_it_was_left_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    vectors = np.random.default_rng(1).standard_normal((2_100, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    asked: list[str] = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: asked.append("torch") or linear(*given))
    scores, _ = scores_of(FloatKernel(vectors, Norms(row=1)), vectors[:3], 2_100)
    assert asked == ["torch"]
    try:
        for allow, forbid in (
            (
                lambda: torch.set_float32_matmul_precision("medium"),
                lambda: torch.set_float32_matmul_precision("highest"),
            ),
            (
                lambda: monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
                lambda: monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE"),
            ),
        ):
            allow()
            assert not torch_is_exact()
            again, _ = scores_of(FloatKernel(vectors, Norms(row=1)), vectors[:3], 2_100)
            np.testing.assert_allclose(again, scores, atol=1e-5)
            forbid()
            assert torch_is_exact()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert asked == ["torch"]


def test_a_scan_that_errs_more_than_it_promised_gives_no_answer() -> None:
    """As if a library had multiplied in lower precision without saying so."""
    vectors = np.random.default_rng(1).standard_normal((300, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    days = DayTable.of_rows([dt.date(2024, 5, 1)] * 300)
    careless = Exact(rescorer(vectors, days), FloatKernel(from_half(to_half(vectors)), Norms(row=1)))
    with pytest.raises(InfrastructureError, match=r"retrieval-inexact: .* promised to err by at most") as raised:
        Shard(vectors, days, careless).search(vectors[:2], [(0, 300)] * 2, 10)
    assert raised.value.fatal


def test_the_bounds_of_unit_vectors_are_small_enough_to_tell_rows_apart() -> None:
    for dimension, f32, bf16 in ((384, 3e-5, 0.005), (4096, 3e-4, 0.005)):
        vectors = np.random.default_rng(1).standard_normal((500, dimension)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        half = to_half(vectors)
        norms = copy_norms(vectors, half)
        assert FloatKernel(vectors, norms).prepared(vectors[:3]).bound.absolute.max() < f32
        assert HalfKernel(half, norms).prepared(vectors[:3]).bound.absolute.max() < bf16


def test_a_copy_that_is_not_the_rounding_of_the_rows_widens_the_bound() -> None:
    vectors = np.eye(4, dtype=np.float32)
    half = to_half(vectors)
    assert copy_norms(vectors, half).copy_error < 1e-6
    half[2] = half[1]
    assert copy_norms(vectors, half).copy_error >= np.sqrt(2)


@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 4), np.uint16), np.zeros((4, 4), np.int16), np.full((4, 4), 0x7F80, np.uint16)]
)
def test_a_copy_that_cannot_be_scanned_is_refused(wrong: NDArray[np.uint16]) -> None:
    with pytest.raises(ValueError, match=r"half-precision copy|holds NaN"):
        copy_norms(np.eye(4, dtype=np.float32), wrong)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
def test_rounding_to_half_precision_is_that_of_torch(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
    assert from_half(to_half(array)).tolist() == expected.tolist()


scores32 = st.floats(-4, 4, width=32)


@given(scores32, scores32, st.floats(0, 1), st.sampled_from([0.0, 1 / 255]))
def test_a_row_below_the_threshold_cannot_reach_the_kth_row(
    kth: float, score: float, absolute: float, relative: float
) -> None:
    bound = Bound(np.array([absolute]), relative)
    (threshold,) = bound.threshold(np.array([0]), np.array([kth]))
    lowest_of_kth = kth - relative * abs(kth) - absolute
    highest_of_row = score + relative * abs(score) + absolute
    slack = 1e-12  # of this float64 arithmetic; norms are enlarged by far more
    if score < threshold:
        assert highest_of_row < lowest_of_kth + slack
    assert threshold <= kth
    assert bound.reaches(np.array([0]), np.array([score], np.float32), np.array([highest_of_row - slack])).all()
