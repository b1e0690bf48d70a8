"""Requirements of every family, including families added later.

The five combinations are one program, and adapters and int8 work or are refused by name. A family's sizes are those of
its golden with the fewest layers.
"""

import functools
import json
from pathlib import Path

import jax
import pytest
from support import ALL_COMBINATIONS, TINY, lowered_update, pinned

from trainer.config.capabilities.lora_keys import ADAPTER
from trainer.config.dump import as_words
from trainer.config.load import load
from trainer.models import FAMILIES
from trainer.ops.paths import by_name
from trainer.training.build import build
from trainer.weights.huggingface.config_json import model_keys

GOLDENS = Path(__file__).parents[2] / "goldens"
OTHERS = {"gpt3": ["model_name=gpt3-52k"]}  # transformers has no class for it
LORA = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0}
SGD = {"opt_type": "sgd", "gradient_clipping_threshold": 0, "remat_policy": "full"}  # makes the update shorter


@functools.cache
def goldens():
    """Returns the command-line words for each family's sizes, from its golden with the fewest layers."""
    found = {}
    for path in sorted(GOLDENS.glob("*/config.json")):
        data = json.loads(path.read_text())
        if data["model_type"] == "exaone4":  # the family in a guide
            continue
        keys = model_keys(data, str(path))
        layers = keys["base_num_decoder_layers"]
        if layers < found.get(keys["decoder_block"], (layers + 1,))[0]:
            found[keys["decoder_block"]] = layers, keys
    return {block: as_words(keys, list(keys)) for block, (_, keys) in found.items()}


def made(block, combination=ALL_COMBINATIONS[0], **keys):
    own = goldens().get(block) or OTHERS[block]
    rest = {
        name: value for name, value in TINY.items() if not name.startswith(("base_", "head_dim", "vocab", "logits"))
    }
    given = rest | SGD | pinned(combination) | keys
    return build(
        load(["base.yml", *(f"{name}={value}" for name, value in given.items()), *own]).config, jax.devices()[:1]
    )


@functools.cache
def program(block, combination):
    return lowered_update(made(block, combination, dropout_rate=0.1, attention_dropout_rate=0.1)).as_text()


@pytest.mark.rest(covered_by="unit/models/test_families.py, at two ends; integration/test_five_combinations.py")
@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
@pytest.mark.parametrize("block", FAMILIES)
def test_the_program_is_the_same_in_every_combination(block, combination):
    expected = program(block, ALL_COMBINATIONS[0])
    assert "stablehlo.dot_general" in expected
    assert program(block, combination) == expected


@pytest.mark.rest(covered_by="unit/training/test_lora.py, unit/products/test_products.py")
@pytest.mark.parametrize("block", FAMILIES)
def test_adapters_are_trained_in_every_family(block):
    """All matrices of attention, and those of MLPs or experts, get adapters."""
    run = made(block, **LORA)
    names = set(by_name(run.codec.unpack(run.abstract_state).params))
    adapted = {name.partition("/product/")[0] for name in names if ADAPTER.search(name)}
    attention = {name.rpartition("/")[0] for name in names if "/self_attention/" in name and name.endswith("/kernel")}
    assert attention <= adapted
    assert any("/self_attention/" not in name for name in adapted)
    _, metrics = run.step.trace(*run.abstract_args()).out_info
    assert metrics["loss"].shape == ()


@pytest.mark.rest(covered_by="unit/products/test_quantized.py, integration/test_quantized_training.py")
@pytest.mark.parametrize("block", FAMILIES)
def test_int8_is_computed_in_every_family(block):
    assert "xi8>" in lowered_update(made(block, quantization="int8")).as_text()
