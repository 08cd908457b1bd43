"""Gated DeltaNet with the parameter names of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from sklearn_mhla.interop._delta_net import delta_rule
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


class GatedDeltaNet(nn.Module):
    r"""Gated DeltaNet: the delta rule on a state that decays.

    In every head, with keys and queries of norm one, :math:`\beta_t = \sigma(w \cdot x_t)` and
    :math:`\alpha_t = \exp(-e^A \mathrm{softplus}(w' \cdot x_t + b))`,

    .. math:: S'_t = \alpha_t S_{t-1}, \quad S_t = S'_t + \beta_t k_t (v_t - S_t'^T k_t)^T, \quad
              o_t = S_t^T q_t / \sqrt{d_k},

    followed by an RMSNorm of each head and the output projection. Queries, keys and values pass
    through a SiLU; there is neither a convolution nor an output gate.

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

    References
    ----------
    .. [1] S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
       Rule", ICLR 2025, arXiv:2412.06464.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import GatedDeltaNet, hidden_states
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> layer = GatedDeltaNet.from_model(MHLARegressor().fit(X, y))
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
        norm_eps: float | None = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.norm_eps = norm_eps
        self.q_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_k_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_v_dim, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        # e^A uniform in (0, 16), softplus(b) log-uniform in (0.001, 0.1), as in Mamba-2.
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(0, 16).log())
        steps = torch.empty(num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(steps.expm1().log())
        self.o_norm = head_norm(head_v_dim, norm_eps)
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
            silu(split_heads(project(hidden_states), self.num_heads))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        beta = self.b_proj(hidden_states).sigmoid().mT
        rate = self.A_log.exp() * softplus(self.a_proj(hidden_states) + self.dt_bias)
        heads = delta_rule(q, k, v, beta, (-rate).exp().mT)
        output: torch.Tensor = self.o_proj(merge_heads(self.o_norm(heads)))
        return output

    @classmethod
    def from_model(
        cls,
        model: Any,
        hidden_size: int | None = None,
        *,
        norm_eps: float | None = 1e-5,
        c: float = 1e3,
        beta: float = 1e-8,
        gate_bias: float = 20.0,
    ) -> GatedDeltaNet:
        r"""The layer that computes what a fitted model predicts, in a limit.

        As for :class:`DeltaNet`, with the decay switched off. The SiLU acts on queries and keys as
        well, so each head becomes two, which have the key
        :math:`(\mathrm{silu}(z), \mathrm{silu}(-z), c, 0)` and whose queries are
        :math:`(\mathrm{silu}(\pm u), \mathrm{silu}(\mp u), 0, c)` for :math:`u = Q_h z'`; the
        difference of their outputs belongs to :math:`z \cdot u`, because
        :math:`(\mathrm{silu}(x) - \mathrm{silu}(-x)) (\mathrm{silu}(y) - \mathrm{silu}(-y)) = xy`.

        Parameters
        ----------
        model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
            Fitted, with a causal sum as state and no intercept.
        hidden_size : int, default=None
            Width of the layer; None is the smallest, ``max(d + 1, m)``.
        norm_eps : float or None, default=1e-5
            None leaves the norm out. It is harmless anyway: its input is as small as ``beta``.
        c : float, default=1e3
            In units of the tokens; at least 40. The relative error is about ``|z|^2 / c^2``.
        beta : float, default=1e-8
            The relative error of erasing is at most ``T beta``.
        gate_bias : float, default=20.0
            A token is forgotten at the rate ``exp(-gate_bias)``, and the gradient of the gates has
            this factor too.

        Returns
        -------
        GatedDeltaNet
            With twice the heads of the model, in float64, for the input that
            :func:`hidden_states` makes.

        Raises
        ------
        ValueError
            If the layer cannot compute such a model, or is too narrow for it.
        TypeError
            If ``model`` is of another class.
        """
        check_positive(c=c, beta=beta, gate_bias=gate_bias)
        if beta >= 1:
            raise ValueError(f"beta is a sigmoid and must be less than 1; got {beta}.")
        value, key_query, width = heads_to_embed(model, hidden_size)
        n_heads, _, token_dim = value.shape
        head_dim = 2 * token_dim + 2
        layer = cls(width, 2 * n_heads, head_dim, head_dim, norm_eps=norm_eps)
        layer.double()
        norm, scale = harmless_norm(layer.o_norm, c**2 * math.sqrt(head_dim) / beta, "o_norm")
        eye = torch.eye(token_dim, dtype=torch.float64)
        keys = torch.zeros(head_dim, token_dim + 1, dtype=torch.float64)
        keys[: 2 * token_dim, :token_dim] = values = torch.cat([eye, -eye])
        keys[-2, token_dim] = c
        queries = torch.zeros(2 * n_heads, head_dim, token_dim + 1, dtype=torch.float64)
        signed = torch.cat([key_query, -key_query])
        queries[:, : 2 * token_dim, :token_dim] = torch.cat([signed, -signed], dim=1)
        queries[:, -1, token_dim] = c
        readers = scale * torch.cat([value, -value], dim=2)
        writing = torch.zeros_like(layer.b_proj.weight)
        writing[:, token_dim] = math.log(beta) - math.log1p(-beta)
        set_parameters(
            layer,
            {
                "q_proj.weight": projection(list(queries), head_dim, width),
                "k_proj.weight": projection([keys] * 2 * n_heads, head_dim, width),
                "v_proj.weight": projection([values] * 2 * n_heads, head_dim, width),
                "a_proj.weight": torch.zeros_like(layer.a_proj.weight),
                "b_proj.weight": writing,
                "A_log": torch.zeros_like(layer.A_log),
                "dt_bias": torch.full_like(layer.dt_bias, -gate_bias),
                "o_proj.weight": read_out([*readers, *-readers], head_dim, width),
                **norm,
            },
        )
        return layer
