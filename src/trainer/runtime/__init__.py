"""What touches the machine: placing host arrays on devices."""

from trainer.runtime.place import place

__all__ = ["place"]
