"""`trainer.parity` finds a wrong adapter scale in one combination."""

import json

from flax import nnx
from parity_cases import run as parity

from trainer.compare import measure, programs
from trainer.layers.adapted import Adapted
from trainer.linen import layer


def test_parity_names_a_wrong_scale(capsys, monkeypatch):
    with_products = layer.with_products

    def wrong(config, path, module, rngs):
        made = with_products(config, path, module, rngs)
        for _, product in nnx.iter_modules(made):
            if isinstance(product, Adapted):
                product.scale *= 1.001
        return made

    monkeypatch.setattr(layer, "with_products", wrong)
    # b is zero, so the forward pass and the gradient of a do not depend on the scale.
    monkeypatch.setattr(programs, "MEASURES", (measure.parameters, measure.gradients))
    keys = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 2.0, "lora_module_path": "mlp/wo"}
    code, out, _ = parity(capsys, "left=nnx", "right=bridged,linen", "--json", **keys)
    right, faulty = json.loads(out)["comparisons"]
    assert (code, right["bits"]) == (1, True)
    assert faulty["first"].startswith("gradients: decoder/layers/mlp/wo/product/lora_b")
