"""How closely the warm-started layers compute the model that they start from.

Prints the largest difference of the outputs in parts of the largest output, for random heads
(d = 5, m = 4, H = 3) and 20 sequences of 64 Gaussian tokens.
"""

import torch

from sklearn_mhla.interop import (
    MLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LinearAttention,
    MultiHeadLinearAttention,
    hidden_states,
)

CASES = [
    (LinearAttention, {}),
    (GatedLinearAttention, {"norm_eps": None}),
    (GatedLinearAttention, {}),
    (DeltaNet, {}),
    (DeltaNet, {"c": 1e4}),
    (DeltaNet, {"c": 1e6, "beta": 1e-13}),
    (GatedDeltaNet, {}),
    (GatedDeltaNet, {"c": 1e4}),
    (GatedDeltaNet, {"c": 1e6, "beta": 1e-13, "gate_bias": 36.0}),
    (MLSTM, {"norm_eps": None}),
    (MLSTM, {}),
    (MLSTM, {"forget_bias": 36.0}),
]


def main():
    torch.manual_seed(0)
    model = MultiHeadLinearAttention(5, 4, 3, output="sequence", bias=False, dtype=torch.float64)
    tokens = torch.randn(20, 64, 5, dtype=torch.float64)
    expected = model(tokens).detach()
    print("| layer | options | float32 | float64 |")
    print("|---|---|---|---|")
    for layer_class, options in CASES:
        errors = []
        for dtype in (torch.float32, torch.float64):
            layer = layer_class.from_model(model, **options).to(dtype)
            with torch.no_grad():
                output = layer(hidden_states(tokens, layer.hidden_size).to(dtype))[..., :4]
            errors.append((output - expected).abs().max() / expected.abs().max())
        text = ", ".join(f"{name}={value}" for name, value in options.items()) or "default"
        print(f"| {layer_class.__name__} | {text} | {errors[0]:.1e} | {errors[1]:.1e} |")


if __name__ == "__main__":
    main()
