"""A model and data for the tests of warm starts."""

from __future__ import annotations

import numpy as np
import torch
from reference import make_heads, make_sequences, predict_heads

from sklearn_mhla.interop import MultiHeadLinearAttention

N_HEADS, N_OUTPUTS, TOKEN_DIM, N_TOKENS = 3, 4, 5, 64


def make_module(n_heads=N_HEADS, n_outputs=N_OUTPUTS, token_dim=TOKEN_DIM, **form):
    """The torch module of random heads, in float64."""
    value, key_query = make_heads(n_heads, n_outputs, token_dim)
    form = {"output": "sequence", "bias": False} | form
    module = MultiHeadLinearAttention(token_dim, n_outputs, n_heads, **form).double()
    with torch.no_grad():
        module.value.copy_(torch.tensor(value))
        module.key_query.copy_(torch.tensor(key_query))
    return module


def make_tokens(n_samples=2, n_tokens=N_TOKENS, token_dim=TOKEN_DIM):
    """Gaussian sequences."""
    return torch.tensor(make_sequences(0.0, n_samples, n_tokens, token_dim))


def relative_error(output, tokens, **sizes):
    """Largest difference from the definition, in parts of the largest output."""
    size = {"n_heads": N_HEADS, "n_outputs": N_OUTPUTS, "token_dim": TOKEN_DIM} | sizes
    value, key_query = make_heads(**size)
    expected = predict_heads(value, key_query, tokens.numpy(), output="sequence")
    expected = expected.reshape(*tokens.shape[:2], size["n_outputs"])
    difference = output[..., : size["n_outputs"]].detach().double().numpy() - expected
    return abs(difference).max() / np.abs(expected).max()
