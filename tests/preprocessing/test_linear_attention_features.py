"""LinearAttentionFeatures against the loops of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from sklearn.linear_model import LinearRegression

from sklearn_mhla import MHLARegressor
from sklearn_mhla.preprocessing import LinearAttentionFeatures


@pytest.mark.parametrize("state", ["sum", "mean"])
def test_both_bases(state):
    X = reference.make_ragged([2, 5, 1, 2], 3)
    pairs = [reference.states_and_queries(part, state=state)[0] for part in X]
    for basis, features in [
        ("isometric", reference.isometric_features),
        ("published", reference.published_features),
    ]:
        out = LinearAttentionFeatures(state=state, basis=basis).fit_transform(X)
        np.testing.assert_allclose(out, [features(*pair) for pair in pairs], rtol=1e-13)


def test_least_squares_on_them_is_the_model():
    X = reference.make_sequences(0.5, 60)
    y = reference.make_sequences(0.0, 60, 1, 2, seed=5)[:, 0]
    Phi = LinearAttentionFeatures().fit_transform(X)
    by_hand = LinearRegression(fit_intercept=False).fit(Phi, y)
    np.testing.assert_allclose(MHLARegressor().fit(X, y).coef_, by_hand.coef_, rtol=1e-7)


def test_names():
    features = LinearAttentionFeatures().fit(np.ones((2, 2)))
    names = ["S[x0,x0] q[x0]", "S[x0,x0] q[x1]", "S[x0,x1] q[x0]", "S[x0,x1] q[x1]"]
    assert list(features.get_feature_names_out()[:4]) == names


def test_features_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("sklearn_mhla._backend._free_ram", lambda: 1000)
    features = LinearAttentionFeatures().fit(np.ones((9, 3)))
    with pytest.raises(MemoryError, match="MHLARegressor"):
        features.transform(np.ones((9, 3)))


def test_errors():
    with pytest.raises(ValueError, match="basis must be one of"):
        LinearAttentionFeatures(basis="other").fit(np.ones((2, 2)))
    with pytest.raises(ValueError, match="overflows"):
        LinearAttentionFeatures().fit(np.ones((2, 2))).transform(np.full((2, 2), 1e110))
