"""What the warm starts of all layers share: heads to embed, hidden states, the axis of heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sklearn_mhla.interop._module import as_module


def hidden_states(tokens: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Tokens as the warm-started layers read them: followed by the constant 1, then by zeros.

    Parameters
    ----------
    tokens : torch.Tensor of shape (..., T, d)
        Tokens as the model of the warm start read them.
    hidden_size : int
        Width of the layer, at least ``d + 1``.

    Returns
    -------
    torch.Tensor of shape (..., T, hidden_size)
        Input of the layer. Its output ``y`` is in the first ``m`` of ``hidden_size`` coordinates.

    Raises
    ------
    ValueError
        If ``hidden_size`` is too small.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mhla.interop import hidden_states
    >>> hidden_states(torch.tensor([[2.0, 3.0]]), 4)
    tensor([[2., 3., 1., 0.]])
    """
    free = hidden_size - tokens.shape[-1]
    if free < 1:
        raise ValueError(
            f"hidden_size must be at least {tokens.shape[-1] + 1}, the width of the tokens and "
            f"one for the constant 1; got {hidden_size}."
        )
    padded = nn.functional.pad(tokens, (0, free))
    padded[..., tokens.shape[-1]] = 1.0
    return padded


def heads_to_embed(model: Any, hidden_size: int | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Value matrices, key-query matrices of spectral norm one, and the width of the layer."""
    module = as_module(model)
    if module.state != "sum" or not (module.causal or module.output == "last"):
        raise ValueError(
            "Recurrent layers sum over the tokens up to each position, so a model can start them "
            f"only with state='sum' and causal=True; got state={module.state!r}, "
            f"causal={module.causal}."
        )
    if module.bias is not None and module.bias.any():
        raise ValueError(
            "The layers have no constant to hold the intercept of the model; fit it with "
            "fit_intercept=False, or subtract the mean of the targets before."
        )
    value, key_query = (
        parameter.detach().to("cpu", torch.float64)
        for parameter in (module.value, module.key_query)
    )
    norms = torch.linalg.matrix_norm(key_query, ord=2)[:, None, None]
    norms = torch.where(norms == 0, 1.0, norms)
    _, n_outputs, token_dim = value.shape
    narrowest = max(token_dim + 1, n_outputs)
    if hidden_size is not None and hidden_size < narrowest:
        raise ValueError(
            f"hidden_size must be at least {narrowest} for tokens of width {token_dim}, a constant "
            f"and {n_outputs} output(s); got {hidden_size}."
        )
    return value * norms, key_query / norms, hidden_size or narrowest


def projection(blocks: list[torch.Tensor], head_dim: int, hidden_size: int) -> torch.Tensor:
    """Weight that maps hidden states to heads: block ``h`` at the upper left of head ``h``."""
    weight = torch.zeros(len(blocks), head_dim, hidden_size, dtype=torch.float64)
    for head, block in zip(weight, blocks, strict=True):
        head[: block.shape[0], : block.shape[1]] = block
    return weight.flatten(0, 1)


def read_out(blocks: list[torch.Tensor], head_dim: int, hidden_size: int) -> torch.Tensor:
    """Weight that maps heads to outputs: the transpose of a projection."""
    return projection([block.mT for block in blocks], head_dim, hidden_size).mT


def set_parameters(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Copy these into the parameters of the layer; the others stay as they were drawn."""
    layer.load_state_dict(layer.state_dict() | values)


def harmless_norm(
    norm: nn.Module, scale: float, name: str
) -> tuple[dict[str, torch.Tensor], float]:
    """Weights with which a norm of small inputs multiplies by ``scale``; a factor left to do.

    ``x / sqrt(mean(x^2) + eps)`` is ``x / sqrt(eps)`` up to ``mean(x^2) / (2 eps)``.
    """
    if isinstance(norm, nn.Identity):
        return {}, scale
    weight = torch.full_like(norm.weight, scale * math.sqrt(norm.eps))
    return {f"{name}.weight": weight}, 1.0


def check_positive(**limits: float) -> None:
    """Refuse limits that are not positive and finite."""
    for name, limit in limits.items():
        if not 0 < limit < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {limit}.")


def split_heads(projected: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From (n, T, num_heads * head_dim) to (n, num_heads, T, head_dim)."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(heads: torch.Tensor) -> torch.Tensor:
    """From (n, num_heads, T, head_dim) to (n, T, num_heads * head_dim)."""
    return heads.transpose(1, 2).flatten(-2)


def head_norm(head_dim: int, norm_eps: float | None) -> nn.Module:
    """RMSNorm over each head; none for ``norm_eps=None``."""
    return nn.Identity() if norm_eps is None else nn.RMSNorm(head_dim, eps=norm_eps)
