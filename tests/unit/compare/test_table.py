"""The table of a comparison."""

from trainer.compare.difference import BITS, Difference, Tolerance
from trainer.compare.report import Comparison, Quantity, Report
from trainer.compare.table import WIDTH, table

FACTS = {"program text": "the same text, 12 lines", "FLOPs": (2e9, 3e9), "memory: temporaries": (5e6, 5e6)}


def same(name, layer=None):
    return Difference(name, layer, True, True, 0.0, 0.0)


def apart(name, layer=None, equal=False):
    return Difference(name, layer, False, equal, 0.5, 0.25)


def activations(*which):
    layers = [(apart if i in which else same)("decoder/layers/output", i) for i in range(40)]
    return Quantity("activations", [same("embedding"), *layers, apart("logits") if which else same("logits")])


def report(*comparisons, tolerance=BITS):
    return Report("nnx", tolerance, [("model", "a " * 80), ("dtype", "float32 | bfloat16")], comparisons)


def test_one_right_side():
    parameters = Quantity("parameters", [same("a"), same("b")], remarks=["logical axes of b: x against y"])
    text = table(report(Comparison("linen", [parameters, activations(3, 4)], FACTS)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "parameters" in text
    assert "  layers 0 to 2" in text
    assert "  layers 5 to 39" in text
    (layer,) = [line for line in lines if line.startswith("  layer 3 ")]
    assert layer.split() == ["layer", "3", "1", "apart", "5.0e-01", "2.5e-01", "output"]
    assert "FLOPs                2.00 GFLOP  3.00 GFLOP" in text
    assert "parameters: logical axes of b: x against y" in lines
    assert lines[-1] == "nnx and linen differ first in activations: decoder/layers/output, layer 3"


def test_many_layers_that_part_are_cut_in_the_middle():
    text = table(report(Comparison("linen", [activations(*range(40))], FACTS)))
    assert "  layer 3 " in text
    assert "  layer 20 " not in text
    assert "  layer 39 " in text
    assert "  ... 30 more" in text


def test_several_right_sides_stand_beside_each_other_and_what_parts_gets_a_table_of_its_own():
    good, bad = Comparison("linen", [activations()], FACTS), Comparison("bridged", [activations(2)], FACTS)
    lines = table(report(good, bad)).splitlines()
    assert ["against", "nnx", "linen", "bridged"] in [line.split() for line in lines]
    (row,) = [line for line in lines if line.startswith("activations, 3 arrays")]
    assert row.split()[3:] == ["equal", "bits", "apart", "by", "5.0e-01"]
    assert any(line.startswith("bridged against nnx") for line in lines)
    assert not any(line.startswith("linen against nnx") for line in lines)
    assert lines[-1] == "nnx and bridged differ first in activations: decoder/layers/output, layer 2"


def test_the_verdict():
    bits = Comparison("linen", [Quantity("loss", [same("loss")])])
    within = Comparison("linen", [Quantity("loss", [apart("loss", equal=True)])])
    assert table(report(bits)).endswith("nnx and linen are equal in every bit")
    assert table(report(within, tolerance=Tolerance(rtol=1e-5))).endswith("nnx and linen are equal within rtol=1e-05")


def layer(*names, equal=True):
    return Quantity("activations", [apart(f"decoder/layers/{name}", 0, equal) for name in names])


def test_the_verdict_names_the_first_difference_within_the_tolerance_and_the_first_beyond_it():
    gradients = Quantity("gradients", [apart("wq")])
    within = Comparison("linen", [Quantity("parameters", [same("a")]), layer("mlp_input", "output"), gradients])
    lines = table(report(within, tolerance=Tolerance(rtol=0.5))).splitlines()
    assert lines[-1] == "nnx and linen differ first in gradients: wq"
    assert lines[-2] == "the first difference within rtol=0.5 is in activations: decoder/layers/mlp_input, layer 0"
    assert within.first_within == "activations: decoder/layers/mlp_input, layer 0"
    assert Comparison("linen", [layer("mlp_input", equal=False), gradients]).first_within is None
    renamed = Quantity("parameters", [], notes=["logical axes of a: x against y"])
    assert Comparison("linen", [renamed, layer("mlp_input")]).first_within is None


def test_a_block_that_sows_nothing_gets_a_hint():
    text = table(report(Comparison("linen", [layer("output", equal=False)])))
    assert "layer 0 sows only its output; docs/guides/parity.md describes how to look inside" in text
    for other in (layer("attention_output", "output", equal=False), Quantity("parameters", [apart("a")])):
        assert "sows" not in table(report(Comparison("linen", [other, layer("output")])))
