"""What all token transformers promise: scikit-learn's checks and three forms of input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import reference
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhla import MHLARegressor
from sklearn_mhla.preprocessing import (
    LinearAttentionFeatures,
    PositionFeatures,
    QueryToken,
    TokenScaler,
)

TRANSFORMERS = [
    TokenScaler(),
    TokenScaler(with_mean=False, with_std=False),
    TokenScaler(std=0.1),
    PositionFeatures(),
    PositionFeatures("sinusoidal", constant=False),
    PositionFeatures("linear"),
    PositionFeatures("onehot"),
    QueryToken(),
    QueryToken("mean", features=[0]),
    QueryToken("constant"),
    QueryToken("cosine", 2),
    LinearAttentionFeatures(),
    LinearAttentionFeatures(state="mean", basis="published"),
]


@parametrize_with_checks(TRANSFORMERS)
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=repr)
def test_three_forms_of_input_agree(transformer):
    X = reference.make_sequences(1.0, 6, n_tokens=4, token_dim=2)
    cube = clone(transformer).fit(X).transform(X)
    table = clone(transformer).set_params(n_tokens=4).fit(X.reshape(6, 8))
    flat = table.transform(X.reshape(6, 8))
    ragged = clone(transformer).fit(list(X)).transform(list(X))
    assert flat.shape == (6, len(table.get_feature_names_out()))
    np.testing.assert_array_equal(flat.reshape(cube.shape), cube)
    np.testing.assert_array_equal(np.stack(ragged), cube)


@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=repr)
def test_frames_keep_index_and_get_names(transformer):
    X = reference.make_sequences(1.0, 5, n_tokens=3, token_dim=1)[:, :, 0]
    frame = pd.DataFrame(X, columns=["a", "b", "c"], index=list("vwxyz"))
    model = clone(transformer).set_params(n_tokens=3).set_output(transform="pandas")
    out = model.fit_transform(frame)
    assert list(out.index) == list(frame.index)
    assert list(out.columns) == list(model.get_feature_names_out())
    assert len(set(out.columns)) == out.shape[1]
    plain = clone(transformer).set_params(n_tokens=3).fit_transform(X)
    np.testing.assert_array_equal(out.to_numpy(), plain)


@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=repr)
def test_tensors_in_tensors_out(transformer):
    torch = pytest.importorskip("torch")
    X = reference.make_sequences(0.0, 4, n_tokens=3, token_dim=2)
    expected = clone(transformer).fit_transform(X)
    out = clone(transformer).fit(torch.from_numpy(X)).transform(torch.from_numpy(X))
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=repr)
def test_another_width_is_refused(transformer):
    model = clone(transformer).fit(np.ones((3, 4, 2)))
    with pytest.raises(ValueError, match="d=2"):
        model.transform(np.ones((3, 4, 3)))
    with pytest.raises(ValueError, match="n_tokens=3 does not divide"):
        clone(transformer).set_params(n_tokens=3).fit(np.ones((2, 8)))


def test_no_columns_no_names():
    model = TokenScaler().fit(np.ones((3, 4, 2)))
    with pytest.raises(AttributeError) as error:
        model.get_feature_names_out()
    assert "no columns to name" in str(error.value.__cause__)


def test_the_pipeline_of_the_documentation():
    """Scaled readings, positions, a query: the same model from a table and from 3-D input."""
    X = reference.make_sequences(2.0, 60, n_tokens=5, token_dim=2)
    y = X[:, :, 0] @ np.linspace(-1, 1, 5) + 3.0  # a weighted sum over time

    def steps(n):
        return make_pipeline(
            TokenScaler(n_tokens=n),
            PositionFeatures("onehot", n_tokens=n),
            QueryToken("constant", n_tokens=n),
            MHLARegressor(n_tokens=n and n + 1),
        )

    cube = steps(None).fit(X, y)
    table = steps(5).fit(X.reshape(60, 10), y)
    fresh = reference.make_sequences(2.0, 20, n_tokens=5, token_dim=2, seed=9)
    truth = fresh[:, :, 0] @ np.linspace(-1, 1, 5) + 3.0
    np.testing.assert_allclose(table.predict(fresh.reshape(20, 10)), cube.predict(fresh), 1e-9)
    assert reference.relative_error(cube.predict(fresh), truth) < 0.2
