"""TokenScaler: one mean and one deviation per feature over all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from sklearn.linear_model import Ridge, RidgeCV
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mhla import MHLARegressor, MHLARegressorCV
from sklearn_mhla.preprocessing import PositionFeatures, QueryToken, TokenScaler


def test_statistics_are_over_all_tokens():
    ragged = reference.make_ragged([3, 1, 7], 2)
    scaler = TokenScaler().fit(ragged)
    tokens = [token for sequence in ragged for token in sequence]
    for j in range(2):
        values = [token[j] for token in tokens]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        assert scaler.mean_[j] == pytest.approx(mean)
        assert scaler.scale_[j] == pytest.approx(variance**0.5)
    scaled = np.concatenate(scaler.transform(ragged))
    np.testing.assert_allclose(scaled.mean(0), 0.0, atol=1e-14)
    np.testing.assert_allclose(scaled.std(0), 1.0)


@pytest.mark.parametrize("scale", [1e-300, 1e-110, 1e-5, 1.0, 1e5, 1e110, 1e300])
def test_every_scale_is_brought_to_one(scale):
    X = scale * reference.make_sequences(1.0, 30)
    scaled = TokenScaler().fit_transform(X)
    np.testing.assert_allclose(scaled, TokenScaler().fit_transform(X / scale), rtol=1e-9)


def test_inverse_and_constant_features():
    X = reference.make_sequences(3.0, 10)
    X[:, :, 1] = 5.0
    scaler = TokenScaler().fit(X)
    scaled = scaler.transform(X)
    assert (scaled[:, :, 1] == 0.0).all()
    np.testing.assert_allclose(scaler.inverse_transform(scaled), X, rtol=1e-14)


def test_features_of_very_different_scale():
    X = reference.make_sequences(1.0, 30)
    scales = np.array([1e-200, 1.0, 1e200])
    scaled = TokenScaler().fit_transform(X * scales)
    np.testing.assert_allclose(scaled, TokenScaler().fit_transform(X), rtol=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -3e-200, 1e200])
def test_constant_features_keep_their_scale(value):
    scaler = TokenScaler().fit(np.full((7, 3, 1), value))
    assert scaler.scale_ == 1.0
    assert scaler.mean_ == pytest.approx(value)


def test_agrees_with_standard_scaler_to_the_last_digit():
    X = reference.make_sequences(1.0, 30)
    expected = StandardScaler().fit(X.reshape(-1, 3))
    scaler = TokenScaler().fit(X)
    np.testing.assert_array_equal(scaler.mean_, expected.mean_)
    np.testing.assert_array_equal(scaler.scale_, expected.scale_)


def test_switches():
    X = reference.make_sequences(3.0, 10)
    np.testing.assert_array_equal(TokenScaler(with_mean=False, with_std=False).fit_transform(X), X)
    only_mean = TokenScaler(with_std=False).fit_transform(X)
    np.testing.assert_allclose(only_mean, X - X.reshape(-1, 3).mean(0))


def test_the_input_is_not_changed():
    X = reference.make_sequences(3.0, 10)
    before = X.copy()
    TokenScaler().fit_transform(X)
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("std", [1e-3, 0.3, 20.0])
def test_given_deviation(std):
    X = reference.make_ragged([3, 1, 7], 2)
    scaler = TokenScaler(std=std)
    for scaled, unit in zip(scaler.fit_transform(X), TokenScaler().fit_transform(X), strict=True):
        np.testing.assert_allclose(scaled, std * unit, rtol=1e-13)
    for back, before in zip(scaler.inverse_transform(scaler.transform(X)), X, strict=True):
        np.testing.assert_allclose(back, before, rtol=1e-13, atol=1e-15)
    constant = TokenScaler(with_mean=False, std=std).fit_transform(np.full((2, 3, 1), 7.0))
    np.testing.assert_allclose(constant, 7.0 * std)


def test_deviation_is_positive_and_needs_scaling():
    X = np.ones((2, 3, 1))
    for std in (0.0, -1.0):
        with pytest.raises(ValueError, match="std == "):
            TokenScaler(std=std).fit(X)
    with pytest.raises(ValueError, match=r"std=0\.5 needs with_std=True"):
        TokenScaler(with_std=False, std=0.5).fit(X)


def series(std):
    """Steps after which every position has a linear coefficient of its own."""
    positions = PositionFeatures("onehot", constant=False)
    return make_pipeline(TokenScaler(std=std), positions, QueryToken("constant"))


def token(std):
    """Steps that make a row a single token with a constant."""
    return make_pipeline(TokenScaler(std=std), PositionFeatures("linear"))


@pytest.mark.parametrize(("tokens", "multiplicity"), [(series, 2.0), (token, 3.0)])
def test_small_readings_make_ridge_regression(tokens, multiplicity):
    """The kernel is const + c std^2 <x, x'> + O(std^4): the penalty c std^2 a is Ridge's a."""
    X = reference.make_sequences(1.0, 50, n_tokens=6, token_dim=1)
    if tokens is token:
        X = X.reshape(50, 1, 6)
    y = np.random.default_rng(1).standard_normal(50)
    flat = TokenScaler().fit_transform(X).reshape(50, 6)
    expected = Ridge(3.0).fit(flat, y).predict(flat)
    errors = []
    for std in (0.1, 0.01, 0.001):
        Z = tokens(std).fit_transform(X)
        model = MHLARegressor(alpha=multiplicity * std**2 * 3.0, fit_intercept=True).fit(Z, y)
        errors.append(np.abs(model.predict(Z) - expected).max())
    assert errors[2] < 1e-4
    assert errors[1] < errors[0] / 30.0  # quadratic in std
    assert errors[2] < errors[1] / 30.0


@pytest.mark.parametrize("tokens", [series, token])
def test_a_linear_trend_costs_nothing(tokens):
    """A linear target is predicted as well as by ridge regression, penalties cross-validated."""
    random = np.random.default_rng(3)
    X = random.standard_normal((200, 12, 1)) + 5.0
    y = X[:, :, 0] @ random.standard_normal(12) + random.standard_normal(200) + 40.0
    if tokens is token:
        X = X.reshape(200, 1, 12)
    flat = TokenScaler().fit_transform(X).reshape(200, 12)
    ridge = RidgeCV(np.logspace(-6, 3, 28)).fit(flat[:60], y[:60])

    def score(std):
        Z = tokens(std).fit_transform(X)
        model = MHLARegressorCV(np.logspace(-14, 6, 61), fit_intercept=True).fit(Z[:60], y[:60])
        return model.score(Z[60:], y[60:])

    expected = r2_score(y[60:], ridge.predict(flat[60:]))
    assert expected > 0.8
    assert score(0.003) > expected - 1e-3
    if tokens is token:
        assert score(1.0) < expected - 0.02  # terms of all degrees compete for the penalty
