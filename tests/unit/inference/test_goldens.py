"""Greedy continuations against transformers' own generate, for every family (scripts/write_goldens.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.backends.registry import make_model
from trainer.config.resolve import resolve
from trainer.inference.max_engine import MaxEngine
from trainer.inference.scheduler import Scheduler
from trainer.layers.cache import Cache
from trainer.leaves.source import nested, parted
from trainer.models.caches import init_cache
from trainer.weights.model_keys import model_config
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
    """One decode step after another, from the first token on, in one program. Each step gets the expected tokens."""
    monkeypatch.syspath_prepend(str(GOLDENS.parents[1]))
    tokens, margin = expected(case)
    block = "docs.guides.exaone4.facts:FACTS" if case == "exaone4" else ""
    source = open_source(str(GOLDENS / case), block)
    words = [f"max_target_length={LENGTH}", "dtype=float32", *([f"decoder_block={block}"] if block else [])]
    model = make_model(resolve(model_config(source.keys, words, case), device_count=1, platform="cpu"))
    leaves = source.leaves(model.config, weight_shapes(model.config))
    weights = {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}
    rows = np.arange(len(tokens))

    @jax.jit
    def greedy(params, rest):
        def step(entries, position):
            token = jnp.asarray(tokens)[:, position, None]
            where, cache = jnp.full_like(token, position), Cache(entries, filled=True)
            hidden, _, cache = model.apply(params, rest, token, where, jnp.ones_like(token), rows, cache=cache)
            return cache.entries, model.apply(params, rest, hidden, method="head")[0][:, 0].argmax(-1)

        empty = init_cache(model.config, len(tokens), LENGTH).entries
        return jax.lax.scan(step, empty, jnp.arange(LENGTH - 1))[1].T

    found = greedy(*parted(nested(weights), model.abstract[1]))[:, PROMPT - 1 :]
    same = (found == tokens[:, PROMPT:]) | (margin < TIE)
    np.testing.assert_array_equal(same, True)


def test_an_engine_of_a_hugging_face_folder():
    """The model's keys come from the folder, as in trainer.generate. Its windows are shorter than the prompts."""
    tokens, margin = expected("gemma2")
    assert (margin > TIE).all()
    words = [f"max_target_length={LENGTH}", "dtype=float32", "decode_sampling_strategy=greedy"]
    engine = MaxEngine.of(str(GOLDENS / "gemma2"), words, devices=jax.devices()[:1], sequences=len(tokens))
    scheduler = Scheduler(engine, engine.load_params(say=lambda line: None))
    found = {scheduler.submit(row[:PROMPT].tolist()): [] for row in tokens}
    for event in scheduler.run():
        found[event.request].append(event.token)
    np.testing.assert_array_equal(list(found.values()), tokens[:, PROMPT:])


def test_a_near_tie_is_the_exception():
    assert sum((expected(case)[1] < TIE).sum() for case in CASES) <= 4
