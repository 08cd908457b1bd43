"""matplotlib, when a picture asks for it."""

from __future__ import annotations

from typing import Any


def import_pyplot(purpose: str) -> Any:
    """Import ``matplotlib.pyplot``, with an error that says what to install."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs matplotlib, which could not be imported. Install it with "
            "`pip install matplotlib`."
        ) from error
    return plt
