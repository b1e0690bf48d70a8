"""scripts/benchmark_gpu.py with tiny cases on a CPU: a process measures one, and what does not fit is left out."""

import json

import jax
import pytest
from compiler import QUICKLY

pytestmark = pytest.mark.rest(covered_by="its parts: the training step, the check of an accelerator")
