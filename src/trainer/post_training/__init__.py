"""What happens to a trained model: quantization by calibration."""

from trainer.post_training.calibration import Layer, calibrate
from trainer.post_training.quantization import Calibrated
from trainer.post_training.recording import Statistics

__all__ = ["Calibrated", "Layer", "Statistics", "calibrate"]
