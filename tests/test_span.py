"""Spans of implicit features against orthogonal factorisations and exact ranks of explicit ones."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import svd

from sklearn_mhla import _pivoted_cholesky, _span
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._pivoted_cholesky import COVERED, pivoted_cholesky, unit_rows
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla._span import Span
from sklearn_mhla._tokens import check_sequences


def design_of(X, backend=None, **options):
    return Design(check_sequences(X), backend or NumpyBackend(), **options)


def span_of(X, **options):
    return Span.from_design(design_of(X), **options)


def unit_features(X, **options):
    features = reference.feature_matrix(X, **options)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(norms == 0.0, 1.0, norms)


def expected_residual(train, new, **options):
    """Squared distance of unit features from the span, by a singular value decomposition."""
    singular, basis = svd(unit_features(train, **options), full_matrices=False)[1:]
    basis = basis[singular > 1e-9 * max(singular[0], 1e-300)]
    features = unit_features(new, **options)
    outside = features - (features @ basis.T) @ basis
    outside -= (outside @ basis.T) @ basis
    return (outside**2).sum(1)


def one_hot(n_samples, token_dim, n_tokens=6, seed=0):
    random = np.random.default_rng(seed)
    return np.eye(token_dim)[random.integers(0, token_dim, (n_samples, n_tokens))]


def integers(n_samples, token_dim, seed=0, n_tokens=3):
    return np.random.default_rng(seed).integers(-1, 2, (n_samples, n_tokens, token_dim))


def repeated_coordinates(n_samples, center=0.0):
    """Width 6 of which 3 are copies: features of d = 3."""
    return reference.make_sequences(center, n_samples)[:, :, [0, 1, 2, 0, 1, 2]]


def wide_range(n_samples):
    """Rows whose features differ by 1e-12 .. 1e12."""
    X = reference.make_sequences(0.0, n_samples)
    return X * np.logspace(-4, 4, n_samples)[:, None, None]


# Ranks known by algebra, with p = d^2 (d + 1) / 2 features: one token per sequence has the
# C(d + 2, 3) cubic monomials; Gaussian tokens leave nothing undetermined.
RANKS = {
    "one row": (lambda: reference.make_sequences(0.0, 1), 1),
    "rows < p": (lambda: reference.make_sequences(0.0, 10), 10),
    "rows > p": (lambda: reference.make_sequences(0.0, 60), 18),
    "offset": (lambda: reference.make_sequences(30.0, 60), 18),
    "float32": (lambda: reference.make_sequences(0.0, 60).astype(np.float32), 18),
    "ragged": (lambda: reference.make_ragged(list(range(1, 10)) * 6, 3), 18),
    "rows of all sizes": (lambda: wide_range(60), 18),
    "tokens near 1e-90": (lambda: 1e-90 * reference.make_sequences(0.0, 60), 18),
    "tokens near 1e90": (lambda: 1e90 * reference.make_sequences(0.0, 60), 18),
    "one token, d=3": (lambda: reference.make_sequences(0.0, 60, 1), 10),
    "one token, d=6": (lambda: reference.make_sequences(0.0, 200, 1, 6), 56),
    "one token, d=10": (lambda: reference.make_sequences(0.0, 400, 1, 10), 220),
    "repeated coordinates": (lambda: repeated_coordinates(60), 18),
    "repeated coordinates, offset": (lambda: repeated_coordinates(300, 30.0), 18),
    "repeated rows": (lambda: np.tile(reference.make_sequences(0.0, 7), (40, 1, 1)), 7),
    "rows up to scale": (
        lambda: np.concatenate([c * reference.make_sequences(0.0, 7) for c in (1, -2, 1e-3)]),
        7,
    ),
    "width one": (lambda: reference.make_sequences(0.0, 8, 5, 1), 1),
    "one-hot, one token": (lambda: one_hot(50, 5, 1), 5),
    "all zero": (lambda: np.zeros((6, 4, 3)), 0),
    "zero queries": (
        lambda: np.concatenate([reference.make_sequences(0.0, 9), np.zeros((9, 1, 3))], axis=1),
        0,
    ),
}


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("name", RANKS)
def test_rank_known_by_algebra(name, block):
    make, rank = RANKS[name]
    span = span_of(make(), block=block)
    assert span.rank == len(span.pivots) == len(set(span.pivots)) == rank
    assert span.complete


@pytest.mark.parametrize("name", RANKS)
def test_the_rows_themselves_are_covered(name):
    design = design_of(RANKS[name][0]())
    span = Span.from_design(design)
    residual = span.residual(design)
    assert residual.shape == (design.n_rows,)
    assert ((residual >= 0.0) & (residual <= COVERED**2)).all()
    assert span.covers(design).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: integers(40, 4, seed),
        lambda seed: integers(150, 5, seed, 2),
        lambda seed: one_hot(120, 6, 4, seed),
        lambda seed: integers(60, 5, seed)[:, :, [0, 1, 2, 0, 4]],
    ],
    ids=["few rows", "many rows", "one-hot", "equal coordinates"],
)
def test_exact_rank_of_integer_features(make, seed):
    flint = pytest.importorskip("flint")
    X = make(seed)
    exact = flint.fmpz_mat(
        [
            [int(value) for value in reference.published_features(*pair)]
            for sequence in X
            for pair in reference.states_and_queries(sequence)
        ]
    ).rank()
    assert span_of(X).rank == exact


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize(
    ("train", "new"),
    [
        (
            lambda: reference.make_sequences(0.0, 10),
            lambda: reference.make_sequences(0.0, 30, seed=5),
        ),
        (
            lambda: reference.make_sequences(3.0, 12),
            lambda: reference.make_sequences(0.0, 30, seed=5),
        ),
        (lambda: one_hot(25, 6), lambda: one_hot(60, 6, seed=5)),
        (lambda: one_hot(25, 6), lambda: reference.make_sequences(0.0, 20, 4, 6)),
        (lambda: one_hot(9, 6, 2), lambda: integers(60, 6, 5)),
        (lambda: repeated_coordinates(10), lambda: reference.make_sequences(0.0, 20, 4, 6)),
        (lambda: wide_range(12), lambda: reference.make_sequences(0.0, 20, seed=5)),
        (lambda: reference.make_ragged([1, 2, 9, 4], 3), lambda: reference.make_ragged([3, 1], 3)),
    ],
)
def test_residual_is_that_of_an_orthogonal_projection(train, new, block):
    X, Z = train(), new()
    residual = span_of(X, block=block).residual(design_of(Z))
    np.testing.assert_allclose(residual, expected_residual(X, Z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_sequence_output_has_a_row_per_token(causal):
    options = {"output": "sequence", "causal": causal}
    X, Z = reference.make_ragged([2, 5, 3], 4), reference.make_ragged([4, 1, 6], 4, seed=5)
    span = Span.from_design(design_of(X, **options))
    residual = span.residual(design_of(Z, **options))
    expected = expected_residual(X, Z, **options)
    assert residual.shape == (11,)
    assert expected.max() > 1e-3
    np.testing.assert_allclose(residual, expected, rtol=1e-9, atol=1e-12)


def test_zero_rows_are_covered_by_anything():
    zero = design_of(np.zeros((3, 2, 3)))
    assert not span_of(np.zeros((2, 2, 3))).residual(zero).any()
    assert not span_of(reference.make_sequences(0.0, 5)).residual(zero).any()
    assert (span_of(np.zeros((2, 2, 3))).residual(design_of(integers(9, 3, 1))) == 1.0).any()


@pytest.mark.parametrize("center", [0.0, 3.0])
@pytest.mark.parametrize("length", [0.0, 1e-6, 2e-6, 1e-5, 1e-3])
def test_directions_from_a_millionth_up_are_seen(length, center):
    """Training tokens leave the last coordinate free; new ones use it a little.

    To first order their features have a part outside the span proportional to it.
    """
    X = reference.make_sequences(center, 300, 5, 6)
    X[:, :, -1] = 0.0
    new = reference.make_sequences(center, 50, 5, 6, seed=5)
    features = []
    for size in (0.0, 1.0):
        Z = new.copy()
        Z[:, :, -1] *= size * 1e-5
        features.append(np.sqrt(expected_residual(X, Z)))
    scale = length / features[1].min()  # the smallest distance from the span is `length`
    new[:, :, -1] *= 1e-5 * scale
    span = span_of(X)
    assert span.rank == 75  # p at d = 5
    design = design_of(new)
    if length == 0.0:
        assert span.covers(design).all()
        return
    assert not span.covers(design).any()
    distance = np.sqrt(span.residual(design))
    np.testing.assert_allclose(distance, np.sqrt(expected_residual(X, new)), rtol=0.2)


@pytest.mark.parametrize("length", [0.0, 1e-10, 1e-3])
def test_residuals_written_out_see_what_squares_cannot(length):
    """Rows of the span plus ``length`` times a coordinate that is not in it, from any start."""
    X = reference.make_sequences(3.0, 60, 5, 4)
    X[:, :, -1] = 0.0
    rows = unit_rows(design_of(X))
    factor = pivoted_cholesky(rows, NumpyBackend(), tol=1e-14)
    start = np.random.default_rng(0).standard_normal((18, 20))
    rows.query[:20, -1] = length
    distance = factor.basis.distance(rows.take(slice(0, 20)), start)
    np.testing.assert_allclose(distance, length**2, rtol=1e-3, atol=1e-23)


def test_rows_in_doubt_are_measured(monkeypatch):
    X, new = reference.make_sequences(3.0, 12), design_of(reference.make_sequences(3.0, 9, seed=5))
    span = span_of(X)
    expected = span.residual(new)
    monkeypatch.setattr(_span, "_NOISE", 1.0)  # everything is in doubt
    measured = span.residual(new)
    assert (measured != expected).any()
    np.testing.assert_allclose(measured, expected, rtol=1e-10)
    own = span.residual(design_of(X))
    assert (own < 1e-24).all()


def test_what_no_part_sees_counts_in_measured_residuals_too(monkeypatch):
    """Pairs and coordinates that never occur in training, and several parts at once."""
    X = one_hot(9, 6, 2)[:, :, [0, 1, 2, 3, 4, 5, 5]]
    X[:, :, 2] = 0.0
    Z = reference.make_sequences(0.0, 20, 3, 7)
    monkeypatch.setattr(_span, "_NOISE", 1e9)
    residual = span_of(X).residual(design_of(Z))
    np.testing.assert_allclose(residual, expected_residual(X, Z), rtol=1e-9, atol=1e-12)


def test_rank_is_not_inflated_by_rounding(monkeypatch):
    X = reference.make_sequences(30.0, 900, 8, 8)[:, :, [*range(8), 0, 1, 2]]
    assert span_of(X).rank == 288
    monkeypatch.setattr(_pivoted_cholesky, "_DOUBTFUL", 0.0)
    assert span_of(X).rank > 288


def test_independent_parts_and_what_they_leave_unseen():
    X = one_hot(200, 6)[:, :, [0, 1, 2, 3, 4, 5, 5]]  # the last two coordinates are equal
    span = span_of(X)
    assert len(span.parts) == 6
    assert sorted(len(part.coordinates) for part in span.parts) == [1, 1, 1, 1, 1, 2]
    Z = reference.make_sequences(0.0, 20, 3, 7)
    np.testing.assert_allclose(
        span.residual(design_of(Z)), expected_residual(X, Z), rtol=1e-9, atol=1e-12
    )


def test_weights_of_zero_leave_rows_out():
    X = reference.make_sequences(0.0, 12)
    weights = np.array([0.0, 2.0, 1e-9] * 4)
    span = span_of(X, weights=weights)
    assert span.rank == 8
    assert (weights[span.pivots] > 0.0).all()
    covered = span.covers(design_of(X))
    assert (covered == (weights > 0.0)).all()


def test_max_rank_stops_the_search():
    X = one_hot(200, 6)
    full = span_of(X)
    part = span_of(X, max_rank=full.rank - 5)
    assert part.rank == full.rank - 5
    assert full.complete
    assert not part.complete
    assert span_of(X, max_rank=full.rank).complete
    assert not part.covers(design_of(X)).all()


def test_tolerance_does_not_grow_with_rows_beyond_p():
    few, many = reference.make_sequences(0.0, 20), reference.make_sequences(0.0, 2000)
    assert span_of(few).tol == span_of(many).tol == rank_tolerance(18)
    assert rank_tolerance(40_000) < COVERED**2


@pytest.mark.parametrize("block", [1, 7, 64])
def test_factor_reproduces_the_kernel(block):
    X = np.concatenate([integers(60, 4), integers(20, 4), np.zeros((3, 3, 4))])
    rows = unit_rows(design_of(X, rescale=False))
    factor = pivoted_cholesky(rows, NumpyBackend(), tol=1e-14, block=block, keep_rows=True)
    rank = len(factor.pivots)
    lower = np.zeros((len(X), rank))
    for members, piece in factor.pieces:
        lower[members, : len(piece)] = piece.T
    features = unit_features(X)
    np.testing.assert_allclose(lower @ lower.T, features @ features.T, atol=1e-13)
    np.testing.assert_allclose(factor.basis.lower, lower[factor.pivots], atol=1e-13)
    assert not np.triu(factor.basis.lower, 1).any()
    np.testing.assert_allclose(
        rows.norm, np.linalg.norm(reference.feature_matrix(X), axis=1), rtol=1e-13
    )


def test_block_of_one_takes_the_largest_residual():
    X = reference.make_sequences(1.0, 15)
    features = unit_features(X)
    pivots = span_of(X, block=1).pivots
    left = features.copy()
    for pivot in pivots:
        lengths = (left**2).sum(1)
        assert lengths[pivot] >= lengths.max() * (1 - 1e-9)
        direction = left[pivot] / np.linalg.norm(left[pivot])
        left -= np.outer(left @ direction, direction)


def naive_greedy(train, pool, k):
    """Largest residual, again and again, with the projection recomputed every time."""
    chosen = []
    for _ in range(k):
        rows = np.concatenate([train, *[pool[i][None] for i in chosen]])
        residual = expected_residual(rows, pool)
        if residual.max() < 1e-12:
            break
        chosen.append(int(residual.argmax()))
    return chosen


@pytest.mark.parametrize("center", [0.0, 1.0])
def test_suggestions_are_greedy(center):
    train = reference.make_sequences(center, 6)
    pool = reference.make_sequences(center, 40, seed=5)
    suggested = span_of(train).suggest(design_of(pool), 8)
    assert list(suggested) == naive_greedy(train, pool, 8)


def test_suggestions_stop_when_the_pool_is_covered():
    train, pool = one_hot(8, 5), one_hot(300, 5, seed=5)
    span = span_of(train)
    suggested = span.suggest(design_of(pool), 200)
    both = np.concatenate([train, pool[suggested]])
    everything = np.concatenate([train, pool])
    assert 0 < len(suggested) < 200
    assert span_of(both).rank == span.rank + len(suggested) == span_of(everything).rank
    assert span_of(both).covers(design_of(pool)).all()
    assert len(span_of(both).suggest(design_of(pool), 10)) == 0
    assert len(span.suggest(design_of(pool), 3)) == 3
    assert list(span.suggest(design_of(pool), 3)) == list(suggested[:3])


def test_nothing_is_suggested_of_what_brings_nothing():
    train = reference.make_sequences(30.0, 60)
    span = span_of(train)
    assert len(span.suggest(design_of(reference.make_sequences(30.0, 20, seed=5)), 5)) == 0
    assert len(span.suggest(design_of(np.zeros((4, 2, 3))), 5)) == 0


def test_rows_of_any_size_count_alike_in_suggestions():
    train, pool = reference.make_sequences(0.0, 6), reference.make_sequences(0.0, 40, seed=5)
    sizes = np.random.default_rng(0).permutation(np.logspace(-4, 4, 40))[:, None, None]
    span = span_of(train)
    assert list(span.suggest(design_of(pool), 6)) == list(span.suggest(design_of(sizes * pool), 6))


@given(seed=st.integers(0, 2**32 - 1), n_rows=st.integers(1, 25), token_dim=st.integers(1, 4))
def test_what_a_span_does_not_depend_on(seed, n_rows, token_dim):
    random = np.random.default_rng(seed)
    X = random.integers(-1, 2, (n_rows, 3, token_dim)).astype(float)
    Z = random.integers(-1, 2, (10, 3, token_dim)).astype(float)
    span = span_of(X)
    residual = span.residual(design_of(Z))
    np.testing.assert_allclose(residual, expected_residual(X, Z), atol=1e-11)
    shuffled = span_of(random.permutation(X) * random.uniform(0.1, 10.0))
    assert shuffled.rank == span.rank
    # An invertible map of the tokens maps spans to spans; lengths outside change.
    mixing = np.linalg.qr(random.standard_normal((token_dim, token_dim)))[0]
    mixed = span_of(X @ mixing.T).residual(design_of(Z @ mixing.T))
    np.testing.assert_allclose(mixed, residual, atol=1e-11)


@pytest.mark.parametrize(
    "train", [lambda: one_hot(80, 5), lambda: reference.make_sequences(3.0, 12)]
)
def test_torch_computes_the_same(train, device):
    pytest.importorskip("torch")
    backend = TorchBackend(device)
    X = train()
    Z = reference.make_sequences(0.0, 20, 4, X.shape[2])
    ours, theirs = span_of(X), Span.from_design(design_of(X, backend))
    assert ours.rank == theirs.rank
    np.testing.assert_allclose(
        theirs.residual(design_of(Z, backend)), ours.residual(design_of(Z)), atol=1e-11
    )
    assert len(theirs.suggest(design_of(Z, backend), 4)) == 4


def test_progress(capsys):
    span_of(one_hot(80, 5), verbose=True)
    assert "pivots" in capsys.readouterr().err
