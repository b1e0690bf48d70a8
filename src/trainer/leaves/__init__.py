"""What all checkpoints have: named arrays read one part at a time, Orbax's trees, what a folder says of a model."""

from trainer.leaves.about import About
from trainer.leaves.source import Leaf, Shapes, Source, filled, joined, names_of, nested, parted

__all__ = [
    "About",
    "Leaf",
    "Shapes",
    "Source",
    "filled",
    "joined",
    "names_of",
    "nested",
    "parted",
]
