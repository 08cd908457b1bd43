"""Draw the flow chart of the page "Which solver?"; run as ``python draw_which_solver.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

QUESTIONS = [
    ("Loss other than squared?", "LinearAttentionFeatures\n+ a linear model of scikit-learn"),
    (
        "Few heads wanted,\nor fewer rows than features\nand a simple truth?",
        'n_heads=H\nH unknown: penalty="nuclear",\nor a list for MHLARegressorCV',
    ),
    (
        "Rows do not fit in memory,\narrive over time,\nor lie on several machines?",
        "partial_fit, Moments,\nmemory maps, Dask",
    ),
    ("p at most the rows,\nand p x p fits?", 'method="primal"\nlinear in rows'),
    ("One-hot tokens,\nor low rank for another reason?", 'method="pivoted"\nrows x rank'),
    ("rows x rows fits?", 'method="dual"'),
]


def main() -> None:
    """Save ``which_solver.svg`` beside this file."""
    figure, ax = plt.subplots(figsize=(9.0, 8.6))
    step = 1.3
    for i, (question, answer) in enumerate(QUESTIONS):
        y = -i * step
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#eef3fa", "edgecolor": "#4c72b0"}
        ax.text(0.0, y, question, ha="center", va="center", bbox=box, fontsize=10)
        box = {"boxstyle": "square,pad=0.5", "facecolor": "#f5f0e6", "edgecolor": "#b8860b"}
        ax.text(3.6, y, answer, ha="center", va="center", bbox=box, fontsize=10, family="monospace")
        ax.annotate("", (2.35, y), (1.45, y), arrowprops={"arrowstyle": "->"})
        ax.text(1.85, y + 0.07, "yes", ha="center", fontsize=9)
        ax.annotate("", (0.0, y - step + 0.48), (0.0, y - 0.48), arrowprops={"arrowstyle": "->"})
        ax.text(0.08, y - step / 2, "no", va="center", fontsize=9)
    box = {"boxstyle": "square,pad=0.5", "facecolor": "#f5f0e6", "edgecolor": "#b8860b"}
    last = -len(QUESTIONS) * step
    ax.text(0.0, last, 'method="cg"', ha="center", va="center", bbox=box, family="monospace")
    ax.set(xlim=(-1.6, 5.4), ylim=(last - 0.5, 0.6))
    ax.axis("off")
    figure.savefig(Path(__file__).with_name("which_solver.svg"), bbox_inches="tight")


if __name__ == "__main__":
    main()
