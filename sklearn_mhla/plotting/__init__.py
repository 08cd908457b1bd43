"""Pictures in the manner of scikit-learn's displays; they need matplotlib.

Predicted against true values and learning curves over sample sizes are drawn by
``sklearn.metrics.PredictionErrorDisplay`` and ``sklearn.model_selection.LearningCurveDisplay``,
which take the estimators of this package.
"""

from sklearn_mhla.plotting._attention import AttentionDisplay
from sklearn_mhla.plotting._heads import HeadsDisplay
from sklearn_mhla.plotting._identifiability import IdentifiabilityDisplay
from sklearn_mhla.plotting._loss_curve import LossCurveDisplay

__all__ = ["AttentionDisplay", "HeadsDisplay", "IdentifiabilityDisplay", "LossCurveDisplay"]
