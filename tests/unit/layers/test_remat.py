"""Each remat policy saves and recomputes what its name says, and memory follows in the scanned training step."""

import functools

import jax
import pytest
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from support import ALL_COMBINATIONS, arguments, first_tree, packed_batch, state_from, tiny_config

from trainer.aot.recomputed import recomputed
from trainer.aot.suggest import UNCERTAINTY
from trainer.backends.registry import make_model
from trainer.config.capabilities.all_keys import INERT
from trainer.config.capabilities.remat_tensors import TENSORS
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.schema import schema
from trainer.layers.remat import KEPT, OFFLOADED, make_policy
from trainer.models.remat import check_offload
from trainer.objectives.next_token import NextToken
from trainer.training.batches import placed
from trainer.training.build import build

QKV = {"query_proj", "key_proj", "value_proj"}
ATTENTION = QKV | {"out_proj"}
HIDDEN = {"mlpwi_0", "mlpwi_1"}
# The tensors that each policy saves in a gated block. mlpwo is never saved: the backward pass does not read it.
EXPECTED = {
    "full": set(),
    "minimal": ATTENTION | HIDDEN,
    "minimal_with_context": ATTENTION | HIDDEN | {"context"},
    "save_dot_with_context_except_mlp": ATTENTION | {"context"},
    "save_dot_except_mlpwi": ATTENTION,
    "save_dot_except_mlp": ATTENTION,
    "save_qkv_proj": QKV,
    "save_out_proj": {"out_proj"},
    "qkv_proj_offloaded": QKV,
    "minimal_offloaded": ATTENTION | HIDDEN,
}
SAME = {"minimal_flash": "minimal_with_context"}
# These policies also keep the quantized operands of products. Without quantization, they equal the policies they map
# to.
QUANTIZED = {
    "minimal_with_quantization": "minimal",
    "minimal_with_context_and_quantization": "minimal_with_context",
}
# Policies with different programs, and how many of a block's nine products (seven with weights, the scores, the sum of
# values) they recompute. mlpwo is never recomputed; the softmax weights are never saved.
RECOMPUTED = {
    "full": 8,
    "save_out_proj": 7,
    "save_qkv_proj": 5,
    "save_dot_except_mlp": 4,
    "save_dot_with_context_except_mlp": 3,
    "minimal": 2,
    "minimal_with_context": 1,
    "none": 0,
}
# A step whose memory is dominated by activations: many tokens, no optimizer state.
WIDE = {
    "base_emb_dim": 64,
    "base_mlp_dim": 192,
    "head_dim": 16,
    "max_target_length": 32,
    "per_device_batch_size": 16,
    "attention": "dot_product",
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
}
TOKENS = 16 * 32
# Entries per token of each tensor in a block of WIDE.
WIDTH = {
    "query_proj": 64,
    "key_proj": 32,
    "value_proj": 32,
    "out_proj": 64,
    "context": 64,
    "mlpwi_0": 192,
    "mlpwi_1": 192,
}
DEPTHS = (4, 6)
# One combination per decoder stack. Another test shows that the other combinations make the same programs.
STACKS = tuple(dict.fromkeys((ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1])))


def test_every_policy_of_the_schema_is_there():
    assert {"none", "custom", *KEPT, *OFFLOADED} == set(schema().keys["remat_policy"].choices)
    assert {*EXPECTED, *SAME, *QUANTIZED} == {*KEPT, *OFFLOADED}
    assert all(KEPT[name] == KEPT[other] for name, other in SAME.items())
    assert all(KEPT[name] == (*KEPT[other], "quantization") for name, other in QUANTIZED.items())


def test_every_choice_of_the_schema_is_there():
    base = schema().keys
    assert list(base)[list(base).index("remat_policy") + 1 :][: len(TENSORS)] == list(TENSORS)
    assert {name: base[name].choices for name in TENSORS} == {
        name: ("device", "offload") if name == "decoder_layer_input" else ("remat", "device", "offload")
        for name in TENSORS
    }


def test_the_warning_of_keys_without_effect_speaks_of_every_tensor():
    (inert,) = [inert for inert in INERT if inert.reason == "remat_policy is not custom"]
    assert inert.keys == (*TENSORS, "custom_device_tensors", "custom_offload_tensors")


def loss_and_arguments(combination, **overrides):
    """Returns the summed loss as a function of the parameters, and the shapes of the parameters."""
    config = tiny_config(combination, **{"attention": "dot_product"} | overrides)
    model = make_model(config)
    params, rest = model.abstract
    batch, objective = packed_batch(config, 2), NextToken(model.apply)
    return lambda params: objective.sums(params, rest, batch, None).minimized["lm_loss"], params


@functools.cache
def gradients(combination, **overrides):
    """Returns the equations in the gradient of the loss."""
    loss, params = loss_and_arguments(combination, **overrides)
    return list(equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))


def scans(found):
    return [equation for equation in found if equation.primitive.name == "scan"]


def equations(jaxpr):
    """Yields the live equations of `jaxpr`: Flax's bridge also traces an initialization that is not used."""
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for equation in live.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def alike(outside, inside):
    return sum(a.aval.shape == b.aval.shape for a, b in zip(outside, inside, strict=True))


def kept(combination, **overrides):
    """Returns what the scan over layers saves for each layer's backward pass: {name of the tensor: memory}."""
    scan, _ = scans(gradients(combination, **overrides))
    body = scan.params["jaxpr"].jaxpr
    # Constants and the carry have the same shape outside the body; scanned arrays have one axis more.
    carried = alike(scan.outvars, body.outvars)
    constants = alike(scan.invars, body.invars) - carried
    made_by = {variable: equation for equation in body.eqns for variable in equation.outvars}

    def name(variable):
        """Returns the name of the tensor behind `variable`, skipping casts and copies."""
        while variable in made_by:
            equation = made_by[variable]
            if equation.primitive.name == "name":
                return equation.params["name"]
            assert equation.primitive.name in ("reduce_precision", "device_put"), equation
            (variable,) = [v for v in equation.invars if not isinstance(v, Literal)]
        assert variable is body.invars[constants], "not the block's input"
        return "input"

    residuals = body.outvars[carried:]
    found = {name(variable): variable.aval.memory_space.name.lower() for variable in residuals}
    assert len(found) == len(residuals), "something is kept twice"
    return found


# Both stacks apply the same policies, so a few suffice for the Linen stack.
SOME = ("full", "save_dot_with_context_except_mlp", "minimal_offloaded")


@pytest.mark.parametrize(
    ("combination", "policy"), [(STACKS[0], it) for it in EXPECTED] + [(name, it) for name in STACKS[1:] for it in SOME]
)
def test_a_policy_keeps_what_its_name_says_where_it_says(combination, policy):
    where = "host" if policy in OFFLOADED else "device"
    expected = dict.fromkeys(EXPECTED[policy], where)
    assert kept(combination, remat_policy=policy) == expected | {"input": "device"}


@pytest.mark.parametrize("combination", STACKS)
def test_angles_of_positions_are_made_once_a_step(combination):
    """The angles are computed neither in each layer nor again in the backward pass, even if nothing else is saved."""
    found = gradients(combination, remat_policy="full")
    assert len(scans(found)) == 2
    inside = [inner for scan in scans(found) for inner in equations(scan.params["jaxpr"].jaxpr)]
    assert "dot_general" in {equation.primitive.name for equation in inside}
    assert "cos" in {equation.primitive.name for equation in found}
    assert {"cos", "sin"}.isdisjoint(equation.primitive.name for equation in inside)


WHERE = {"device": "device", "offload": "host"}


@pytest.mark.parametrize("tensor", ["context", "mlpwo", "mlpwi"])
def test_custom_keeps_one_tensor_alone(tensor):
    # An ungated MLP has the name mlpwi, a gated one mlpwi_0 and mlpwi_1.
    gate, choice = ({"mlp_activations": "gelu"}, "offload") if tensor == "mlpwi" else ({}, "device")
    read = {} if tensor == "mlpwo" else {tensor: WHERE[choice]}
    assert kept("nnx", remat_policy="custom", **{tensor: choice}, **gate) == read | {"input": "device"}


@pytest.mark.parametrize("first", range(3))
def test_custom_chooses_for_each_tensor(first):
    """Over the three cases, each tensor gets each choice."""
    tensors = ["context", *sorted(ATTENTION | HIDDEN)]
    choices = {tensor: ("remat", *WHERE)[(first + i) % 3] for i, tensor in enumerate(tensors)}
    expected = {tensor: WHERE[choice] for tensor, choice in choices.items() if choice != "remat"}
    assert kept("nnx", remat_policy="custom", **choices) == expected | {"input": "device"}


@pytest.mark.parametrize("combination", STACKS)
def test_custom_may_move_the_blocks_input_itself(combination):
    found = kept(combination, remat_policy="custom", decoder_layer_input="offload", context="device")
    assert found == {"decoder_layer_input": "host", "context": "device"}


def test_choices_say_nothing_under_another_policy():
    assert kept("nnx", remat_policy="save_qkv_proj", context="device") == kept("nnx", remat_policy="save_qkv_proj")


UNROLLED = ("full", "save_qkv_proj", "none")
COUNTED = [*((policy, True) for policy in RECOMPUTED), *((policy, False) for policy in UNROLLED)]
COUNTED_AGAIN = [("full", True), ("save_dot_with_context_except_mlp", True), ("save_qkv_proj", False)]


@functools.cache
def forward_products(combination, scan):
    loss, params = loss_and_arguments(combination, scan_layers=scan)
    return products(equations(jax.make_jaxpr(loss)(params).jaxpr))


def products(found):
    return sum(equation.primitive.name == "dot_general" for equation in found)


@pytest.mark.parametrize(
    ("combination", "policy", "scan"),
    [(STACKS[0], *it) for it in COUNTED] + [(name, *it) for name in STACKS[1:] for it in COUNTED_AGAIN],
)
def test_a_policy_computes_again_what_it_does_not_keep(combination, policy, scan):
    """Counts products in the gradient: two backward per forward product, and the recomputed ones.

    A rolled loop contains one layer's products, in the body of the scan. An unrolled loop contains those of both
    layers.
    """
    layers = 1 if scan else 2
    found = gradients(combination, remat_policy=policy, **({} if scan else {"scan_layers": False}))
    forward = forward_products(combination, scan)
    assert forward == 9 * layers + 1  # nine per block, and the head
    assert products(found) == 3 * forward + layers * RECOMPUTED[policy]


@pytest.mark.rest(covered_by="one program in integration/test_five_combinations.py")
@pytest.mark.parametrize(("policy", "scan"), [("save_qkv_proj", True), ("minimal_offloaded", False)])
def test_every_combination_makes_the_same_program(policy, scan):
    programs = set()
    for combination in ALL_COMBINATIONS:
        loss, params = loss_and_arguments(combination, remat_policy=policy, scan_layers=scan)
        programs.add(jax.jit(jax.grad(loss)).lower(params).as_text())
    assert len(programs) == 1


@functools.cache
def compiled(policy, layers):
    run = build(
        load(arguments("nnx", remat_policy=policy, base_num_decoder_layers=layers, **WIDE)).config, jax.devices()[:1]
    )
    return run, run.step.lower(*run.abstract_args()).compile()


def temporaries(policy, layers):
    return compiled(policy, layers)[1].memory_analysis().temp_size_in_bytes


def named_bytes(policy):
    """Returns the bytes per layer of the tensors that `policy` saves, in float32."""
    return 4 * TOKENS * sum(WIDTH[name] for name in EXPECTED[policy])


@pytest.mark.rest(covered_by="the order of memory and FLOPs")
@pytest.mark.parametrize("policy", ["save_dot_with_context_except_mlp", "minimal"])
def test_a_layer_more_costs_the_bytes_that_its_policy_names(policy):
    """The difference between two depths in the compiled step excludes memory that does not grow with depth."""

    def growth(policy):
        return temporaries(policy, DEPTHS[1]) - temporaries(policy, DEPTHS[0])

    assert growth(policy) - growth("full") == (DEPTHS[1] - DEPTHS[0]) * named_bytes(policy)


def test_what_a_policy_would_save_is_estimated_from_the_step_of_another():
    """The step that saves less also holds one layer's tensors. docs/benchmarks/remat.md has measurements on TPUs and
    GPUs."""
    run, _ = compiled("full", DEPTHS[0])
    sizes = recomputed(run.step.trace(*run.abstract_args()).jaxpr, "cpu")
    estimate = sum(sizes[name] for name in EXPECTED["minimal_with_context"])
    assert estimate == DEPTHS[0] * named_bytes("minimal_with_context")
    more = temporaries("minimal_with_context", DEPTHS[0]) - temporaries("full", DEPTHS[0])
    assert estimate - named_bytes("minimal_with_context") < more < UNCERTAINTY * estimate


@pytest.mark.rest(covered_by="what each policy keeps")
def test_compiled_memory_and_flops_order_as_the_policies_do():
    order = list(RECOMPUTED)
    memory = [temporaries(policy, DEPTHS[0]) for policy in order]
    flops = [compiled(policy, DEPTHS[0])[1].cost_analysis()["flops"] for policy in order]
    assert memory == sorted(memory)
    assert flops == sorted(flops, reverse=True)
    assert len(set(memory)) == len(set(flops)) == len(order)


def test_loss_and_gradients_do_not_depend_on_the_policy():
    """Covers policies that recompute everything or a part. Offloading policies run too, but a CPU's host and device
    share memory."""
    run, _ = compiled("full", DEPTHS[0])
    tree, batch = first_tree(run), packed_batch(run.config, run.rows)
    losses, norms = set(), []
    for policy in ("full", "minimal_with_context", "qkv_proj_offloaded"):
        run, step = compiled(policy, DEPTHS[0])
        _, metrics = step(state_from(run, tree), placed(run, batch), ())
        losses.add(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert len(losses) == 1
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"remat_policy": "qkv_proj_offloaded"},
            "=qkv_proj_offloaded: .*no pinned_host.*; choose save_qkv_proj",
        ),
        (
            {"remat_policy": "minimal_offloaded"},
            "remat_policy=minimal_offloaded: .*they have device.*; choose minimal,",
        ),
        ({"remat_policy": "custom", "context": "offload"}, "context=offload: .*; choose device or remat for each"),
        (
            {"remat_policy": "custom", "context": "offload", "decoder_layer_input": "offload"},
            "decoder_layer_input=offload, context=offload: .*; choose device for each",
        ),
    ],
)
def test_offload_is_refused_by_name_without_pinned_host_memory(words, message):
    config = tiny_config("nnx", **words)
    with pytest.raises(UserError, match=message):
        check_offload(config, ["device", "unpinned_host"])
    check_offload(config, ["device", "pinned_host"])


def test_what_offloads_nothing_needs_no_host_memory():
    for words in ({"remat_policy": "full"}, {"remat_policy": "custom", "context": "device"}, {"context": "offload"}):
        check_offload(tiny_config("nnx", **words), ["device"])


def test_a_policy_that_is_none_of_them_is_a_key_error():
    with pytest.raises(KeyError, match="ful"):
        make_policy("ful", {})
