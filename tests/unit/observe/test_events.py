"""TensorBoard's events equal metrics.jsonl and contain each step once."""

import io
import math
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from trainer.config.errors import UserError
from trainer.observe.events import EVENTS_FILE, EventsWriter
from trainer.observe.runs import open_run


def records(data):
    """Returns the events of a TFRecord file, after checking its checksums against the definition of CRC-32C."""

    def masked(part):
        crc = 0xFFFFFFFF
        for byte in part:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        crc ^= 0xFFFFFFFF
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    file = io.BytesIO(data)
    while head := file.read(8):
        (length,) = struct.unpack("<Q", head)
        assert struct.unpack("<I", file.read(4))[0] == masked(head)
        event = file.read(length)
        assert struct.unpack("<I", file.read(4))[0] == masked(event)
        yield Event.FromString(event)


def scalars(folder):
    first, *events = records((folder / EVENTS_FILE).read_bytes())
    assert first.file_version == "brain.Event:2"
    return [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events]


def write(folder, steps, begin=0):
    with EventsWriter(folder, begin) as writer:
        for step in steps:
            row = {"learning/loss": 0.5 + step, "learning/grad_norm": math.nan if step == 1 else 0.0}
            writer.write({**row, "step": float(step), "run_name": "mine"})


def test_each_number_has_its_tag_and_its_step(tmp_path):
    write(tmp_path, range(2))
    (first, row), (second, broken) = scalars(tmp_path)
    assert (first, row) == (0, {"learning/loss": 0.5, "learning/grad_norm": 0.0})
    assert (second, broken["learning/loss"]) == (1, 1.5)
    assert math.isnan(broken["learning/grad_norm"])


def test_a_resumed_run_has_each_step_once_where_a_reader_expects_it(tmp_path):
    write(tmp_path, range(6))
    length = (tmp_path / EVENTS_FILE).stat().st_size
    write(tmp_path, range(3, 6), begin=3)
    assert [step for step, _ in scalars(tmp_path)] == list(range(6))
    assert (tmp_path / EVENTS_FILE).stat().st_size == length
    write(tmp_path, [0], begin=0)
    assert [step for step, _ in scalars(tmp_path)] == [0]


@pytest.mark.parametrize("tail", [b"\x00" * 64, b"\x07", "half"])
def test_a_damaged_end_is_removed(tmp_path, tail):
    write(tmp_path, range(3))
    path = tmp_path / EVENTS_FILE
    data = path.read_bytes()
    path.write_bytes(data[:-5] if tail == "half" else data + tail)
    write(tmp_path, [7], begin=7)
    assert [step for step, _ in scalars(tmp_path)] == [0, 1, *([] if tail == "half" else [2]), 7]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        EventsWriter(tmp_path)


def test_the_events_of_an_earlier_run_without_checkpoints_become_a_run_of_their_own(tmp_path):
    config = "enable_checkpointing: false"
    for step in range(3):
        with open_run(str(tmp_path), "mine", config, False, print) as run:
            run.begin(config, {"step": 0}, resumed=False, say=print)
            (run.path / "metrics.jsonl").write_text('{"step": 0}\n')
            write(run.path, [step])
    folders = ("tensorboard-1", "tensorboard-2", "tensorboard")
    for step, folder in enumerate(folders):
        (tmp_path / "read").mkdir(exist_ok=True)
        (tmp_path / "mine" / folder).rename(tmp_path / "read" / "tensorboard")
        assert [number for number, _ in scalars(tmp_path / "read")] == [step]
        (tmp_path / "read" / "tensorboard").rename(tmp_path / "mine" / folder)


def test_what_reads_a_configuration_does_not_load_the_writer():
    code = "import sys, trainer.observe; raise SystemExit('tensorboardX' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
