"""What a compilation writes down, and who holds memory."""

import math

import jax
import pytest

from trainer.aot import buffers, dump


@pytest.fixture(scope="module")
def parameters(step):
    state, _ = step.run.abstract_args()
    return buffers.leaves(step.run.backend.unpack(state).params)


def test_a_compilation_writes_its_texts_into_a_folder_of_its_own(step):
    assert step.texts.optimized.startswith("HloModule jit_step")
    assert "all-gather(" in step.texts.partitioned
    assert step.texts.assignment.startswith("BufferAssignment")
    assert "Live ranges at" in step.texts.live_range


def test_one_device_needs_no_partitioning(tmp_path):
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dump.options(tmp_path))
    texts = dump.read(tmp_path)
    assert texts.optimized
    assert not [c for c in ("all-gather", "all-reduce") if c in texts.partitioned]
    assert dump.read(tmp_path / "nothing") == ("", "", "", "")


def test_leaves_are_what_one_device_holds(step, parameters):
    state, batch = step.run.abstract_args()
    total = sum(leaf.bytes for leaf in buffers.leaves((state, batch)))
    assert total == pytest.approx(step.compiled.memory_analysis().argument_size_in_bytes, rel=0.01)
    embedding = next(leaf for leaf in parameters if leaf.whole == (64, 16))
    assert (embedding.dims, embedding.bytes) == ((64, 4), 64 * 4 * 4)


def test_the_temporaries_at_the_fullest_moment(step, parameters):
    found = buffers.temporaries(step.texts, [leaf.dims for leaf in parameters])
    taken = step.compiled.memory_analysis().temp_size_in_bytes
    assert 0.85 * taken < sum(buffer.size for buffer in found) <= taken
    assert [b.size for b in found] == sorted((b.size for b in found), reverse=True)
    named = [buffer for buffer in found if buffer.op_name and ".py:" in buffer.source]
    assert sum(b.size for b in named) > 0.5 * taken
    assert "jit(step)" in named[0].op_name
    assert any("/trainer/" in buffer.source for buffer in named)


def test_kinds_of_temporaries(step, parameters):
    kinds = buffers.by_kind(buffers.temporaries(step.texts, [leaf.dims for leaf in parameters]))
    rows = step.run.rows // 8
    config = step.run.config
    inputs = config.base_num_decoder_layers * rows * config.max_target_length * config.base_emb_dim * 4
    assert kinds[buffers.SAVED] >= inputs  # each block's input, for the backward pass to start from
    blocks = sum(leaf.bytes for leaf in parameters if len(leaf.dims) > 2)
    assert 0 < kinds[buffers.GRADIENTS] <= 2 * sum(leaf.bytes for leaf in parameters)
    assert blocks / 2 < kinds[buffers.GRADIENTS]
    assert sum(kinds.values()) == sum(b.size for b in buffers.temporaries(step.texts))
    without = buffers.by_kind(buffers.temporaries(step.texts))
    assert without[buffers.GRADIENTS] == 0


def test_nothing_is_known_without_an_assignment(step):
    assert buffers.temporaries(step.texts._replace(assignment="")) == ()
    assert math.isclose(sum(buffers.by_kind(()).values()), 0)
