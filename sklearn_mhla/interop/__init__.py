"""Linear attention in other libraries: the fitted model as a torch module.

torch is imported when a name of this module is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sklearn_mhla._backend import import_torch

if TYPE_CHECKING:
    from sklearn_mhla.interop._module import AttentionState, MultiHeadLinearAttention

__all__ = ["AttentionState", "MultiHeadLinearAttention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_torch(f"{__name__}.{name}")
    from sklearn_mhla.interop import _module

    return getattr(_module, name)
