"""PositionFeatures against the formulas, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from scipy.fft import dct

from sklearn_mhla import MHLARegressor
from sklearn_mhla.preprocessing import PositionFeatures


def added(kind, lengths, **options):
    """What is appended to sequences of zeros."""
    X = [np.zeros((n, 1)) for n in lengths]
    return [part[:, 1:] for part in PositionFeatures(kind, **options).fit_transform(X)]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("lengths", [[1], [5], [2, 7, 1]])
def test_formulas(lengths, constant):
    lead = [1.0] if constant else []
    options = {"constant": constant}
    for part, n in zip(added("cosine", lengths, n_components=3, **options), lengths, strict=True):
        for t in range(n):
            expected = lead + [math.cos(math.pi * k * (t + 0.5) / n) for k in (1, 2, 3)]
            np.testing.assert_allclose(part[t], expected, atol=1e-15)
    for part, n in zip(
        added("sinusoidal", lengths, n_components=2, **options), lengths, strict=True
    ):
        for t in range(n):
            angles = [t / 10000.0 ** (k / 2) for k in (0, 1)]
            expected = lead + [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            np.testing.assert_allclose(part[t], expected, atol=1e-15)
    for part, n in zip(added("linear", lengths, constant=constant), lengths, strict=True):
        for t in range(n):
            expected = [*lead, -1.0 + 2.0 * t / (n - 1) if n > 1 else 0.0]
            np.testing.assert_allclose(part[t], expected, atol=1e-15)
    for part, n in zip(added("onehot", lengths, constant=constant), lengths, strict=True):
        for t in range(n):
            expected = lead + [float(s == t) for s in range(max(lengths))]
            np.testing.assert_array_equal(part[t], expected)


def test_cosines_in_the_state_are_the_cosine_transform():
    X = reference.make_sequences(0.0, 4, n_tokens=9, token_dim=1)
    Z = PositionFeatures("cosine", 8).fit_transform(X)
    state = np.einsum("ntj,ntk->njk", Z, Z)
    np.testing.assert_allclose(state[:, 0, 1:], dct(X[:, :, 0], axis=1) / 2, atol=1e-13)


def test_order_matters_with_positions_only():
    X = reference.make_sequences(0.0, 200, n_tokens=4, token_dim=1)
    y = X[:, 0, 0]  # the first reading
    plain = MHLARegressor().fit(X, y)
    assert plain.score(X, y) < 0.5
    Z = PositionFeatures("onehot").fit_transform(X)
    assert MHLARegressor().fit(Z, y).score(Z, y) > 1.0 - 1e-9


def test_longer_sequences():
    X = np.zeros((2, 5, 1))
    onehot = PositionFeatures("onehot").fit(X)
    assert onehot.transform(np.zeros((1, 4, 1))).shape == (1, 4, 7)
    with pytest.raises(ValueError, match=r"sequence of 6 tokens.*5 positions"):
        onehot.transform(np.zeros((1, 6, 1)))
    assert PositionFeatures().fit(X).transform(np.zeros((1, 60, 1))).shape == (1, 60, 6)


def test_parameters():
    X = np.zeros((2, 5, 1))
    with pytest.raises(ValueError, match="kind must be one of"):
        PositionFeatures("rotary").fit(X)
    with pytest.raises(ValueError, match="n_components"):
        PositionFeatures(n_components=0).fit(X)
