"""What the first stage asks about Gemma 2."""

from trainer.config.family import Facts
from trainer.models.gemma.facts import FIXES, tensors

ALTERNATES = {"has layers with and without a window, whatever it is": ("attention_type",)}
GLOBAL = {"attention_type": "global"}  # stated in a description of the model
FACTS = Facts(
    "trainer.models.gemma2.family:FAMILY",
    reads=("sliding_window_pattern", "use_post_attn_norm", "use_post_ffw_norm"),
    ignores=ALTERNATES,
    fixes={**FIXES, **GLOBAL},
    period=2,
    maxtext_layers=2,
    tensors=tensors,
)
