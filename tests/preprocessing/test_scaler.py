"""TokenScaler: one mean and one deviation per feature over all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from sklearn.preprocessing import StandardScaler

from sklearn_mhla.preprocessing import TokenScaler


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
