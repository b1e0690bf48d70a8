"""The files that a compilation dumps, and the buffers found in them."""

import math

import jax
import pytest
from support import ALL_COMBINATIONS, tiny_config

from trainer.aot import buffers, dump
from trainer.aot.hlo import parse
from trainer.training.build import build


@pytest.fixture(scope="module")
def parameters(step):
    state, *_ = step.run.abstract_args()
    return buffers.leaves(step.run.codec.unpack(state).params)


def test_a_compilation_writes_its_texts_into_a_folder_of_its_own(step):
    assert step.texts.optimized.startswith("HloModule jit_step")
    assert "all-gather(" in step.texts.partitioned
    assert step.texts.assignment.startswith("BufferAssignment")
    assert "Live ranges at" in step.texts.live_range


def test_one_device_needs_no_partitioning(tmp_path):
    with dump.uncached():
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dump.options(tmp_path))
    texts = dump.read(tmp_path)
    assert texts.optimized
    assert not [c for c in ("all-gather", "all-reduce") if c in texts.partitioned]
    assert dump.read(tmp_path / "nothing") == ("", "", "", "")


def test_what_a_cache_holds_is_compiled_all_the_same(tmp_path):
    """JAX's cache must be bypassed, because the compiler dumps no buffers for a cached program."""

    def texts(folder):
        jax.jit(lambda x: x * 3 + 1).lower(1.0).compile(compiler_options=dump.options(folder))
        return dump.read(folder)

    with dump.uncached():
        assert texts(tmp_path / "first").assignment
    texts(tmp_path / "into the cache")  # the suite's cache, see tests/conftest.py
    assert not texts(tmp_path / "from the cache").assignment
    with dump.uncached():
        assert texts(tmp_path / "again").assignment
    assert not texts(tmp_path / "from the cache, after that").assignment


def test_a_small_program_in_the_same_folder_is_not_taken_for_it(tmp_path):
    for number, text in enumerate(("the step, at first", "the step, again too", "small")):
        (tmp_path / f"module_{number:04}.jit_f.after_optimizations.txt").write_text(text)
    assert dump.read(tmp_path).optimized == "the step, again too"


def test_leaves_are_what_one_device_holds(step, parameters):
    args = step.run.abstract_args()
    total = sum(leaf.bytes for leaf in buffers.leaves(args))
    assert total == pytest.approx(step.compiled.memory_analysis().argument_size_in_bytes, rel=0.01)
    embedding = next(leaf for leaf in parameters if leaf.global_dims == (64, 16))
    assert (embedding.dims, embedding.bytes) == ((64, 4), 64 * 4 * 4)


def test_the_temporaries_at_the_peak(step, parameters):
    found = buffers.temporaries(step.texts, [leaf.dims for leaf in parameters])
    taken = step.compiled.memory_analysis().temp_size_in_bytes
    assert 0.85 * taken < sum(buffer.size for buffer in found) <= taken
    assert [b.size for b in found] == sorted((b.size for b in found), reverse=True)
    named = [buffer for buffer in found if buffer.op_name and ".py:" in buffer.source]
    assert sum(b.size for b in named) > 0.5 * taken
    assert "jit(step)" in named[0].op_name
    assert all("/trainer/" in buffer.source for buffer in named)


def test_kinds_of_temporaries(step, parameters):
    kinds = buffers.by_kind(buffers.temporaries(step.texts, [leaf.dims for leaf in parameters]))
    rows = step.run.rows // 8
    config = step.run.config
    inputs = config.base_num_decoder_layers * rows * config.max_target_length * config.base_emb_dim * 4
    assert kinds[buffers.SAVED] >= inputs  # each block's input, which the backward pass reads
    blocks = sum(leaf.bytes for leaf in parameters if len(leaf.dims) > 2)
    assert 0 < kinds[buffers.GRADIENTS] <= 2 * sum(leaf.bytes for leaf in parameters)
    assert blocks / 2 < kinds[buffers.GRADIENTS]
    assert sum(kinds.values()) == sum(b.size for b in buffers.temporaries(step.texts))
    without = buffers.by_kind(buffers.temporaries(step.texts))
    assert without[buffers.GRADIENTS] == 0


OPTIMIZED = """ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="state['kernel']"}
  %half = bf16[4,8]{1,0} convert(%p)
  %saved = f32[4,8]{1,0} negate(%p), metadata={op_name="jit(step)/jvp()/neg"}
  %grad = f32[8,4]{1,0} transpose(%p), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %work = f32[16]{0} slice(%p), metadata={op_name="jit(step)/transpose(jvp())/slice"}
  %early = f32[999]{0} iota(), metadata={op_name="jit(step)/jvp()/iota"}
  ROOT %out = f32[4,8]{1,0} negate(%p), metadata={op_name="jit(step)/sub"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 128, parameter 0, shape |f32[4,8]| at ShapeIndex {}:
 value: <0 p @0> (size=128,offset=0): f32[4,8]{1,0}
allocation 1: size 4096, preallocated-temp:
 value: <1 half @0> (size=64,offset=0): bf16[4,8]{1,0}
 value: <2 saved @0> (size=128,offset=64): f32[4,8]{1,0}
 value: <3 grad{1} (phi) @0> (size=128,offset=192): f32[8,4]{1,0}
 value: <4 work @0> (size=64,offset=320): f32[16]{0}
 value: <5 early @0> (size=300,offset=0): f32[75]{0}
allocation 2: size 4096, color 1, preallocated-temp:
 value: <6 out @1> (size=4096,offset=0): f32[4,8]{1,0:S(1)}
"""
LIVE_RANGE = """HloLiveRange (max 9):
  InstructionSequence:
    0:early
    1:saved
    4:work
  BufferLiveRange:
    half{}:1-9
    saved{}:1-6
    grad{1}:4-6
    work{}:4-5
    early{}:0-0
    out{}:0-9
"""


def test_kinds_are_told_by_what_made_a_buffer():
    texts = dump.Dump("", OPTIMIZED, ASSIGNMENT, LIVE_RANGE)
    found = buffers.temporaries(texts, [(4, 8)])
    assert {b.name: (b.size, b.kind) for b in found} == {
        "half": (64, buffers.COPIES),
        "saved": (128, buffers.SAVED),
        "grad": (128, buffers.GRADIENTS),
        "work": (64, buffers.OTHER),
    }
    # While the forward pass runs, its values have no special kind.
    forward = buffers.temporaries(texts._replace(live_range=LIVE_RANGE.replace("4:work", "4:saved")), [(4, 8)])
    assert {b.name: b.kind for b in forward}["saved"] == buffers.OTHER


@pytest.mark.parametrize("argument", ["state['model']['kernel']", "state.params['params']['kernel']"])
def test_a_copy_of_the_state_is_one_in_nnx_and_in_linen(argument):
    optimized = OPTIMIZED.replace("state['kernel']", argument)
    found = buffers.temporaries(dump.Dump("", optimized, ASSIGNMENT, LIVE_RANGE), [(4, 8)])
    assert {b.name for b in found if b.kind == buffers.COPIES} == {"half"}


def test_the_arguments_of_a_compiled_step_have_names_of_these_kinds():
    """Tests the last combination, because its state differs most from the one above."""
    run = build(tiny_config(ALL_COMBINATIONS[-1], base_num_decoder_layers=1), jax.devices()[:1])
    with dump.uncached():  # a cached program has the names of the combination that compiled it first
        module = parse(run.step.lower(*run.abstract_args()).compile().as_text())
    names = [made.op_name for made in module.computations[module.entry] if made.opcode == "parameter"]
    of_state = [name for name in names if name.startswith(buffers.STATE)]
    assert len(of_state) == len(jax.tree.leaves(run.abstract_state))
    assert all(name.startswith("batch[") for name in set(names) - set(of_state))


def test_nothing_is_known_without_an_assignment(step):
    assert buffers.temporaries(step.texts._replace(assignment="")) == ()
    assert math.isclose(sum(buffers.by_kind(()).values()), 0)
