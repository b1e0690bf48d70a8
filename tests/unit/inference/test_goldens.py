"""Greedy continuations against transformers' own generate, for every family (scripts/write_goldens.py)."""

from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from trainer.inference.max_engine import MaxEngine
from trainer.inference.scheduler import Scheduler
from trainer.leaves.source import nested, parted
from trainer.weights.model_keys import load_model_keys
from trainer.weights.open import open_source, weight_shapes

GOLDENS = Path(__file__).parents[2] / "goldens"
# At least one per family, and cases with another cache or other positions: windows of 5 positions, latents, YaRN.
CASES = (
    "llama-yarn-exact",
    "mistral",
    "qwen3-tied",
    "mixtral",
    "qwen3-moe",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "qwen2",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "phi4-mini",
    "glm4",
    "glm4-moe",
    "glm4-moe-lite",
    "granite",
    "granite4",
    "granite-moe",
    "granite-moe-shared",
    "ministral3",
    "mistral4",
    "mistral4-small",
    "llama4",
    "llama4-interleaved",
    "gpt-oss",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
    "exaone4",
)
PROMPT, LENGTH = 7, 40
# Above the rounding of float32 logits: they differ by at most 1e-5 of the largest, which is about 10.
TIE = 1e-3


def expected(case):
    """Returns the tokens [rows, LENGTH] and, for the new ones, the margin between the two largest logits."""
    with np.load(GOLDENS / case / "expected.npz") as found:
        return found["generated/tokens"], found["generated/margin"]


@pytest.mark.rest(
    covered_by="gemma2, olmo3, exaone4; the logits of all",
    cases=("gemma", "olmo2", "qwen2", "smollm3", "phi3", "granite4", "llama4-interleaved"),
)
@pytest.mark.rest(
    covered_by="deepseek-v3, qwen3-moe; the logits of all",
    cases=("deepseek-v2", "deepseek-v2-lite", "granite-moe", "mixtral", "qwen3-tied"),
)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case, monkeypatch):
    monkeypatch.syspath_prepend(str(GOLDENS.parents[1]))
    tokens, margin = expected(case)
    block = "docs.guides.exaone4.facts:FACTS" if case == "exaone4" else ""
    source = open_source(str(GOLDENS / case), block)
    words = [f"load_parameters_path={GOLDENS / case}", f"max_target_length={LENGTH}", "dtype=float32"]
    words += [f"decoder_block={block}"] if block else []
    words += ["decode_sampling_strategy=greedy", f"per_device_batch_size={len(tokens)}"]
    config = ConfigDict(load_model_keys(source.keys, words, case).config)
    engine = MaxEngine(config, jax.devices()[:1])
    leaves = source.leaves(engine.config, weight_shapes(engine.config))
    weights = {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}
    variables = parted(nested(weights), engine.served.model.abstract[1])
    scheduler = Scheduler(engine, engine.hold(*variables))
    numbers = [scheduler.submit(row[:PROMPT].tolist()) for row in tokens]
    found = {number: [] for number in numbers}
    for event in scheduler.run():
        found[event.request].append(event.token)
    for number, row, apart in zip(numbers, tokens, margin, strict=True):
        ties = np.flatnonzero(apart < TIE)
        end = ties[0] if ties.size else apart.size
        assert end > 10, "a case with early near ties proves little"
        np.testing.assert_array_equal(found[number][:end], row[PROMPT:][:end])


def test_a_near_tie_is_the_exception():
    assert sum((expected(case)[1] < TIE).sum() for case in CASES) <= 4
