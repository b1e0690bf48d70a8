"""Damaged checkpoints: every file has a checksum, and the message names the damaged file."""

import json

import pytest
from manager_cases import SIDECAR, saved, settings, small_tree

from trainer.checkpoint.manager import CheckpointManager, inspect
from trainer.config.errors import UserError


def files(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_any_damaged_file_is_named(tmp_path):
    path = saved(tmp_path)
    names = [name for name in files(path) if not name.startswith("commit") and name != "sums.json"]
    assert len(names) > 8
    for name in names:
        content = (path / name).read_bytes()
        if not content:
            continue
        changed = content[:-1] + bytes([content[-1] ^ 1]) if name != "_CHECKPOINT_METADATA" else b"no JSON"
        for damage in (content[:-1], changed, None):
            (path / name).unlink() if damage is None else (path / name).write_bytes(damage)
            told = rf"^checkpoint {path} is damaged: {name} (has|is not|cannot).*; to continue"
            with pytest.raises(UserError, match=told):
                inspect(path)
        (path / name).write_bytes(content)
    assert inspect(path) == SIDECAR


def test_damage_is_found_wherever_it_is_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.sums._CHUNK", 16)
    path = saved(tmp_path)
    name = max(files(path), key=lambda name: (path / name).stat().st_size)
    content = (path / name).read_bytes()
    assert len(content) > 4 * 16
    for i in (0, 16, len(content) // 2, len(content) - 1):
        (path / name).write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(UserError, match=f"is damaged: {name} has changed since it was written"):
            inspect(path)


@pytest.mark.parametrize("content", [None, "", "[]", '{"a": 1}'])
def test_sums_that_cannot_be_read_are_damage(tmp_path, content):
    path = saved(tmp_path)
    (path / "sums.json").unlink() if content is None else (path / "sums.json").write_text(content)
    with pytest.raises(UserError, match=r"is damaged: sums\.json cannot be read") as error:
        inspect(path)
    assert str(error.value).count("is damaged") == 1


@pytest.mark.parametrize("gone", ["_CHECKPOINT_METADATA", "sums.json", "state/_METADATA", "run/data.json"])
def test_a_damaged_newest_checkpoint_is_still_the_newest(tmp_path, gone):
    """Going back to an older checkpoint is the user's decision."""
    for updates in (1, 2):
        path = saved(tmp_path, updates)
    (path / gone).unlink()
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest == 2
        with pytest.raises(UserError, match=f"is damaged: {gone} .*; to continue from the previous checkpoint, remove"):
            inspect(manager.path(2))


def test_only_the_folder_that_is_saved_is_summed(tmp_path):
    """Other processes would not reach the barriers of another folder."""
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        stray = manager.directory / "9.orbax-checkpoint-tmp"
        stray.mkdir()
        manager.save(3, small_tree(), SIDECAR, {})
    assert inspect(manager.path(3)) == SIDECAR
    assert list(stray.iterdir()) == []


def test_sums_cover_every_file_but_the_mark_of_the_commit(tmp_path):
    path = saved(tmp_path)
    summed = json.loads((path / "sums.json").read_text())
    assert set(files(path)) - set(summed) <= {"sums.json", "commit_success.txt", "_CHECKPOINT_METADATA"}
