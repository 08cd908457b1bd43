"""Linear attention with the parameter names of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sklearn_mhla.interop._warm_start import (
    heads_to_embed,
    merge_heads,
    projection,
    read_out,
    set_parameters,
    split_heads,
)


class LinearAttention(nn.Module):
    r"""Causal linear attention :math:`o_t = \sum_{s \le t} (q_t \cdot k_s) v_s / \sqrt{d_k}`.

    Parameters
    ----------
    hidden_size : int
        Width of input and output.
    num_heads : int
        Number of heads.
    head_k_dim, head_v_dim : int
        Width of the keys and of the values of one head.

    See Also
    --------
    MultiHeadLinearAttention : The same functions with fused matrices.

    References
    ----------
    .. [1] A. Katharopoulos, A. Vyas, N. Pappas and F. Fleuret, "Transformers are RNNs: Fast
       Autoregressive Transformers with Linear Attention", ICML 2020, arXiv:2006.16236.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import LinearAttention, hidden_states
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> layer = LinearAttention.from_model(MHLARegressor().fit(X, y))
    >>> output = layer(hidden_states(torch.tensor(X), layer.hidden_size))[:, -1, 0]
    >>> bool((output - torch.tensor(y)).abs().max() < 1e-4 * abs(y).max())
    True
    """

    def __init__(self, hidden_size: int, num_heads: int, head_k_dim: int, head_v_dim: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_v_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_v_dim, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Outputs at all positions.

        Parameters
        ----------
        hidden_states : torch.Tensor of shape (n, T, hidden_size)
            Input.

        Returns
        -------
        torch.Tensor of shape (n, T, hidden_size)
            Output.
        """
        q, k, v = (
            split_heads(project(hidden_states), self.num_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.mT).tril() / math.sqrt(self.head_k_dim)
        output: torch.Tensor = self.o_proj(merge_heads(scores @ v))
        return output

    @classmethod
    def from_model(cls, model: Any, hidden_size: int | None = None) -> LinearAttention:
        """The layer that computes what a fitted model predicts; exact.

        Parameters
        ----------
        model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
            Fitted, with a causal sum as state and no intercept.
        hidden_size : int, default=None
            Width of the layer; None is the smallest, ``max(d + 1, m)``.

        Returns
        -------
        LinearAttention
            In float64, for the input that :func:`hidden_states` makes.

        Raises
        ------
        ValueError
            If the layer cannot compute such a model, or is too narrow for it.
        TypeError
            If ``model`` is of another class.
        """
        value, key_query, width = heads_to_embed(model, hidden_size)
        n_heads, _, token_dim = value.shape
        layer = cls(width, n_heads, token_dim, token_dim)
        layer.double()
        tokens = [torch.eye(token_dim, dtype=torch.float64)] * n_heads
        queries = list(math.sqrt(token_dim) * key_query)
        set_parameters(
            layer,
            {
                "q_proj.weight": projection(queries, token_dim, width),
                "k_proj.weight": projection(tokens, token_dim, width),
                "v_proj.weight": projection(tokens, token_dim, width),
                "o_proj.weight": read_out(list(value), token_dim, width),
            },
        )
        return layer
