"""The torch module against the estimator and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sklearn_mhla.interop
from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.interop import AttentionState, MultiHeadLinearAttention

FORMS = [
    {"output": output, "causal": causal, "state": state}
    for output, causal in [("last", True), ("sequence", True), ("sequence", False)]
    for state in ("sum", "mean")
]


def fitted(form, n_outputs=2, fit_intercept=True, **options):
    X, y = make_linear_attention(
        60, n_tokens=6, n_features=3, n_outputs=n_outputs, random_state=0, **form
    )
    model = MHLARegressor(fit_intercept=fit_intercept, heads="svd", **form, **options)
    return model.fit(X, y + 1.5), X


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_t08_module_equals_predict(form, n_outputs, device):
    model, X = fitted(form, n_outputs)
    module = model.to_torch().to(device)
    expected = model.predict(X)
    computed = module(torch.tensor(X, device=device)).detach().cpu().numpy()
    assert computed.shape == expected.shape
    size = abs(expected).max()
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-10 * size)
    single = module.float()(torch.tensor(X, device=device).float()).detach().cpu().numpy()
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [[2], [1, 2, 5]])
def test_t08_states_of_pieces_add_up(form, cuts):
    model, X = fitted(form)
    module = model.to_torch()
    tokens = torch.tensor(X)
    whole, whole_state = module(tokens, return_state=True)
    state, outputs = None, []
    for piece in torch.tensor_split(tokens, cuts, dim=1):
        alone = module(piece, return_state=True)[1]
        before = state
        output, state = module(piece, state, return_state=True)
        outputs.append(output)
        expected = alone if before is None else before + alone
        torch.testing.assert_close(state.total, expected.total)
        assert state.n_tokens == expected.n_tokens
    torch.testing.assert_close(state.total, whole_state.total)
    assert state.n_tokens == whole_state.n_tokens == 6
    if form["output"] == "last":
        torch.testing.assert_close(outputs[-1], whole)
    elif form["causal"]:
        torch.testing.assert_close(torch.cat(outputs, 1), whole)
    else:  # the last piece has seen everything
        torch.testing.assert_close(outputs[-1], whole[:, cuts[-1] :])


def test_parameters_are_the_heads_and_train():
    model, X = fitted({"output": "last"}, n_outputs=2)
    module = model.to_torch()
    names = {name: tuple(value.shape) for name, value in module.named_parameters()}
    n_heads = model.n_heads_
    assert names == {"value": (n_heads, 2, 3), "key_query": (n_heads, 3, 3), "bias": (2,)}
    np.testing.assert_array_equal(module.value.detach().numpy(), model.value_)
    coef = model.coef_.copy()
    module(torch.tensor(X)).square().sum().backward()
    assert all(value.grad.abs().max() > 0 for value in module.parameters())
    torch.optim.SGD(module.parameters(), lr=1e-6).step()
    np.testing.assert_array_equal(model.coef_, coef)  # copies: the estimator stays as it was


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_from_torch_predicts_the_same(form, n_outputs):
    model, X = fitted(form, n_outputs)
    again = MHLARegressor.from_torch(model.to_torch())
    np.testing.assert_allclose(again.predict(X), model.predict(X), atol=1e-9)
    assert again.method_ == "torch"
    assert again.n_features_in_ == again.token_dim_ == 3
    np.testing.assert_array_equal(again.value_, model.value_)


def test_from_torch_of_a_new_module_and_training_on():
    torch_state = torch.random.get_rng_state()
    module = MultiHeadLinearAttention(3, 1, 2, bias=False)
    torch.random.set_rng_state(torch_state)
    model = MHLARegressor.from_torch(module).set_params(random_state=0)
    X, y = make_linear_attention(200, n_tokens=6, n_features=3, random_state=0)
    expected = module(torch.tensor(X).float()).detach().numpy()
    assert expected.shape == model.predict(X).shape == (200, 1)
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-4, atol=1e-4)
    before = model.score(X, y[:, None])
    assert model.partial_fit(X, y[:, None]).score(X, y[:, None]) > before
    with pytest.raises(TypeError, match="MultiHeadLinearAttention; got Linear"):
        MHLARegressor.from_torch(torch.nn.Linear(2, 2))


def test_module_without_intercept_matches_too():
    model, X = fitted({"output": "last"}, 1, fit_intercept=False)
    module = model.to_torch()
    np.testing.assert_allclose(
        module(torch.tensor(X)).detach().numpy(), model.predict(X), atol=1e-9
    )


def test_a_state_of_nothing_changes_nothing():
    model, X = fitted({"output": "sequence", "causal": True, "state": "mean"})
    module, tokens = model.to_torch(), torch.tensor(X)
    nothing = AttentionState(torch.zeros(60, 3, 3, dtype=torch.float64), 0)
    torch.testing.assert_close(module(tokens, nothing), module(tokens))


def test_what_does_not_fit_is_refused():
    module = MultiHeadLinearAttention(3, 1, 1)
    with pytest.raises(ValueError, match="tokens must have shape"):
        module(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match="tokens must have shape"):
        module(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="output must be"):
        MultiHeadLinearAttention(3, 1, 1, output="first")
    with pytest.raises(ValueError, match="squeeze"):
        MultiHeadLinearAttention(3, 2, 1, squeeze=True)
    assert "n_heads=1" in repr(module)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = sklearn_mhla.interop.Nothing
