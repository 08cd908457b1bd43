"""The delta rule, and DeltaNet with the parameter names of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

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


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:
    """Recurrence ``S <- alpha S``, ``S <- S + beta k (v - S^T k)^T``, ``o = S^T q / sqrt(d_k)``.

    Queries, keys and values have the shape (n, heads, T, dim), ``beta`` and ``alpha`` the shape
    (n, heads, T). Queries and keys are divided by their norms first.
    """
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q / math.sqrt(q.shape[-1])
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        if alpha is not None:
            state = alpha[:, :, t, None, None] * state
        key = k[:, :, t, None]
        update = beta[:, :, t, None, None] * (v[:, :, t, None] - key @ state)
        state = state + key.mT * update
        outputs.append(q[:, :, t, None] @ state)
    return torch.cat(outputs, dim=2)


class DeltaNet(nn.Module):
    r"""DeltaNet: every token corrects what the state answers to its key.

    In every head, with keys and queries of norm one and :math:`\beta_t = \sigma(w \cdot x_t)`,

    .. math:: S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^T k_t)^T, \quad
              o_t = S_t^T q_t / \sqrt{d_k},

    followed by an RMSNorm of each head and the output projection. Values pass through a SiLU;
    there is neither a convolution nor an output gate.

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
    .. [1] S. Yang, B. Wang, Y. Zhang, Y. Shen and Y. Kim, "Parallelizing Linear Transformers with
       the Delta Rule over Sequence Length", NeurIPS 2024, arXiv:2406.06484.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import DeltaNet, hidden_states
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> layer = DeltaNet.from_model(MHLARegressor().fit(X, y))
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
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
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
            split_heads(project(hidden_states), self.num_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        beta = self.b_proj(hidden_states).sigmoid().mT
        heads = delta_rule(q, k, silu(v), beta)
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
    ) -> DeltaNet:
        r"""The layer that computes what a fitted model predicts, in a limit.

        Keys :math:`(z, c, 0)` and queries :math:`(Q_h z, 0, c)` have a norm that depends little on
        the token, and are read off as :math:`k \cdot q = z^T Q_h z' / c^2`. A small
        :math:`\beta` writes without erasing. Values :math:`(\mathrm{silu}(z), \mathrm{silu}(-z))`
        are read by :math:`(V_h, -V_h)`, as :math:`\mathrm{silu}(x) - \mathrm{silu}(-x) = x`. The
        factor :math:`c^2 \sqrt{d_k} / \beta` is left to the weight of the norm, or to ``o_proj``.

        Parameters
        ----------
        model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
            Fitted, with a causal sum as state and no intercept.
        hidden_size : int, default=None
            Width of the layer; None is the smallest, ``max(d + 1, m)``.
        norm_eps : float or None, default=1e-5
            None leaves the norm out. It is harmless anyway: its input is as small as ``beta``.
        c : float, default=1e3
            In units of the tokens. The relative error is about ``|z|^2 / c^2``.
        beta : float, default=1e-8
            The relative error of erasing is at most ``T beta``.

        Returns
        -------
        DeltaNet
            In float64, for the input that :func:`hidden_states` makes.

        Raises
        ------
        ValueError
            If the layer cannot compute such a model, or is too narrow for it.
        TypeError
            If ``model`` is of another class.
        """
        check_positive(c=c, beta=beta)
        if beta >= 1:
            raise ValueError(f"beta is a sigmoid and must be less than 1; got {beta}.")
        value, key_query, width = heads_to_embed(model, hidden_size)
        n_heads, _, token_dim = value.shape
        layer = cls(width, n_heads, token_dim + 2, 2 * token_dim, norm_eps=norm_eps)
        layer.double()
        norm, scale = harmless_norm(
            layer.o_norm, c**2 * math.sqrt(layer.head_k_dim) / beta, "o_norm"
        )
        eye = torch.eye(token_dim, dtype=torch.float64)
        with_constant = torch.zeros(2, token_dim + 2, token_dim + 1, dtype=torch.float64)
        with_constant[0, token_dim, token_dim] = with_constant[1, token_dim + 1, token_dim] = c
        keys, queries = with_constant[0], with_constant[1].repeat(n_heads, 1, 1)
        keys[:token_dim, :token_dim] = eye
        queries[:, :token_dim, :token_dim] = key_query
        values = torch.cat([eye, -eye])
        readers = scale * torch.cat([value, -value], dim=2)
        writing = torch.zeros_like(layer.b_proj.weight)
        writing[:, token_dim] = math.log(beta) - math.log1p(-beta)
        set_parameters(
            layer,
            {
                "q_proj.weight": projection(list(queries), layer.head_k_dim, width),
                "k_proj.weight": projection([keys] * n_heads, layer.head_k_dim, width),
                "v_proj.weight": projection([values] * n_heads, layer.head_v_dim, width),
                "b_proj.weight": writing,
                "o_proj.weight": read_out(list(readers), layer.head_v_dim, width),
                **norm,
            },
        )
        return layer
