"""ONNX graphs, run by onnxruntime, against `predict`."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from reference import make_heads, make_sequences, predict_heads
from sklearn.linear_model import Ridge

from sklearn_mhla import MHLARegressor, MHLARegressorCV
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.interop import MultiHeadLinearAttention, to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

FORMS = [
    {"output": output, "causal": causal, "state": state}
    for output, causal in [("last", True), ("sequence", True), ("sequence", False)]
    for state in ("sum", "mean")
]


def run(proto, X):
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(["y"], {"X": X})[0]


def fitted(form, n_outputs, convert=lambda X: X, **options):
    X, y = make_linear_attention(
        80, n_tokens=6, n_features=3, n_outputs=n_outputs, random_state=0, **form
    )
    return MHLARegressor(fit_intercept=True, heads="svd", **form, **options).fit(convert(X), y + 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_graph_equals_predict(form, n_outputs, dtype, tolerance):
    model = fitted(form, n_outputs)
    proto = to_onnx(model, dtype=dtype)
    for n_samples, n_tokens in [(1, 1), (1, 9), (7, 1), (5, 40)]:  # not those of the fit
        X = make_sequences(0.3, n_samples, n_tokens)
        expected = model.predict(X)
        computed = run(proto, X.astype(dtype))
        assert computed.shape == expected.shape
        assert computed.dtype == dtype
        np.testing.assert_allclose(computed, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_flat_rows(form, n_outputs):
    model = fitted(form, n_outputs, lambda X: X.reshape(len(X), -1), n_tokens=6)
    X = make_sequences(0.3, 5, 6)
    expected = model.predict(X.reshape(5, -1))
    flat = run(to_onnx(model), X.reshape(5, -1).astype("float32"))
    assert flat.shape == expected.shape
    np.testing.assert_allclose(flat, expected, rtol=0, atol=1e-5 * abs(expected).max())
    deep = run(to_onnx(model, flat=False), X.astype("float32"))
    np.testing.assert_allclose(deep, flat, rtol=0, atol=1e-5 * abs(expected).max())


def test_flat_rows_of_one_token():
    X = make_sequences(0.0, 60, 1)[:, 0]
    model = MHLARegressor().fit(X, X[:, 0] ** 3)
    computed = run(to_onnx(model), X.astype("float32"))
    np.testing.assert_allclose(computed, X[:, 0] ** 3, atol=1e-4 * abs(X[:, 0] ** 3).max())


@pytest.mark.parametrize("form", FORMS)
def test_module_equals_the_definition(form):
    import torch

    value, key_query = make_heads(2, 2, 3)
    module = MultiHeadLinearAttention(3, 2, 2, bias=False, **form).double()
    with torch.no_grad():
        module.value.copy_(torch.tensor(value))
        module.key_query.copy_(torch.tensor(key_query))
    X = make_sequences(0.0, 3, 5)
    expected = predict_heads(value, key_query, X, **form)
    computed = run(to_onnx(module, dtype="float64"), X)
    assert computed.shape == ((3, 2) if form["output"] == "last" else (3, 5, 2))
    np.testing.assert_allclose(computed.reshape(-1, 2), expected, rtol=1e-10, atol=1e-10)


def test_cross_validated_model():
    X, y = make_linear_attention(80, n_tokens=6, n_features=3, noise=0.1, random_state=0)
    model = MHLARegressorCV().fit(X, y)
    expected = model.predict(X)
    computed = run(to_onnx(model), X.astype("float32"))
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_zero_tokens_in_front_change_nothing():
    model = fitted({"output": "last"}, 2)
    X = make_sequences(0.0, 4, 5).astype("float32")
    padded = np.concatenate([np.zeros((4, 3, 3), "float32"), X], axis=1)
    proto = to_onnx(model)
    np.testing.assert_allclose(run(proto, padded), run(proto, X), rtol=1e-5, atol=1e-5)


def test_saved_file_and_its_description(tmp_path):
    model = fitted({"output": "sequence"}, 2)
    onnx.save(to_onnx(model), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    (X,), (y,) = session.get_inputs(), session.get_outputs()
    assert (X.name, X.shape, X.type) == ("X", ["n", "n_tokens", 3], "tensor(float)")
    assert (y.name, y.shape, y.type) == ("y", ["n", "n_tokens", 2], "tensor(float)")
    sequences = make_sequences(0.0, 4, 5)
    np.testing.assert_allclose(
        session.run(None, {"X": sequences.astype("float32")})[0],
        model.predict(sequences),
        atol=1e-5 * abs(model.predict(sequences)).max(),
    )


def test_errors(monkeypatch):
    model = fitted({"output": "last"}, 1)
    with pytest.raises(TypeError, match="got Ridge"):
        to_onnx(Ridge())
    with pytest.raises(ValueError, match="dtype must be"):
        to_onnx(model, dtype="int32")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="pip install onnx"):
        to_onnx(model)
