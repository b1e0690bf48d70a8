"""Properties of the source: which file names the flags, what a package may import, how fast the package loads."""

from pathlib import Path

from sources import FILES, SOURCE, imported

from trainer.config.flags import FLAGS


def test_one_file_names_the_flags():
    naming = [path.relative_to(SOURCE) for path in FILES if any(flag in path.read_text() for flag in FLAGS)]
    assert naming == ([Path("config/flags.py")] if FLAGS else [])  # no file after the flags are removed


def test_layers_models_and_ops_hold_no_mesh():
    for package in ("layers", "models", "ops"):
        for path in (SOURCE / package).rglob("*.py"):
            assert not any(name.startswith("jax.sharding") for name in imported(path)), path


def test_importing_the_package_and_the_configuration_loads_no_jax():
    import subprocess
    import sys

    code = "import sys, trainer, trainer.config, trainer.train; print('jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
