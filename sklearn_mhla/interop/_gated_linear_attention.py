"""Gated linear attention with the parameter names of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from sklearn_mhla.interop._warm_start import (
    check_positive,
    harmless_norm,
    head_norm,
    heads_to_embed,
    merge_heads,
    projection,
    read_out,
    set_parameters,
    split_heads,
)


class GatedLinearAttention(nn.Module):
    r"""Gated linear attention: a state whose rows decay by gates that depend on the input.

    In every head, with gates :math:`\alpha_t \in (0, 1)^{d_k}`,

    .. math:: S_t = \mathrm{diag}(\alpha_t) S_{t-1} + k_t v_t^T, \quad
              o_t = S_t^T q_t / \sqrt{d_k}, \quad
              \alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau},

    followed by an RMSNorm of each head and the output projection. There is no output gate.

    Parameters
    ----------
    hidden_size : int
        Width of input and output.
    num_heads : int
        Number of heads.
    head_k_dim, head_v_dim : int
        Width of the keys and of the values of one head.
    norm_eps : float or None, default=1e-5
        Added to the mean square in the norm; None leaves the norm out.
    gate_low_rank_dim : int, default=16
        Rank of the projection to the gates.
    gate_logit_normalizer : float, default=16.0
        The exponent's :math:`\tau`.

    References
    ----------
    .. [1] S. Yang, B. Wang, Y. Shen, R. Panda and Y. Kim, "Gated Linear Attention Transformers
       with Hardware-Efficient Training", ICML 2024, arXiv:2312.06635.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import GatedLinearAttention, hidden_states
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> model = MHLARegressor().fit(X, y)
    >>> layer = GatedLinearAttention.from_model(model, norm_eps=None)
    >>> output = layer(hidden_states(torch.tensor(X), layer.hidden_size))
    >>> bool(torch.allclose(output[:, -1, 0], torch.tensor(y), rtol=1e-6))
    True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        *,
        norm_eps: float | None = 1e-5,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.norm_eps = norm_eps
        self.gate_low_rank_dim = gate_low_rank_dim
        self.gate_logit_normalizer = gate_logit_normalizer
        self.q_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_v_dim, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, num_heads * head_k_dim),
        )
        self.g_norm = head_norm(head_v_dim, norm_eps)
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
        q, k, v, gates = (
            split_heads(project(hidden_states), self.num_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj, self.gk_proj)
        )
        q = q / math.sqrt(self.head_k_dim)
        alpha = (logsigmoid(gates) / self.gate_logit_normalizer).exp()
        state = q.new_zeros(())
        outputs = []
        for t in range(hidden_states.shape[1]):
            state = alpha[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
            outputs.append(q[:, :, t, None] @ state)
        output: torch.Tensor = self.o_proj(merge_heads(self.g_norm(torch.cat(outputs, dim=2))))
        return output

    @classmethod
    def from_model(
        cls,
        model: Any,
        hidden_size: int | None = None,
        *,
        norm_eps: float | None = 1e10,
        gate_bias: float = 20.0,
    ) -> GatedLinearAttention:
        r"""The layer that computes what a fitted model predicts.

        The gates are open, :math:`\alpha = \sigma(` ``gate_bias`` :math:`)^{1/16}`, and the norm
        multiplies by a constant in the limit of a large ``norm_eps``. So the layer is exact in
        the limit of both, or of the first if ``norm_eps`` is None. ``gk_proj[0]`` keeps its
        random values, so that the gates can learn.

        Parameters
        ----------
        model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
            Fitted, with a causal sum as state and no intercept.
        hidden_size : int, default=None
            Width of the layer; None is the smallest, ``max(d + 1, m)``.
        norm_eps : float or None, default=1e10
            The relative error of the norm is ``mean(o_t^2) / (2 norm_eps)``. None leaves the norm
            out.
        gate_bias : float, default=20.0
            A token is forgotten at the rate ``exp(-gate_bias) / 16``, and the gradient of the
            gates has this factor too.

        Returns
        -------
        GatedLinearAttention
            In float64, for the input that :func:`hidden_states` makes.

        Raises
        ------
        ValueError
            If the layer cannot compute such a model, or is too narrow for it.
        TypeError
            If ``model`` is of another class.
        """
        check_positive(gate_bias=gate_bias, **({} if norm_eps is None else {"norm_eps": norm_eps}))
        value, key_query, width = heads_to_embed(model, hidden_size)
        n_heads, _, token_dim = value.shape
        layer = cls(width, n_heads, token_dim, token_dim, norm_eps=norm_eps)
        layer.double()
        norm, scale = harmless_norm(layer.g_norm, 1.0, "g_norm")
        tokens = [torch.eye(token_dim, dtype=torch.float64)] * n_heads
        queries = list(math.sqrt(token_dim) * key_query)
        gates = layer.gk_proj[1]
        set_parameters(
            layer,
            {
                "q_proj.weight": projection(queries, token_dim, width),
                "k_proj.weight": projection(tokens, token_dim, width),
                "v_proj.weight": projection(tokens, token_dim, width),
                "gk_proj.1.weight": torch.zeros_like(gates.weight),
                "gk_proj.1.bias": torch.full_like(gates.bias, gate_bias),
                "o_proj.weight": read_out(list(scale * value), token_dim, width),
                **norm,
            },
        )
        return layer
