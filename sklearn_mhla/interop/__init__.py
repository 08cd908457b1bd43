"""Linear attention in other libraries: torch modules, warm starts of other layers, ONNX.

torch is imported when a name of this module is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sklearn_mhla._backend import import_torch

if TYPE_CHECKING:
    from sklearn_mhla.interop._delta_net import DeltaNet
    from sklearn_mhla.interop._gated_delta_net import GatedDeltaNet
    from sklearn_mhla.interop._gated_linear_attention import GatedLinearAttention
    from sklearn_mhla.interop._library import to_library
    from sklearn_mhla.interop._linear_attention import LinearAttention
    from sklearn_mhla.interop._mlstm import MLSTM
    from sklearn_mhla.interop._module import AttentionState, MultiHeadLinearAttention
    from sklearn_mhla.interop._onnx import to_onnx
    from sklearn_mhla.interop._warm_start import hidden_states

_FILES = {
    "AttentionState": "_module",
    "DeltaNet": "_delta_net",
    "GatedDeltaNet": "_gated_delta_net",
    "GatedLinearAttention": "_gated_linear_attention",
    "LinearAttention": "_linear_attention",
    "MLSTM": "_mlstm",
    "MultiHeadLinearAttention": "_module",
    "hidden_states": "_warm_start",
    "to_library": "_library",
    "to_onnx": "_onnx",
}

__all__ = [
    "MLSTM",
    "AttentionState",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LinearAttention",
    "MultiHeadLinearAttention",
    "hidden_states",
    "to_library",
    "to_onnx",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_torch(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
