"""The mLSTM layer with the parameter names of xlstm's large models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import group_norm, logsigmoid

from sklearn_mhla.interop._warm_start import (
    harmless_norm,
    heads_to_embed,
    merge_heads,
    projection,
    read_out,
    set_parameters,
    split_heads,
)


class MultiHeadLayerNorm(nn.Module):
    """Layer normalisation of every head on its own, with a weight and no bias."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))

    def forward(self, merged: torch.Tensor) -> torch.Tensor:
        """Normalised heads; (..., num_heads * head_dim) in and out."""
        rows = merged.flatten(0, -2)
        return group_norm(rows, self.num_heads, self.weight, eps=self.eps).view_as(merged)


class MLSTM(nn.Module):
    r"""Matrix LSTM: linear attention with exponential input gates, forget gates and a normaliser.

    In every head, with :math:`i_t = \exp(\tilde i_t)` and :math:`f_t = \sigma(\tilde f_t)`,

    .. math:: C_t = f_t C_{t-1} + i_t k_t v_t^T, \quad n_t = f_t n_{t-1} + i_t k_t, \quad
              h_t = \frac{C_t^T q_t}{\max(|n_t \cdot q_t|, 1)}, \quad q_t = W_q x_t / \sqrt{d_k},

    where a bounded function, ``cap * tanh(x / cap)``, acts on the gates' inputs. A layer norm of
    each head, a sigmoid output gate and the output projection follow.

    Parameters
    ----------
    hidden_size : int
        Width of input and output; ``embedding_dim`` in xlstm.
    num_heads : int
        Number of heads.
    head_k_dim, head_v_dim : int
        Width of the keys and of the values of one head.
    norm_eps : float or None, default=1e-6
        Added to the variance in the norm; None leaves the norm out.
    gate_soft_cap : float, default=15.0
        Bound on the inputs of the gates.

    References
    ----------
    .. [1] M. Beck, K. Poeppel, P. Lippe, R. Kurle, P. M. Blies, G. Klambauer, S. Boeck and
       S. Hochreiter, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", ICML 2025,
       arXiv:2503.13427.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import MLSTM, hidden_states
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> layer = MLSTM.from_model(MHLARegressor().fit(X, y))
    >>> output = layer(hidden_states(torch.tensor(X), layer.hidden_size))[:, -1, 0]
    >>> bool((output - torch.tensor(y)).abs().max() < 1e-4 * abs(y).max())
    True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        *,
        norm_eps: float | None = 1e-6,
        gate_soft_cap: float = 15.0,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.norm_eps, self.gate_soft_cap = norm_eps, gate_soft_cap
        self.q = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.k = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.v = nn.Linear(hidden_size, num_heads * head_v_dim, bias=False)
        self.ogate_preact = nn.Linear(hidden_size, num_heads * head_v_dim, bias=False)
        self.igate_preact = nn.Linear(hidden_size, num_heads)
        self.fgate_preact = nn.Linear(hidden_size, num_heads)
        self.multihead_norm: nn.Module = nn.Identity()
        if norm_eps is not None:
            self.multihead_norm = MultiHeadLayerNorm(num_heads, head_v_dim, norm_eps)
        self.out_proj = nn.Linear(num_heads * head_v_dim, hidden_size, bias=False)

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
            for project in (self.q, self.k, self.v)
        )
        cap = self.gate_soft_cap
        log_input, forget = (
            cap * torch.tanh(preact(hidden_states).mT / cap)
            for preact in (self.igate_preact, self.fgate_preact)
        )
        # The recurrence written out: token s weighs i_s prod_{s < r <= t} f_r at position t. All
        # is divided by the largest weight exp(m_t), so that nothing overflows.
        forgotten = logsigmoid(forget).cumsum(-1)
        log_weight = (forgotten[..., None] - forgotten[..., None, :]) + log_input[..., None, :]
        future = torch.ones_like(log_weight, dtype=torch.bool).triu(1)
        log_weight = log_weight.masked_fill(future, -math.inf)
        m = log_weight.amax(-1, keepdim=True)
        scores = (log_weight - m).exp() * (q @ k.mT) / math.sqrt(self.head_k_dim)
        normaliser = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-m).exp())
        heads = self.multihead_norm(merge_heads(scores @ v / normaliser))
        gate = self.ogate_preact(hidden_states).sigmoid()
        output: torch.Tensor = self.out_proj(gate * heads)
        return output

    @classmethod
    def from_model(
        cls,
        model: Any,
        hidden_size: int | None = None,
        *,
        norm_eps: float | None = 1e-6,
        gate_soft_cap: float = 60.0,
        forget_bias: float = 20.0,
        input_bias: float = -30.0,
    ) -> MLSTM:
        r"""The layer that computes what a fitted model predicts.

        Forget gates are open, :math:`\sigma(` ``forget_bias`` :math:`)`. Input gates are
        ``exp(input_bias)``, so small that the normaliser is 1 and the norm multiplies by a
        constant. Values :math:`(z, -z)`, read by :math:`(V_h, -V_h) / 2`, have mean zero, so that
        the norm subtracts nothing. The output gate is 1/2.

        Parameters
        ----------
        model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
            Fitted, with a causal sum as state and no intercept.
        hidden_size : int, default=None
            Width of the layer; None is the smallest, ``max(d + 1, m)``.
        norm_eps : float or None, default=1e-6
            The relative error of the norm is ``exp(2 input_bias) mean((S q)^2) / (2 norm_eps)``.
            None leaves the norm out.
        gate_soft_cap : float, default=60.0
            Bound on the inputs of the gates, larger than both biases; xlstm's default is 15.
        forget_bias : float, default=20.0
            A token is forgotten at the rate ``exp(-forget_bias)``, and the gradient of the forget
            gates has this factor too.
        input_bias : float, default=-30.0
            Logarithm of the input gates.

        Returns
        -------
        MLSTM
            In float64, for the input that :func:`hidden_states` makes.

        Raises
        ------
        ValueError
            If the layer cannot compute such a model, or is too narrow for it.
        TypeError
            If ``model`` is of another class.
        """
        for name, bias in [("forget_bias", forget_bias), ("input_bias", input_bias)]:
            if not abs(bias) < gate_soft_cap:
                raise ValueError(
                    f"{name} must lie between -gate_soft_cap and gate_soft_cap={gate_soft_cap}; "
                    f"got {bias}."
                )
        value, key_query, width = heads_to_embed(model, hidden_size)
        n_heads, _, token_dim = value.shape
        layer = cls(
            width,
            n_heads,
            width,
            2 * width,
            norm_eps=norm_eps,
            gate_soft_cap=gate_soft_cap,
        )
        layer.double()
        norm, scale = harmless_norm(layer.multihead_norm, math.exp(-input_bias), "multihead_norm")
        eye = torch.eye(token_dim, dtype=torch.float64)
        queries = list(math.sqrt(layer.head_k_dim) * key_query)
        values = torch.cat([eye, -eye])
        readers = list(scale * torch.cat([value, -value], dim=2))
        input_preact, forget_preact = (
            torch.full_like(
                layer.igate_preact.bias, gate_soft_cap * math.atanh(bias / gate_soft_cap)
            )
            for bias in (input_bias, forget_bias)
        )
        no_weight = torch.zeros_like(layer.igate_preact.weight)
        set_parameters(
            layer,
            {
                "q.weight": projection(queries, layer.head_k_dim, width),
                "k.weight": projection([eye] * n_heads, layer.head_k_dim, width),
                "v.weight": projection([values] * n_heads, layer.head_v_dim, width),
                "igate_preact.weight": no_weight,
                "igate_preact.bias": input_preact,
                "fgate_preact.weight": no_weight,
                "fgate_preact.bias": forget_preact,
                "ogate_preact.weight": torch.zeros_like(layer.ogate_preact.weight),
                "out_proj.weight": read_out(readers, layer.head_v_dim, width),
                **norm,
            },
        )
        return layer
