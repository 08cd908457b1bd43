"""Multi-head linear attention as a torch module, with a state that can be carried on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from sklearn_mhla._backend import to_numpy
from sklearn_mhla._heads import Heads

if TYPE_CHECKING:
    from sklearn_mhla._regressor import MHLARegressor


@dataclass(frozen=True)
class AttentionState:
    """What a model has to remember of the tokens that it has read.

    States of consecutive pieces add up: ``state_a + state_b`` is the state after both.

    Parameters
    ----------
    total : torch.Tensor of shape (n, d, d)
        ``sum_t z_t z_t^T`` of each sequence.
    n_tokens : int
        How many tokens were summed.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla.interop import AttentionState
    >>> piece = AttentionState(torch.eye(2)[None], n_tokens=2)
    >>> (piece + piece).n_tokens
    4
    """

    total: torch.Tensor
    n_tokens: int

    def __add__(self, other: AttentionState) -> AttentionState:
        """State after both pieces."""
        return AttentionState(self.total + other.total, self.n_tokens + other.n_tokens)


class MultiHeadLinearAttention(nn.Module):
    r"""Multi-head linear attention ``y = b + sum_h V_h S Q_h q`` as a torch module.

    The model of :class:`MHLARegressor` with trainable heads. It can read a sequence in pieces:
    the state is all it has to carry on.

    Parameters
    ----------
    token_dim : int
        Width ``d`` of the tokens.
    n_outputs : int
        Outputs ``m``.
    n_heads : int
        Heads ``H``.
    output : {"last", "sequence"}, default="last"
        One output per sequence, read at the last token, or one per token.
    causal : bool, default=True
        For ``output="sequence"``: whether a token reads the state up to itself or that of all
        tokens, those of earlier pieces included.
    state : {"sum", "mean"}, default="sum"
        Whether the state is the sum over tokens or their mean.
    bias : bool, default=True
        Whether there is a constant.
    squeeze : bool, default=False
        Drop the axis of the outputs; for a single output.
    device : torch.device or str, default=None
        Where the parameters live.
    dtype : torch.dtype, default=None
        Their type; None is torch's default.

    Attributes
    ----------
    value : torch.nn.Parameter of shape (n_heads, n_outputs, d)
        Value matrices ``V_h``.
    key_query : torch.nn.Parameter of shape (n_heads, d, d)
        Fused key-query matrices ``Q_h``.
    bias : torch.nn.Parameter of shape (n_outputs,) or None
        The constant.

    See Also
    --------
    sklearn_mhla.MHLARegressor.to_torch : The module of a fitted estimator.
    sklearn_mhla.MHLARegressor.from_torch : The estimator of a module.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla.interop import MultiHeadLinearAttention
    >>> module = MultiHeadLinearAttention(token_dim=3, n_outputs=2, n_heads=4)
    >>> tokens = torch.ones(5, 7, 3)
    >>> _, state = module(tokens[:, :4], return_state=True)
    >>> output = module(tokens[:, 4:], state)
    >>> output.shape, bool(torch.allclose(output, module(tokens)))
    (torch.Size([5, 2]), True)
    """

    def __init__(
        self,
        token_dim: int,
        n_outputs: int,
        n_heads: int,
        *,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        bias: bool = True,
        squeeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if output not in ("last", "sequence") or state not in ("sum", "mean"):
            raise ValueError(
                "output must be 'last' or 'sequence' and state 'sum' or 'mean'; got "
                f"{output!r} and {state!r}."
            )
        if squeeze and n_outputs != 1:
            raise ValueError(f"squeeze=True needs n_outputs=1; got {n_outputs}.")
        self.token_dim, self.output, self.causal, self.state = token_dim, output, causal, state
        self.squeeze = squeeze
        kind = {"device": device, "dtype": dtype}
        self.value = nn.Parameter(torch.empty((n_heads, n_outputs, token_dim), **kind))
        self.key_query = nn.Parameter(torch.empty((n_heads, token_dim, token_dim), **kind))
        self.bias = nn.Parameter(torch.empty((n_outputs,), **kind)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw heads with entries of variance ``1 / d``, with torch's global generator."""
        for parameter in (self.value, self.key_query):
            nn.init.normal_(parameter, std=self.token_dim**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        tokens: torch.Tensor,
        state: AttentionState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Outputs for a batch of sequences, or of their next pieces.

        Parameters
        ----------
        tokens : torch.Tensor of shape (n, T, d)
            Sequences, or the next tokens of sequences.
        state : AttentionState, default=None
            After the earlier tokens; None means that there were none.
        return_state : bool, default=False
            Whether to return the state after these tokens as well.

        Returns
        -------
        output : torch.Tensor of shape (n, n_outputs) or (n, T, n_outputs)
            Without the last axis if ``squeeze``.
        state : AttentionState
            After the last token; only if ``return_state`` is True.
        """
        if tokens.ndim != 3 or tokens.shape[2] != self.token_dim:
            raise ValueError(
                f"tokens must have shape (n, T, {self.token_dim}); got {tuple(tokens.shape)}."
            )
        length = tokens.shape[1]
        read = AttentionState(tokens.mT @ tokens, length)
        after = read if state is None else state + read
        if self.output == "sequence" and self.causal:
            outer = tokens[..., :, None] * tokens[..., None, :]
            states = outer.cumsum(1)
            if state is not None:
                states = states + state.total[:, None]
            counts = torch.arange(
                after.n_tokens - length + 1, after.n_tokens + 1, device=tokens.device
            )[:, None, None]
            queries = tokens
        else:
            states, counts = after.total[:, None], after.n_tokens
            queries = tokens if self.output == "sequence" else tokens[:, -1:]
        if self.state == "mean":
            states = states / counts
        asked = torch.einsum("hkl,ntl->nthk", self.key_query, queries)
        outputs = torch.einsum("haj,nthj->nta", self.value, asked @ states)
        if self.bias is not None:
            outputs = outputs + self.bias
        if self.output == "last":
            outputs = outputs[:, 0]
        if self.squeeze:
            outputs = outputs[..., 0]
        return (outputs, after) if return_state else outputs

    def extra_repr(self) -> str:
        """Text for the representation of the module.

        Returns
        -------
        str
            Sizes and options.
        """
        n_heads, n_outputs, token_dim = self.value.shape
        return (
            f"token_dim={token_dim}, n_outputs={n_outputs}, n_heads={n_heads}, "
            f"output={self.output!r}, causal={self.causal}, state={self.state!r}"
        )


def module_of(model: MHLARegressor, heads: Heads) -> MultiHeadLinearAttention:
    """The module that computes what a fitted estimator predicts."""
    n_heads, n_outputs, token_dim = heads.value.shape
    # Made on "meta", where nothing is drawn: torch's random state stays as it is.
    module = MultiHeadLinearAttention(
        token_dim,
        n_outputs,
        n_heads,
        output=model.output,
        causal=model.causal,
        state=model.state,
        squeeze=model._target_ndim == 0,
        dtype=torch.float64,
        device="meta",
    )
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.value.copy_(torch.tensor(heads.value))
        module.key_query.copy_(torch.tensor(heads.key_query))
        if module.bias is not None:
            module.bias.copy_(torch.tensor(model.intercept_))
    return module


def as_module(model: Any) -> MultiHeadLinearAttention:
    """A module as it is, or that of a fitted estimator."""
    if isinstance(model, MultiHeadLinearAttention):
        return model
    if not hasattr(model, "to_torch"):
        raise TypeError(
            "model must be a fitted MHLARegressor or MHLARegressorCV, or a "
            f"sklearn_mhla.interop.MultiHeadLinearAttention; got {type(model).__name__}."
        )
    module: MultiHeadLinearAttention = model.to_torch()
    return module


def heads_of(module: Any) -> tuple[Heads, np.ndarray]:
    """Copies of the heads and of the constant of a module, in float64."""
    if not isinstance(module, MultiHeadLinearAttention):
        raise TypeError(
            "from_torch needs a sklearn_mhla.interop.MultiHeadLinearAttention; got "
            f"{type(module).__name__}."
        )
    value, key_query = (
        np.array(to_numpy(parameter), dtype=np.float64)
        for parameter in (module.value, module.key_query)
    )
    if module.bias is None:
        return Heads(value, key_query), np.zeros(value.shape[1])
    return Heads(value, key_query), np.array(to_numpy(module.bias), dtype=np.float64)
