"""What the first stage asks about Gemma."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

# Embeddings are scaled, and not the logits of a tied head.
FIXES = {"normalize_embedding_logits": False}
FACTS = Facts("trainer.models.gemma.family:FAMILY", fixes=FIXES, tensors=of_blocks)
