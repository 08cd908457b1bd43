"""``return_std`` against the formulas on written-out features, and its coverage in simulation."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import reference

from sklearn_mhla import MHLARegressor


def make_noisy(n_samples=120, noise=0.5, seed=0, n_outputs=2, offset=0.0):
    X = reference.make_sequences(0.3, n_samples, 4, 3, seed=seed)
    clean = reference.predict_heads(*reference.make_heads(2, n_outputs, 3), list(X)) + offset
    random = np.random.default_rng(seed + 100)
    return X, clean + noise * random.standard_normal(clean.shape)


def by_hand(Phi, Y, fresh, alpha, intercept, weights=None):
    """Predictive deviations with explicit inverses; the intercept as an unpenalised column."""
    weights = np.ones(len(Phi)) if weights is None else weights
    ones, new_ones = np.ones((len(Phi), 1)), np.ones((len(fresh), 1))
    design = np.hstack([Phi, ones]) if intercept else Phi
    new = np.hstack([fresh, new_ones]) if intercept else fresh
    penalty = alpha * np.eye(design.shape[1])
    if intercept:
        penalty[-1, -1] = 0.0
    gram = design.T @ (weights[:, None] * design)
    inverse = np.linalg.inv(gram + penalty)
    coef = inverse @ design.T @ (weights[:, None] * Y)
    residual = (weights[:, None] * (Y - design @ coef) ** 2).sum(0)
    dof = np.trace(inverse @ gram)
    noise = np.sqrt(residual / (weights.sum() - dof))
    leverage = np.einsum("ij,jk,ik->i", new, inverse, new)
    return np.sqrt(1.0 + leverage)[:, None] * noise


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_formula(alpha, intercept, weighted, scale):
    X, Y = make_noisy()
    fresh, _ = make_noisy(7, seed=3)
    weights = np.random.default_rng(1).integers(1, 4, len(X)).astype(float) if weighted else None
    model = MHLARegressor(alpha=alpha * scale**6, fit_intercept=intercept)
    model.fit(scale * X, Y, weights)
    prediction, deviation = model.predict(scale * fresh, return_std=True)
    np.testing.assert_array_equal(prediction, model.predict(scale * fresh))
    expected = by_hand(
        reference.feature_matrix(X), Y, reference.feature_matrix(fresh), alpha, intercept, weights
    )
    np.testing.assert_allclose(deviation, expected, rtol=1e-7)


def test_weights_are_repetitions_and_streams_are_fits():
    X, Y = make_noisy()
    counts = np.random.default_rng(1).integers(0, 4, len(X))
    fresh, _ = make_noisy(7, seed=3)
    options = {"alpha": 1.0, "fit_intercept": True}
    weighted = MHLARegressor(**options).fit(X, Y, counts)
    repeated = MHLARegressor(**options).fit(np.repeat(X, counts, 0), np.repeat(Y, counts, 0))
    expected = repeated.predict(fresh, return_std=True)[1]
    np.testing.assert_allclose(weighted.predict(fresh, return_std=True)[1], expected, rtol=1e-9)
    stream = MHLARegressor(**options)
    for part in (slice(0, 50), slice(50, None)):
        stream.partial_fit(X[part], Y[part])
    whole = MHLARegressor(**options).fit(X, Y)
    expected = whole.predict(fresh, return_std=True)[1]
    np.testing.assert_allclose(stream.predict(fresh, return_std=True)[1], expected, rtol=1e-8)
    before = stream.predict(fresh, return_std=True)[1]
    stream.partial_fit(X, Y)  # the same rows again: more is known
    assert (stream.predict(fresh, return_std=True)[1] < before).all()


def test_coverage_on_simulated_data():
    """95 % intervals hold 95 % of new targets, over many data sets."""
    inside = []
    for seed in range(60):
        X, Y = make_noisy(80, seed=seed, n_outputs=1)
        model = MHLARegressor().fit(X, Y)
        fresh, targets = make_noisy(100, seed=1000 + seed, n_outputs=1)
        prediction, deviation = model.predict(fresh, return_std=True)
        inside.append(np.abs(targets - prediction) <= 1.96 * deviation)
    share = np.mean(inside)
    # 60 data sets; t quantiles with 62 degrees of freedom would give 2.00 in place of 1.96.
    assert 0.93 < share < 0.965


def test_noise_is_estimated():
    X, Y = make_noisy(4000, noise=0.25)
    _, deviation = MHLARegressor().fit(X, Y).predict(X[:50], return_std=True)
    assert deviation.min() == pytest.approx(0.25, rel=0.05)


def test_shapes_follow_the_predictions():
    ragged = reference.make_ragged([3, 5, 2, 4] * 20, 2)
    y = [np.sin(part[:, 0]) for part in ragged]
    model = MHLARegressor(output="sequence", alpha=1.0).fit(ragged, y)
    prediction, deviation = model.predict(ragged, return_std=True)
    assert [p.shape for p in prediction] == [s.shape for s in deviation]
    torch = pytest.importorskip("torch")
    X, Y = make_noisy()
    single = MHLARegressor().fit(X, Y[:, 0])
    prediction, deviation = single.predict(torch.from_numpy(X), return_std=True)
    assert isinstance(deviation, torch.Tensor)
    assert deviation.shape == prediction.shape == (120,)


def test_nothing_is_known_outside_the_span():
    X, Y = make_noisy(200)
    X[:, :, 2] = 0.0
    fresh, _ = make_noisy(5, seed=3)
    known = fresh.copy()
    known[:, :, 2] = 0.0
    flat = MHLARegressor().fit(X, Y)
    assert np.isinf(flat.predict(fresh, return_std=True)[1]).all()
    assert np.isfinite(flat.predict(known, return_std=True)[1]).all()
    ridge = MHLARegressor(alpha=1.0).fit(X, Y).predict(fresh, return_std=True)[1]
    expected = by_hand(reference.feature_matrix(X), Y, reference.feature_matrix(fresh), 1.0, False)
    np.testing.assert_allclose(ridge, expected, rtol=1e-7)


def test_an_exact_fit_has_no_noise():
    X, Y = make_noisy(noise=0.0)
    _, deviation = MHLARegressor().fit(X, Y).predict(X, return_std=True)
    assert deviation.max() < 1e-6 * np.abs(Y).max()


def test_pickles_stay_small():
    X, Y = make_noisy()
    model = MHLARegressor().fit(X, Y)
    size = len(pickle.dumps(model))
    expected = model.predict(X, return_std=True)[1]
    copy = pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) == size
    np.testing.assert_array_equal(copy.predict(X, return_std=True)[1], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "dual"},
        {"n_heads": 1, "random_state": 0},
        {"penalty": "nuclear", "alpha": 1.0, "tol": 1e-2},
    ],
    ids=str,
)
def test_fits_without_an_answer_say_so(options):
    X, Y = make_noisy(60)
    model = MHLARegressor(**options).fit(X, Y)
    with pytest.raises(ValueError, match="return_std needs the moments"):
        model.predict(X, return_std=True)


def test_too_few_rows():
    X, Y = make_noisy(15)
    with pytest.raises(ValueError, match=r"15 \(weighted\) rows with 15 degrees of freedom"):
        MHLARegressor(method="primal").fit(X, Y).predict(X, return_std=True)
    _, deviation = MHLARegressor(method="primal", alpha=1.0).fit(X, Y).predict(X, return_std=True)
    assert np.isfinite(deviation).all()
