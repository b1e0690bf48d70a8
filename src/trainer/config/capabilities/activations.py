"""The activations of an MLP: functions of jax.nn, gelu by its tanh approximation; "linear" changes nothing."""

ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "linear")
