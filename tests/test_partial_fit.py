"""partial_fit of the convex solver: any batching equals fit."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import reference
import skops.io
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla import MHLARegressor, _regressor


def example(n_samples=120, n_outputs=2, output="last"):
    X = reference.make_sequences(0.3, n_samples)
    random = np.random.default_rng(4)
    shape = (n_samples, 5) if output == "sequence" else (n_samples,)
    weights = random.uniform(0.1, 5.0, n_samples)
    weights[7] = 0.0
    return X, 2.0 + random.standard_normal((*shape, n_outputs)), weights


def streamed(model, X, y, weights=None, edges=(0, 31, 32, 80, 120)):
    """The model after one call per batch."""
    for start, stop in pairwise(edges):
        part = slice(start, stop)
        model.partial_fit(X[part], y[part], None if weights is None else weights[part])
    return model


def assert_same_model(computed, expected, tolerance=1e-9):
    assert reference.relative_error(computed.coef_, expected.coef_) < tolerance
    size = max(1.0, np.abs(expected.intercept_).max())
    assert np.abs(computed.intercept_ - expected.intercept_).max() < tolerance * size


@pytest.fixture
def count_solves(monkeypatch):
    """The list grows with every solution of a streamed model."""
    solves = []
    original = _regressor.fit_moments
    monkeypatch.setattr(
        _regressor, "fit_moments", lambda *args: solves.append(1) or original(*args)
    )
    return solves


@pytest.mark.parametrize("output", ["last", "sequence"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_batches_equal_fit(output, weighted, fit_intercept, alpha):
    X, y, weights = example(output=output)
    weights = weights if weighted else None
    model = MHLARegressor(alpha=alpha, fit_intercept=fit_intercept, output=output)
    expected = clone(model).set_params(method="primal").fit(X, y, weights)
    streamed(model, X, y, weights)
    assert_same_model(model, expected)
    assert (model.method_, model.rank_, model.n_features_in_) == ("primal", 18, 3)
    assert reference.relative_error(model.predict(X), expected.predict(X)) < 1e-9
    assert reference.relative_error(model.value_, expected.value_) < 1e-6
    assert model.score(X, y) == pytest.approx(expected.score(X, y), abs=1e-9)


@given(st.lists(st.integers(1, 119), max_size=10), st.integers(0, 100))
def test_any_batching_of_any_order_equals_fit(cuts, seed):
    X, y, weights = example()
    order = np.random.default_rng(seed).permutation(120)
    edges = sorted({0, 120, *cuts})
    edges = [edge for edge in edges if edge == 0 or weights[order][:edge].any()]
    parts = [order[start:stop] for start, stop in pairwise(edges)]
    model = MHLARegressor(alpha=0.1, fit_intercept=True)
    for part in parts:
        if weights[part].any():
            model.partial_fit(X[part], y[part], weights[part])
    assert_same_model(model, clone(model).fit(X, y, weights))


@pytest.mark.parametrize("n_samples", [10, 200])
@pytest.mark.parametrize("n_outputs", [1, 7, 50])
@pytest.mark.parametrize("alpha", [1e-6, 1.0, 1e3])
def test_n09_primal_equals_dual_equals_streaming(n_samples, n_outputs, alpha):
    X = reference.make_sequences(0.0, n_samples)
    y = np.random.default_rng(3).standard_normal((n_samples, n_outputs))
    primal, dual = (
        MHLARegressor(method=method, alpha=alpha).fit(X, y) for method in ("primal", "dual")
    )
    stream = MHLARegressor(alpha=alpha)
    for start in range(0, n_samples, 7):
        stream.partial_fit(X[start : start + 7], y[start : start + 7])
    scale = np.linalg.norm(dual.coef_)
    assert np.linalg.norm(primal.coef_ - dual.coef_) < 1e-8 * scale
    assert np.linalg.norm(stream.coef_ - dual.coef_) < 1e-8 * scale


@pytest.mark.parametrize("n_samples", [10, 40])
def test_n03_weights_and_intercept(n_samples):
    X = reference.make_sequences(0.0, n_samples)
    random = np.random.default_rng(3)
    y, weights = random.standard_normal((n_samples, 7)), random.uniform(0.1, 5.0, n_samples)
    model = MHLARegressor(alpha=0.3, fit_intercept=True)
    expected = reference.ridge(reference.feature_matrix(X), y, 0.3, True, weights)
    streamed(model, X, y, weights, (0, 3, 4, n_samples))
    assert reference.relative_error(model.coef_, expected[0]) < 1e-9
    assert np.abs(model.intercept_ - expected[1]).max() < 1e-9


def test_forms_of_input_may_alternate():
    X, y, _ = example()
    model = MHLARegressor(n_tokens=5)
    model.partial_fit(X[:50].reshape(50, -1), y[:50])
    model.partial_fit(list(X[50:80]), y[50:80]).partial_fit(X[80:], y[80:])
    assert_same_model(model, MHLARegressor().fit(X, y))
    assert model.n_features_in_ == 15


def test_batches_in_other_units():
    """A batch of zeros, tiny ones and large ones: the units of all are those of the largest."""
    X, y, _ = example()
    X[:20], y[:20] = 0.0, 0.0
    X[20:60] *= 1e-3
    X[60:] *= 1e5
    y[80:] *= 1e9
    assert_same_model(streamed(MHLARegressor(), X, y), MHLARegressor(method="dual").fit(X, y), 1e-6)


def test_few_heads_and_the_nuclear_norm_need_no_rows():
    value, key_query = reference.make_heads(2, 2, 3)
    X = reference.make_sequences(0.3, 120)
    y = reference.predict_heads(value, key_query, X)
    y = y + 0.1 * np.random.default_rng(0).standard_normal(y.shape)
    for parameters in (
        {"n_heads": 1, "fit_intercept": True},
        {"n_heads": 2, "alpha": 0.5},
        {"penalty": "nuclear", "alpha": 20.0, "fit_intercept": True, "tol": 1e-3},
    ):
        model = MHLARegressor(random_state=0, **parameters)
        expected = clone(model).set_params(method="primal").fit(X, y)
        streamed(model, X, y)
        assert model.n_heads_ == expected.n_heads_
        assert model.loss_ == pytest.approx(expected.loss_, rel=1e-9)
        assert reference.relative_error(model.predict(X), expected.predict(X)) < 1e-4
        assert not hasattr(model, "rank_")


# When coefficients are computed --------------------------------------------------------------


def test_coefficients_are_solved_once_when_asked_for(count_solves):
    X, y, _ = example()
    model = streamed(MHLARegressor(), X, y)
    check_is_fitted(model)
    repr(model)
    dir(model)
    clone(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert not count_solves
    assert model.coef_ is model.coef_
    model.predict(X)
    assert (model.n_iter_, model.rank_) == (0, 18)
    assert not hasattr(model, "dual_gap_")
    assert len(count_solves) == 1
    assert_same_model(loaded, model, 0.0 + 1e-15)
    assert len(count_solves) == 2
    model.partial_fit(X, y)
    assert "coef_" not in vars(model)
    assert hasattr(model, "coef_")
    assert len(count_solves) == 3


def test_parameters_are_those_of_the_last_call():
    X, y, _ = example()
    model = MHLARegressor(alpha=3.0).partial_fit(X, y)
    model.set_params(alpha=1e9, n_heads=1)
    assert_same_model(model, MHLARegressor(alpha=3.0).fit(X, y))
    model.set_params(alpha=5.0, n_heads=None).partial_fit(X, y)
    twice = np.concatenate([X, X]), np.concatenate([y, y])
    assert_same_model(model, MHLARegressor(alpha=5.0).fit(*twice))


def test_a_solution_that_fails_is_tried_again(monkeypatch):
    X, y, _ = example()
    model = MHLARegressor().partial_fit(X, y)

    def fail(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(_regressor, "fit_moments", fail)
        with pytest.raises(MemoryError, match="no room"):
            model.predict(X)
    assert_same_model(model, MHLARegressor().fit(X, y))


@pytest.mark.parametrize("solved", [False, True])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "skops"])
def test_copies_go_on_alone(how, solved):
    X, y, _ = example()
    model = MHLARegressor(fit_intercept=True).partial_fit(X[:50], y[:50])
    if solved:
        model.predict(X)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        dumped = skops.io.dumps(model)
        trusted = skops.io.get_untrusted_types(data=dumped)
        assert all(name.startswith("sklearn_mhla.") for name in trusted)
        other = skops.io.loads(dumped, trusted=trusted)
    expected = clone(model).fit(X[:50], y[:50])
    other.partial_fit(X[50:], y[50:])
    assert_same_model(model, expected)
    assert_same_model(other, clone(model).fit(X, y))


# After fit, and between solvers --------------------------------------------------------------


def test_a_primal_fit_goes_on():
    X, y, weights = example()
    model = MHLARegressor(method="primal", fit_intercept=True, alpha=0.2)
    expected = clone(model).fit(X, y, weights)
    model.fit(X[:70], y[:70], weights[:70])
    before = model.coef_.copy()
    assert_same_model(model.partial_fit(X[70:], y[70:], weights[70:]), expected)
    assert not np.allclose(before, model.coef_)
    model.fit(X[:70], y[:70], weights[:70])  # fit forgets
    assert np.array_equal(model.coef_, before)


def test_a_fit_without_moments_does_not_go_on():
    X, y, _ = example()
    for model in (
        MHLARegressor().fit(X[:10], y[:10]),  # fewer rows than features: dual
        MHLARegressor(solver="sgd", max_iter=1).fit(X, y).set_params(solver="convex"),
    ):
        before = model.coef_.copy()
        with pytest.raises(ValueError, match="Fit with method='primal' to go on"):
            model.partial_fit(X, y)
        assert np.array_equal(model.coef_, before)


def test_sgd_goes_on_from_a_stream_and_ends_it():
    X, y, _ = example()
    model = MHLARegressor(n_heads=2, fit_intercept=True, random_state=0).partial_fit(X, y)
    best = clone(model).fit(X, y).score(X, y)
    model.set_params(solver="sgd", learning_rate=1e-4).partial_fit(X, y)
    assert model.method_ == "sgd"
    assert not hasattr(model, "gradient_norm_")
    assert model.score(X, y) == pytest.approx(best, abs=1e-2)  # small steps from the optimum
    with pytest.raises(ValueError, match="without moments"):
        model.set_params(solver="convex").partial_fit(X, y)


def test_it_exists_where_moments_or_gradients_do():
    for parameters in ({}, {"method": "primal"}, {"solver": "sgd", "method": "dual"}):
        assert hasattr(MHLARegressor(**parameters), "partial_fit")
    dual = MHLARegressor(method="dual")
    assert not hasattr(dual, "partial_fit")
    with pytest.raises(AttributeError) as caught:
        _ = dual.partial_fit
    assert "needs method='auto' or 'primal'; this MHLARegressor has method='dual'" in str(
        caught.value.__cause__
    )


@pytest.mark.parametrize(
    ("change", "batch", "message"),
    [
        ({}, lambda X, y: (X[:, :, :2], y), "width d=3"),
        ({}, lambda X, y: (X, y[:, 0]), r"y has 1 output\(s\)"),
        ({}, lambda X, y: (X * np.nan, y), "NaN"),
        ({}, lambda X, y: (X, y + np.inf), "infinity"),
        ({}, lambda X, y: (X, y, -np.ones(120)), "must not be negative"),
        ({"alpha": -1.0}, lambda X, y: (X, y), "alpha"),
        ({"state": "mean"}, lambda X, y: (X, y), "state='mean', but the rows so far .*'sum'"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, batch, message):
    X, y, _ = example()
    model = MHLARegressor().partial_fit(X, y)
    model.set_params(**change)
    with pytest.raises(ValueError, match=message):
        model.partial_fit(*batch(X, y))
    assert_same_model(model, MHLARegressor().fit(X, y))


def test_a_first_batch_that_fails_leaves_it_unfitted():
    X, y, _ = example()
    model = MHLARegressor()
    with pytest.raises(ValueError, match="inconsistent"):
        model.partial_fit(X, y[:5])
    assert not hasattr(model, "coef_")
    assert not hasattr(model, "token_dim_")
    with pytest.raises(AttributeError, match="is not fitted yet, so it has no value_"):
        _ = model.value_
    with pytest.raises(AttributeError, match="no attribute 'coef_'"):
        _ = model.coef_


def test_moments_that_do_not_fit_are_refused_at_the_first_batch(monkeypatch):
    from sklearn_mhla._backend import NumpyBackend

    X, y, _ = example()
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 1000)
    with pytest.raises(MemoryError, match="method='primal' needs"):
        MHLARegressor().partial_fit(X, y)


def test_inside_a_pipeline():
    X, y, _ = example()
    flat = StandardScaler().fit_transform(X.reshape(120, -1))
    pipeline = make_pipeline(StandardScaler(), MHLARegressor(n_tokens=5)).fit(flat, y)
    pipeline[-1].partial_fit(pipeline[0].transform(flat), y)
    twice = MHLARegressor(n_tokens=5).fit(np.tile(flat, (2, 1)), np.tile(y, (2, 1)))
    assert reference.relative_error(pipeline.predict(flat), twice.predict(flat)) < 1e-9


def test_on_every_device(device):
    X, y, _ = example()
    model = streamed(MHLARegressor(device=device), X, y)
    other = pickle.loads(pickle.dumps(model))
    assert_same_model(model, MHLARegressor().fit(X, y))
    assert_same_model(other.partial_fit(X, y), model.partial_fit(X, y))
