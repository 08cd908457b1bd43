"""QueryToken: the layout, written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import reference

from sklearn_mhla import MHLARegressor
from sklearn_mhla.preprocessing import PositionFeatures, QueryToken


@pytest.mark.parametrize("summary", ["last", "mean", "cosine", "constant"])
@pytest.mark.parametrize("features", [None, [1], [1, 0]])
def test_layout(summary, features):
    X = reference.make_ragged([3, 1, 4], 2)
    out = QueryToken(summary, 2, features=features).fit_transform(X)
    chosen = [0, 1] if features is None else features
    for before, after in zip(X, out, strict=True):
        if summary == "last":
            summarised = [before[-1][j] for j in chosen]
        elif summary == "mean":
            summarised = [sum(token[j] for token in before) / len(before) for j in chosen]
        elif summary == "cosine":
            T = len(before)
            summarised = [
                sum(before[t][j] * math.cos(math.pi * k * (t + 0.5) / T) for t in range(T)) / T
                for j in chosen
                for k in (0, 1, 2)
            ]
        else:
            summarised = []
        for t, token in enumerate(before):
            np.testing.assert_array_equal(after[t], [*token, 0.0, *np.zeros(len(summarised))])
        np.testing.assert_allclose(after[-1], [0.0, 0.0, 1.0, *summarised], rtol=1e-13, atol=1e-15)
        assert len(after) == len(before) + 1


def test_static_columns():
    frame = pd.DataFrame({"t0": [1.0, 2.0], "age": [30.0, 40.0], "t1": [3.0, 4.0], "dose": [5, 6]})
    query = QueryToken("last", static_columns=[3, 1], n_tokens=2).set_output(transform="pandas")
    out = query.fit_transform(frame)
    expected = [[1, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 1, 3, 5, 30], [2, 0, 0, 0, 0, 4, 0, 0, 0, 0]]
    expected[1] += [0, 1, 4, 6, 40]
    np.testing.assert_array_equal(out.to_numpy(), expected)
    assert list(out.columns[-3:]) == ["query_x0_t2", "static_dose_t2", "static_age_t2"]
    with pytest.raises(ValueError, match="feature names"):
        query.transform(frame[["age", "t0", "t1", "dose"]])


@pytest.mark.parametrize("output", ["pandas", "polars"])
def test_names_of_static_columns_are_not_those_of_tokens(output):
    pytest.importorskip(output)
    query = QueryToken("last", static_columns=[0], n_tokens=2).set_output(transform=output)
    out = query.fit_transform(np.arange(10.0).reshape(2, 5))
    assert len(set(out.columns)) == out.shape[1] == 18


def test_cosines_of_the_query_are_named_and_those_of_the_state():
    """The query's cosines are the state's products of reading and position, divided by T."""
    X = reference.make_sequences(0.0, 5, n_tokens=7, token_dim=2)
    Z = PositionFeatures("cosine", 3).fit_transform(X)  # reading, reading, 1, cosines
    query = QueryToken("cosine", 3, features=[1]).fit_transform(Z)[:, -1]
    state = np.einsum("ntj,ntk->njk", Z, Z)
    np.testing.assert_allclose(query[:, 7:], state[:, 1, 2:] / 7, atol=1e-14)
    table = X.reshape(5, 14)
    model = QueryToken("cosine", 2, n_tokens=7).set_output(transform="pandas")
    frame = model.fit_transform(table)
    for j, k in np.ndindex(2, 3):
        weights = np.cos(np.pi * k * (np.arange(7) + 0.5) / 7) / 7
        np.testing.assert_allclose(frame[f"query_x{j}_cos{k}_t7"], X[:, :, j] @ weights, atol=1e-14)
    assert (frame["query_constant_t7"] == 1.0).all()


def test_lower_degrees_cost_no_trick():
    """With positions, a constant and a query: sums over time, squares and static terms exactly."""
    random = np.random.default_rng(0)
    X = random.standard_normal((400, 6))
    static = random.standard_normal((400, 1))
    weights = random.standard_normal(6)
    y = X @ weights + 2.0 * (X**2).sum(1) + static[:, 0] - 1.0
    Z = PositionFeatures("onehot", n_tokens=6).fit_transform(X)
    table = np.hstack([Z, static])
    query = QueryToken("constant", static_columns=[table.shape[1] - 1], n_tokens=6)
    rows = query.fit_transform(table)
    model = MHLARegressor(n_tokens=7).fit(rows[:300], y[:300])
    assert model.score(rows[300:], y[300:]) > 1.0 - 1e-9


def test_errors():
    X = np.ones((2, 3, 2))
    with pytest.raises(ValueError, match="summary must be one of"):
        QueryToken("max").fit(X)
    with pytest.raises(ValueError, match="n_components == 0"):
        QueryToken("cosine", 0).fit(X)
    with pytest.raises(ValueError, match=r"features must lie in 0\.\.1"):
        QueryToken(features=[2]).fit(X)
    with pytest.raises(ValueError, match="distinct integers"):
        QueryToken(features=[0, 0]).fit(X)
    with pytest.raises(ValueError, match="distinct integers"):
        QueryToken(features=["a"]).fit(X)
    with pytest.raises(ValueError, match="distinct integers"):
        QueryToken(features=[]).fit(X)
    with pytest.raises(ValueError, match="2-D X"):
        QueryToken(static_columns=[0]).fit(X)
    with pytest.raises(ValueError, match="every column"):
        QueryToken(static_columns=[0, 1]).fit(np.ones((3, 2)))
    with pytest.raises(ValueError, match="n_tokens=2 does not divide"):
        QueryToken(static_columns=[0], n_tokens=2).fit(np.ones((3, 4)))
