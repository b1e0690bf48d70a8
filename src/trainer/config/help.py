"""The text of --help: base.yml, with what each key accepts."""

import itertools

from trainer.config.dump import to_flow
from trainer.config.files import preset_names
from trainer.config.schema import Key, schema

_HEAD = """\
usage: python -m trainer.train [FILE.yml] [key=value ...]

FILE.yml is any YAML file with `base_config: base.yml`, or with another such file as its base_config. Without it, or
with base.yml, the defaults below apply. Precedence, lowest first: these defaults, the preset of model_name, FILE.yml,
key=value. Lists are written [a,b].
Presets of model_name: {presets}."""


def help_text() -> str:
    """Every key by section: its meaning, its default, its allowed values."""
    parts = [_HEAD.format(presets=", ".join(preset_names()))]
    for section, keys in itertools.groupby(schema().keys.values(), lambda key: key.section):
        parts.append(f"\n---- {section} ".ljust(100, "-"))
        if intro := schema().intros.get(section):
            parts.append(intro)
        for doc, group in itertools.groupby(keys, lambda key: key.doc):
            parts += ["", *(f"  {line}" for line in doc.splitlines()), *map(_line, group)]
    return "\n".join(parts)


def _line(key: Key) -> str:
    default = f"{key.name}={to_flow(key.default)}"
    return f"{default:<52}  {key.allowed}" if len(default) <= 52 else f"{default}\n{'':<52}  {key.allowed}"
