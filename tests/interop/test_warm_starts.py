"""Recurrences against loops over entries, and warm starts against the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from warm_starts import make_module, make_tokens, relative_error

from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.interop import (
    MLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LinearAttention,
    hidden_states,
)

LAYERS = [LinearAttention, GatedLinearAttention, DeltaNet, GatedDeltaNet, MLSTM]
EXACT = [LinearAttention, GatedLinearAttention, MLSTM]
LIMITS = [DeltaNet, GatedDeltaNet]


# The recurrences, one sequence and one head at a time -------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(o, weight, eps):
    return o / np.sqrt(np.mean(o**2) + eps) * weight


def head_rows(weight, head, n_heads):
    """Rows of a projection that belong to one head."""
    return np.split(weight, n_heads)[head]


def linear_attention_head(p, x, head, n_heads):
    q, k, v = (x @ head_rows(p[f"{name}_proj.weight"], head, n_heads).T for name in "qkv")
    outputs = []
    for t in range(len(x)):
        o = sum((q[t] @ k[s]) * v[s] for s in range(t + 1))
        outputs.append(o / math.sqrt(q.shape[1]))
    return outputs


def gated_linear_attention_head(p, x, head, n_heads):
    q, k, v = (x @ head_rows(p[f"{name}_proj.weight"], head, n_heads).T for name in "qkv")
    gates = x @ p["gk_proj.0.weight"].T @ head_rows(p["gk_proj.1.weight"], head, n_heads).T
    alpha = sigmoid(gates + head_rows(p["gk_proj.1.bias"], head, n_heads)) ** (1 / 16)
    state = np.zeros((k.shape[1], v.shape[1]))
    outputs = []
    for t in range(len(x)):
        for i in range(k.shape[1]):
            for j in range(v.shape[1]):
                state[i, j] = alpha[t, i] * state[i, j] + k[t, i] * v[t, j]
        o = state.T @ q[t] / math.sqrt(q.shape[1])
        outputs.append(rms_norm(o, p["g_norm.weight"], 1e-5))
    return outputs


def delta_head(p, x, head, n_heads, gated):
    q, k, v = (x @ head_rows(p[f"{name}_proj.weight"], head, n_heads).T for name in "qkv")
    if gated:
        q, k = silu(q), silu(k)
        rate = np.log1p(np.exp(x @ p["a_proj.weight"][head] + p["dt_bias"][head]))
        decay = np.exp(-np.exp(p["A_log"][head]) * rate)
    else:
        decay = np.ones(len(x))
    v, beta = silu(v), sigmoid(x @ p["b_proj.weight"][head])
    state = np.zeros((k.shape[1], v.shape[1]))
    outputs = []
    for t in range(len(x)):
        key, query = (a / math.sqrt(a @ a + 1e-6) for a in (k[t], q[t]))
        # The same as S' + beta k (v - S'^T k)^T, from the other side.
        erase = np.eye(len(key)) - beta[t] * np.outer(key, key)
        state = decay[t] * erase @ state + beta[t] * np.outer(key, v[t])
        o = query @ state / math.sqrt(len(key))
        outputs.append(rms_norm(o, p["o_norm.weight"], 1e-5))
    return outputs


def mlstm_head(p, x, head, n_heads, cap=15.0):
    q, k, v = (x @ head_rows(p[f"{name}.weight"], head, n_heads).T for name in "qkv")
    log_i, f = (
        cap * np.tanh((x @ p[f"{name}_preact.weight"][head] + p[f"{name}_preact.bias"][head]) / cap)
        for name in ("igate", "fgate")
    )
    q = q / math.sqrt(q.shape[1])
    C, n = np.zeros((k.shape[1], v.shape[1])), np.zeros(k.shape[1])
    weight = head_rows(p["multihead_norm.weight"], head, n_heads)
    gates = sigmoid(x @ head_rows(p["ogate_preact.weight"], head, n_heads).T)
    outputs = []
    for t in range(len(x)):
        C = sigmoid(f[t]) * C + np.exp(log_i[t]) * np.outer(k[t], v[t])
        n = sigmoid(f[t]) * n + np.exp(log_i[t]) * k[t]
        h = C.T @ q[t] / max(abs(n @ q[t]), 1)
        h = (h - h.mean()) / np.sqrt(h.var() + 1e-6) * weight
        outputs.append(gates[t] * h)
    return outputs


HEADS = {
    LinearAttention: linear_attention_head,
    GatedLinearAttention: gated_linear_attention_head,
    DeltaNet: lambda *arguments: delta_head(*arguments, gated=False),
    GatedDeltaNet: lambda *arguments: delta_head(*arguments, gated=True),
    MLSTM: mlstm_head,
}


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize(("n_tokens", "n_heads"), [(1, 1), (2, 3), (9, 2)])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_forward_is_the_recurrence(layer_class, n_tokens, n_heads, scale):
    torch.manual_seed(0)
    layer = layer_class(4, n_heads, 3, 5).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # norms and gates of a new layer do nothing
            parameter.add_(torch.randn_like(parameter), alpha=0.7)
    x = scale * torch.randn(2, n_tokens, 4, dtype=torch.float64)
    computed = layer(x).detach().numpy()
    p = {name: value.numpy() for name, value in layer.state_dict().items()}
    read = p["out_proj.weight" if layer_class is MLSTM else "o_proj.weight"]
    for row, sequence in zip(computed, x.numpy(), strict=True):
        heads = [HEADS[layer_class](p, sequence, head, n_heads) for head in range(n_heads)]
        expected = np.concatenate(heads, axis=1) @ read.T
        np.testing.assert_allclose(row, expected, rtol=1e-9, atol=1e-9)


def test_large_gates_of_the_mlstm_do_not_overflow():
    layer = MLSTM(4, 2, 3, 4, gate_soft_cap=1e4)
    torch.nn.init.constant_(layer.igate_preact.bias, 500.0)
    torch.nn.init.constant_(layer.fgate_preact.bias, -500.0)
    assert layer(torch.randn(2, 6, 4)).isfinite().all()


# Warm starts ------------------------------------------------------------------------------------


def error_of(layer, dtype=torch.float64, tokens=None, **sizes):
    tokens = make_tokens() if tokens is None else tokens
    layer = layer.to(dtype)
    return relative_error(
        layer(hidden_states(tokens, layer.hidden_size).to(dtype)), tokens, **sizes
    )


# float32 rounds sums of 64 tokens to about 3e-7.
@pytest.mark.parametrize(
    ("layer_class", "options", "double", "single"),
    [
        (LinearAttention, {}, 1e-14, 5e-7),
        (GatedLinearAttention, {"norm_eps": None}, 1e-7, 5e-7),
        (GatedLinearAttention, {}, 2e-6, 2e-6),
        (GatedLinearAttention, {"norm_eps": None, "gate_bias": 36.0}, 1e-12, 5e-7),
        (GatedLinearAttention, {"norm_eps": 1e18, "gate_bias": 36.0}, 1e-12, 5e-7),
        (DeltaNet, {}, 1.5e-5, 1.5e-5),
        (DeltaNet, {"norm_eps": None}, 1.5e-5, 1.5e-5),
        (DeltaNet, {"c": 1e4}, 1e-6, 2e-6),
        (DeltaNet, {"c": 1e6, "beta": 1e-13}, 1.5e-11, 2e-6),
        (GatedDeltaNet, {}, 1.2e-5, 1.2e-5),
        (GatedDeltaNet, {"norm_eps": None}, 1.2e-5, 1.2e-5),
        (GatedDeltaNet, {"c": 1e6, "beta": 1e-13, "gate_bias": 36.0}, 1.5e-11, 2e-6),
        (MLSTM, {"norm_eps": None}, 1e-6, 1e-6),
        (MLSTM, {}, 1e-6, 1e-6),
        (MLSTM, {"forget_bias": 36.0}, 1e-12, 1e-6),
    ],
)
@pytest.mark.parametrize("hidden_size", [None, 8])
def test_layer_computes_the_model(layer_class, options, double, single, hidden_size):
    def made():
        return layer_class.from_model(make_module(), hidden_size, **options)

    assert error_of(made()) < double
    assert error_of(made(), torch.float32) < single


@pytest.mark.parametrize("layer_class", LIMITS)
def test_error_of_the_limit_falls_with_the_square_of_c(layer_class):
    errors = [
        error_of(layer_class.from_model(make_module(), c=c, beta=1e-13, **options))
        for options in [{"gate_bias": 36.0} if layer_class is GatedDeltaNet else {}]
        for c in (1e2, 1e3, 1e4)
    ]
    assert 0.9 < errors[0] / (100 * errors[1]) < 1.1
    assert 0.9 < errors[1] / (100 * errors[2]) < 1.1


@pytest.mark.parametrize("layer_class", LIMITS)
def test_error_of_erasing_is_at_most_linear_in_beta(layer_class):
    for beta in (1e-4, 1e-6):
        options = {"gate_bias": 36.0} if layer_class is GatedDeltaNet else {}
        error = error_of(layer_class.from_model(make_module(), c=1e6, beta=beta, **options))
        assert beta < error < 64 * beta


@given(
    n_heads=st.integers(1, 4),
    n_outputs=st.integers(1, 6),
    token_dim=st.integers(1, 4),
    n_tokens=st.integers(1, 5),
    layer_class=st.sampled_from(LAYERS),
)
def test_all_shapes(n_heads, n_outputs, token_dim, n_tokens, layer_class):
    sizes = {"n_heads": n_heads, "n_outputs": n_outputs, "token_dim": token_dim}
    layer = layer_class.from_model(make_module(**sizes))
    assert layer.hidden_size == max(token_dim + 1, n_outputs)
    tokens = make_tokens(2, n_tokens, token_dim)
    if n_outputs > token_dim:
        assert hidden_states(tokens, layer.hidden_size).shape[-1] == n_outputs
    assert error_of(layer, tokens=tokens, **sizes) < 1e-3  # of cancelling outputs, too


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_fitted_regressor(layer_class, n_outputs):
    X, y = make_linear_attention(150, n_tokens=6, n_features=3, n_outputs=n_outputs, random_state=0)
    model = MHLARegressor().fit(X, y)
    layer = layer_class.from_model(model)
    output = layer(hidden_states(torch.tensor(X), layer.hidden_size))[:, -1, :n_outputs]
    expected = model.predict(X).reshape(len(X), n_outputs)
    np.testing.assert_allclose(output.detach(), expected, atol=5e-5 * abs(expected).max())


@pytest.mark.parametrize("layer_class", LAYERS)
def test_a_head_of_zeros(layer_class):
    module = make_module()
    with torch.no_grad():
        module.key_query[1] = 0
        module.value[1] = 0
    layer, tokens = layer_class.from_model(module), make_tokens()
    output = layer(hidden_states(tokens, layer.hidden_size))[..., :4]
    expected = module(tokens)
    assert (output - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("layer_class", LAYERS)
def test_every_parameter_that_must_move_gets_a_gradient(layer_class):
    layer = layer_class.from_model(make_module()).float()
    layer(hidden_states(make_tokens().float(), layer.hidden_size)).square().sum().backward()
    # The first factor of GLA's gates waits for the second, as in low-rank adapters.
    for name, parameter in layer.named_parameters():
        moves = parameter.grad.abs().max() > 0
        assert parameter.grad.isfinite().all()
        assert moves or name == "gk_proj.0.weight", name


def test_hidden_states_are_tokens_the_constant_and_zeros():
    tokens = make_tokens(2, 3, 4)
    hidden = hidden_states(tokens, 7)
    torch.testing.assert_close(hidden[..., :4], tokens)
    assert (hidden[..., 4] == 1).all()
    assert (hidden[..., 5:] == 0).all()
    with pytest.raises(ValueError, match="hidden_size must be at least 5"):
        hidden_states(tokens, 4)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_models_that_a_recurrence_cannot_compute_are_refused(layer_class):
    with pytest.raises(ValueError, match="state='mean'"):
        layer_class.from_model(make_module(state="mean"))
    with pytest.raises(ValueError, match="causal=False"):
        layer_class.from_model(make_module(causal=False))
    with pytest.raises(ValueError, match="hidden_size must be at least 6"):
        layer_class.from_model(make_module(), 5)
    with_intercept = make_module(bias=True)
    layer_class.from_model(with_intercept)  # of zeros
    torch.nn.init.ones_(with_intercept.bias)
    with pytest.raises(ValueError, match="fit_intercept=False"):
        layer_class.from_model(with_intercept)


@pytest.mark.parametrize(
    ("layer_class", "options"),
    [
        (GatedLinearAttention, {"norm_eps": 0.0}),
        (GatedLinearAttention, {"gate_bias": -1.0}),
        (DeltaNet, {"c": 0.0}),
        (DeltaNet, {"beta": math.inf}),
        (DeltaNet, {"beta": 1.0}),
        (GatedDeltaNet, {"c": -1.0}),
        (GatedDeltaNet, {"beta": 1.5}),
        (MLSTM, {"forget_bias": 60.0}),
        (MLSTM, {"input_bias": -70.0}),
    ],
)
def test_limits_out_of_range_are_refused(layer_class, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        layer_class.from_model(make_module(), **options)
