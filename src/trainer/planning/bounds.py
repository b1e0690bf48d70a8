from typing import NamedTuple


class Bound(NamedTuple):
    arguments: int
    memory: int
    seconds: float


class Bounds:
    def __init__(self, devices, slices=1):
        self.devices = devices

    def of(self, config):
        from trainer.training.build import build

        build(config, self.devices)
        return Bound(0, 0, 0.0)
