"""The suite runs on eight simulated CPU devices, whatever the machine has. Set before anything imports JAX."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

pytest_plugins = ["checkout", "pins"]  # in this order: pins imports the package
