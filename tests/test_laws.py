"""Algebraic laws that hold for every input, checked on examples that Hypothesis draws."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._sums import Sums
from sklearn_mhla._tokens import check_sequences

METHODS = st.sampled_from(["primal", "dual", "pivoted"])
STATES = st.sampled_from(["sum", "mean"])
ALPHAS = st.sampled_from([0.0, 1e-3, 1.0, 1e3])
OPTIONS = st.fixed_dictionaries(
    {
        "output": st.sampled_from(["last", "sequence"]),
        "causal": st.booleans(),
        "state": STATES,
    }
)


@st.composite
def data(draw, max_rows=40, weighted=False, min_rows=1):
    """Gaussian tokens with an offset, targets, and weights: shapes drawn, numbers seeded.

    Gaussian numbers keep the features in general position, so that tolerances hold;
    deliberately singular designs are in ``tests/solvers/test_solvers.py``.
    """
    n_samples = draw(st.integers(min_rows, max_rows))
    n_tokens, token_dim = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    n_outputs = draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    X = random.standard_normal((n_samples, n_tokens, token_dim))
    y = random.standard_normal((n_samples, n_outputs))
    if not weighted:
        return X, y
    weights = random.integers(0, 4, n_samples)
    weights[draw(st.integers(0, n_samples - 1))] = 1
    return X, y, weights


def row_targets(X, y, options):
    """Targets for ``output``: one per token is the sequence's, plus the token's index."""
    if options["output"] == "last":
        return y
    return y[:, None, :] + np.arange(X.shape[1])[None, :, None]


def well_conditioned(features, limit=1e4):
    """Whether nonzero singular values stay within ``limit``: 1e-10 needs some room."""
    singular = np.linalg.svd(features, compute_uv=False)
    nonzero = singular[singular > 1e-9 * singular[0]]
    return nonzero[0] < limit * nonzero[-1]


def close(computed, expected, tolerance=1e-10, size=0.0):
    """Whether two arrays agree relative to the larger of the second and ``size``."""
    distance = np.linalg.norm(np.asarray(computed) - np.asarray(expected))
    return distance <= tolerance * max(float(np.linalg.norm(expected)), size)


@given(data(weighted=True, min_rows=2), OPTIONS, st.data())
def test_moments_of_two_parts_add_up_to_the_whole(drawn, options, choice):
    X, y, weights = drawn
    cut = choice.draw(st.integers(1, len(X) - 1))

    def moments(rows):
        design = Design(check_sequences(X[rows]), NumpyBackend(), rescale=False, **options)
        repeats = X.shape[1] if options["output"] == "sequence" else 1
        targets = row_targets(X[rows], y[rows], options).reshape(design.n_rows, -1)
        return Sums.from_design(design, targets, np.repeat(weights[rows] + 0.5, repeats)[:, None])

    whole, first, second = (moments(rows) for rows in (slice(None), slice(cut), slice(cut, None)))
    for name in ("gram", "cross", "feature_sum", "weight"):
        parts = getattr(first, name) + getattr(second, name)
        # Cancellation between parts: relative to their own sizes.
        size = np.linalg.norm(getattr(first, name)) + np.linalg.norm(getattr(second, name))
        assert close(parts, getattr(whole, name), 1e-13, size)


@given(data(weighted=True), METHODS, ALPHAS, st.booleans(), OPTIONS)
def test_integer_weights_are_repetitions(drawn, method, alpha, fit_intercept, options):
    X, y, weights = drawn
    repeated = np.repeat(np.arange(len(X)), weights)
    assume(well_conditioned(reference.feature_matrix(X[weights > 0], **options)))
    model = MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept, **options)
    targets = row_targets(X, y, options)
    weighted = model.fit(X, targets, sample_weight=weights).predict(X)
    expected = model.fit(X[repeated], targets[repeated]).predict(X)
    assert close(weighted, expected, size=float(np.linalg.norm(targets)))


@given(data(weighted=True), METHODS, ALPHAS, st.booleans(), st.randoms(use_true_random=False))
def test_order_of_all_tokens_but_the_last_is_irrelevant(
    drawn, method, alpha, fit_intercept, shuffler
):
    X, y, weights = drawn
    assume(well_conditioned(reference.feature_matrix(X[weights > 0])))
    shuffled = X.copy()
    for sequence in shuffled:
        order = list(range(len(sequence) - 1))
        shuffler.shuffle(order)
        sequence[:-1] = sequence[order]
    model = MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept)
    expected = model.fit(X, y, sample_weight=weights).predict(X)
    computed = model.fit(shuffled, y, sample_weight=weights).predict(X)
    assert close(computed, expected, size=float(np.linalg.norm(y)))


@given(data(), METHODS, ALPHAS, st.integers(1, 5), st.booleans())
def test_order_of_the_rows_is_irrelevant(drawn, method, alpha, seed, fit_intercept):
    X, y = drawn
    assume(well_conditioned(reference.feature_matrix(X)))
    order = np.random.default_rng(seed).permutation(len(X))
    model = MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept)
    expected = model.fit(X, y).predict(X)
    computed = model.fit(X[order], y[order]).predict(X)
    assert close(computed, expected, size=float(np.linalg.norm(y)))


@given(data(), METHODS, ALPHAS, st.integers(1, 5), st.booleans())
def test_zero_tokens_in_front_change_nothing(drawn, method, alpha, n_zeros, fit_intercept):
    X, y = drawn
    assume(well_conditioned(reference.feature_matrix(X)))
    padded = np.concatenate([np.zeros((len(X), n_zeros, X.shape[2])), X], axis=1)
    model = MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept)
    expected = model.fit(X, y).predict(X)
    assert close(model.predict(padded), expected, size=float(np.linalg.norm(y)))
    computed = model.fit(padded, y).predict(padded)
    assert close(computed, expected, size=float(np.linalg.norm(y)))


@given(data(), METHODS, ALPHAS, st.booleans(), OPTIONS, st.integers(-100, 100))
@example(
    (reference.make_sequences(0.0, 30), np.ones((30, 1))),
    "primal",
    1e-3,
    True,
    {"output": "last", "causal": True, "state": "sum"},
    -160,
)
def test_scaling_by_a_power_of_two_is_exact(drawn, method, alpha, fit_intercept, options, power):
    """(cZ, alpha c^6) computes, bit for bit, what (Z, alpha) does."""
    X, y = drawn
    c = 2.0**power
    targets = row_targets(X, y, options)
    settings = {"method": method, "fit_intercept": fit_intercept, **options}
    plain = MHLARegressor(alpha=alpha, **settings).fit(X, targets)
    scaled = MHLARegressor(alpha=alpha * c**6, **settings).fit(c * X, targets)
    assert np.array_equal(scaled.coef_ * c**3, plain.coef_)
    assert np.array_equal(scaled.intercept_, plain.intercept_)
    assert np.array_equal(scaled.predict(c * X), plain.predict(X))
    assert (scaled.rank_, scaled.n_iter_) == (plain.rank_, plain.n_iter_)


@given(
    data(),
    METHODS,
    ALPHAS,
    st.booleans(),
    st.floats(1e-30, 1e30, allow_subnormal=False),
)
def test_scaling_by_any_factor(drawn, method, alpha, fit_intercept, c):
    X, y = drawn
    assume(well_conditioned(reference.feature_matrix(X)))
    settings = {"method": method, "fit_intercept": fit_intercept}
    expected = MHLARegressor(alpha=alpha, **settings).fit(X, y).predict(X)
    scaled = MHLARegressor(alpha=alpha * c**6, **settings).fit(c * X, y)
    assert close(scaled.predict(c * X), expected, size=float(np.linalg.norm(y)))


@given(data(), METHODS, ALPHAS, st.booleans(), st.integers(-200, 200))
def test_predictions_are_linear_in_the_targets(drawn, method, alpha, fit_intercept, power):
    """Powers of two are exact; each output is fitted as if it were alone."""
    X, y = drawn
    assume(well_conditioned(reference.feature_matrix(X)))
    model = MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept)
    expected = model.fit(X, y).predict(X)
    assert np.array_equal(model.fit(X, y * 2.0**power).predict(X), expected * 2.0**power)
    alone = [model.fit(X, column).predict(X) for column in y.T]
    assert close(np.stack(alone, axis=1), expected, size=float(np.linalg.norm(y)))


@given(data(weighted=True), ALPHAS, st.booleans(), OPTIONS)
def test_primal_equals_dual_and_the_reference(drawn, alpha, fit_intercept, options):
    X, y, weights = drawn
    features = reference.feature_matrix(X, **options)
    repeats = X.shape[1] if options["output"] == "sequence" else 1
    row_weights = np.repeat(weights, repeats)
    centred = features[row_weights > 0]
    if fit_intercept:
        centred = centred - np.average(centred, axis=0, weights=row_weights[row_weights > 0])
        # One distinct row leaves nothing to fit; its tests are in test_solvers.py.
        assume(np.linalg.norm(centred) > 1e-3 * np.linalg.norm(features))
    assume(well_conditioned(centred))
    targets = row_targets(X, y, options)
    coefs = [
        MHLARegressor(method=method, alpha=alpha, fit_intercept=fit_intercept, **options)
        .fit(X, targets, sample_weight=weights)
        .coef_
        for method in ("primal", "dual")
    ]
    expected, _ = reference.ridge(
        features, targets.reshape(len(features), -1), alpha, fit_intercept, row_weights
    )
    # Outside the row space rounding is divided by alpha alone (see test_solvers.py).
    size = float(np.linalg.norm(expected))
    if alpha > 0.0:
        size += 1e-7 * np.linalg.norm(features, 2) * np.linalg.norm(targets) / alpha
    assert close(coefs[0], coefs[1], 1e-8, size)
    assert close(coefs[0], expected, 1e-8, size)


@given(
    st.integers(1, 3),
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    METHODS,
    STATES,
)
def test_an_invertible_map_of_the_tokens_maps_the_model_onto_itself(
    token_dim, n_tokens, seed, method, state
):
    """With a noise-free teacher and rows >= p, Z A^T and A^-T predict what Z does."""
    random = np.random.default_rng(seed)
    p = token_dim**2 * (token_dim + 1) // 2
    X = random.standard_normal((3 * p, n_tokens, token_dim))
    new = random.standard_normal((20, n_tokens, token_dim))
    value, key_query = reference.make_heads(2, 2, token_dim, seed)
    y = reference.predict_heads(value, key_query, X, state=state)
    rotation, _ = np.linalg.qr(random.standard_normal((token_dim, token_dim)))
    mixing = rotation * random.uniform(0.5, 2.0, token_dim)
    assume(well_conditioned(reference.feature_matrix(X, state=state), 1e3))
    assume(well_conditioned(reference.feature_matrix(X @ mixing.T, state=state), 1e4))
    model = MHLARegressor(method=method, state=state).fit(X @ mixing.T, y)
    expected = reference.predict_heads(value, key_query, new, state=state)
    assert close(model.predict(new @ mixing.T), expected)


@given(data(min_rows=2), METHODS, st.booleans(), st.floats(-1e6, 1e6))
def test_an_intercept_absorbs_a_shift_of_the_targets(drawn, method, weighted, shift):
    X, y = drawn
    weights = np.arange(1, len(X) + 1) if weighted else None
    model = MHLARegressor(method=method, alpha=0.1, fit_intercept=True)
    before = model.fit(X, y, sample_weight=weights).predict(X)
    after = model.fit(X, y + shift, sample_weight=weights).predict(X)
    # Shifted targets carry eps * shift.
    assert close(after - shift, before, size=float(np.linalg.norm(y)) + abs(shift) * len(X))


@given(data(weighted=True), METHODS, st.booleans())
def test_the_gradient_vanishes_at_the_solution(drawn, method, fit_intercept):
    """First-order conditions of the documented objective, on explicit features."""
    X, y, weights = drawn
    features = reference.feature_matrix(X)
    assume(well_conditioned(features[weights > 0]))
    model = MHLARegressor(method=method, alpha=0.5, fit_intercept=fit_intercept)
    model.fit(X, y, sample_weight=weights)
    residual = weights[:, None] * (y - features @ model.coef_.T - model.intercept_)
    size = np.linalg.norm(features, 2) * np.linalg.norm(weights) * np.linalg.norm(y)
    gradient = residual.T @ features - 0.5 * model.coef_
    assert np.linalg.norm(gradient) < 1e-10 * size
    if fit_intercept:
        assert np.linalg.norm(residual.sum(0)) < 1e-10 * size / max(
            1.0, np.linalg.norm(features, 2)
        )


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_a_map_that_is_not_invertible_loses_the_function(method):
    """The law above is about invertible maps: a projection must not pass."""
    X = reference.make_sequences(0.0, 60)
    value, key_query = reference.make_heads(2, 2, 3)
    y = reference.predict_heads(value, key_query, X)
    flat = X * np.array([1.0, 1.0, 0.0])
    predicted = MHLARegressor(method=method).fit(flat, y).predict(flat)
    assert reference.relative_error(predicted, y) > 0.1
