"""The reference layers as layers of flash-linear-attention and xlstm."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from sklearn_mhla.interop._delta_net import DeltaNet
from sklearn_mhla.interop._gated_delta_net import GatedDeltaNet
from sklearn_mhla.interop._gated_linear_attention import GatedLinearAttention
from sklearn_mhla.interop._linear_attention import LinearAttention
from sklearn_mhla.interop._mlstm import MLSTM


def to_library(layer: nn.Module, **options: Any) -> nn.Module:
    """A layer of flash-linear-attention or xlstm with the options and weights of a reference layer.

    Parameters
    ----------
    layer : LinearAttention, GatedLinearAttention, DeltaNet, GatedDeltaNet or MLSTM
        A reference layer of this package, trained or not.
    **options : Any
        Further arguments of the library's class, such as ``mode`` or ``layer_idx``; for MLSTM those
        of ``xlstm.xlstm_large.model.mLSTMLayerConfig``, such as ``mlstm_backend``.

    Returns
    -------
    torch.nn.Module
        In float32: the class of the same name in ``fla.layers``, or
        ``xlstm.xlstm_large.model.mLSTMLayer``.

    Raises
    ------
    TypeError
        If ``layer`` is of another class.
    ValueError
        If ``layer`` has no norm, which only LinearAttention of the libraries can leave out.
    ImportError
        If the library cannot be imported.
    """
    if getattr(layer, "norm_eps", 0.0) is None:
        raise ValueError(
            f"The library's layer has a norm, and this {type(layer).__name__} has none: make it "
            "with a number for norm_eps."
        )
    if isinstance(layer, MLSTM):
        xlstm = _imported("xlstm.xlstm_large.model", "xlstm")
        config = xlstm.mLSTMLayerConfig(
            embedding_dim=layer.hidden_size,
            num_heads=layer.num_heads,
            qk_dim_factor=layer.num_heads * layer.head_k_dim / layer.hidden_size,
            v_dim_factor=layer.num_heads * layer.head_v_dim / layer.hidden_size,
            norm_eps=layer.norm_eps,
            gate_soft_cap=layer.gate_soft_cap,
            **options,
        )
        made: nn.Module = xlstm.mLSTMLayer(config)
    else:
        arguments = _fla_arguments(layer)
        library_class = getattr(
            _imported("fla.layers", "flash-linear-attention"), type(layer).__name__
        )
        with warnings.catch_warnings():
            # DeltaNet asks for a short convolution, which would change the function.
            warnings.filterwarnings("ignore", message="ShortConvolution is crucial")
            made = library_class(**(arguments | options))
    made.load_state_dict(layer.state_dict())
    return made


def _fla_arguments(layer: nn.Module) -> dict[str, Any]:
    """Arguments of the class in ``fla.layers`` that has the parameters of this layer."""
    if not isinstance(layer, LinearAttention | GatedLinearAttention | DeltaNet | GatedDeltaNet):
        raise TypeError(
            "layer must be a LinearAttention, GatedLinearAttention, DeltaNet, GatedDeltaNet or "
            f"MLSTM of sklearn_mhla.interop; got {type(layer).__name__}."
        )
    arguments: dict[str, Any] = {"hidden_size": layer.hidden_size, "num_heads": layer.num_heads}
    if isinstance(layer, GatedDeltaNet):
        arguments["head_dim"] = layer.head_k_dim
        arguments["expand_v"] = layer.head_v_dim / layer.head_k_dim
    else:
        arguments["expand_k"] = layer.num_heads * layer.head_k_dim / layer.hidden_size
        arguments["expand_v"] = layer.num_heads * layer.head_v_dim / layer.hidden_size
    if isinstance(layer, LinearAttention):
        return arguments | {"feature_map": "identity", "output_norm": "identity"}
    arguments["norm_eps"] = layer.norm_eps
    if isinstance(layer, GatedLinearAttention):
        return arguments | {
            "use_output_gate": False,
            "gate_low_rank_dim": layer.gate_low_rank_dim,
            "gate_logit_normalizer": layer.gate_logit_normalizer,
        }
    arguments |= {"use_short_conv": False, "use_gate": False}
    if isinstance(layer, DeltaNet):
        arguments["qk_activation"] = "identity"
    return arguments


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"to_library() needs {module}, which could not be imported ({error}). Install it with "
            f"`pip install {package}`."
        ) from error
