"""Determines the MaxText version of a command, and the consequences of the version.

MaxText 0.2.5 removed Linen and the three flags that select NNX or Linen. It also changed the default dataset_type from
tfds to synthetic.
"""

from collections.abc import Iterable, Sequence

from trainer.config.dump import to_flow
from trainer.config.files import MAXTEXT_YML, Entry, YmlFile, is_maxtexts_base, read_chain
from trainer.config.flags import COMBINATIONS, combination, flags_of
from trainer.config.load import Loaded
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema
from trainer.maxtext.program import Yml, program_yml
from trainer.maxtext.shell_words import has_variable

WITHOUT_LINEN = "0.2.5"
NO_DATA = "dataset_type=synthetic"  # MaxText's default since 0.2.5


def versions() -> list[str]:
    """Returns the versions of MaxText whose commands differ."""
    return list(verdicts.table()["versions"])


def version_of(names: Iterable[str]) -> str:
    """Returns the MaxText version that the keys `names` reveal; "" if they reveal none.

    "0.2.4" stands for all versions before 0.2.5.
    """
    given = set(names)
    return next((version for version, keys in verdicts.table()["versions"].items() if not given.isdisjoint(keys)), "")


def yml_of(yml: str) -> Yml:
    """Returns a description of the yml whose file name in a command is `yml`."""
    shell = has_variable(yml)
    if not yml or is_maxtexts_base(yml) or (shell and (yml.endswith("/base.yml") or program_yml(yml))):
        return Yml(MAXTEXT_YML.name)
    files, mistakes, notes = read_chain(yml, schema())
    own = [file for file in files if file.path != MAXTEXT_YML]
    names = [entry.name for file in own for entry in file.entries]
    if not mistakes and all(is_theirs(file) and not changes(file) for file in own):
        return Yml(MAXTEXT_YML.name, names)
    entries = [entry for file in own for entry in (changes(file) if file.is_maxtext else file.entries)]
    below = (notes or [f"{MAXTEXT_YML.name}:"])[0].partition(":")[0] if len(own) < len(files) else ""
    return Yml(yml, names, {entry.name: entry.given for entry in entries}, below)


def is_theirs(file: YmlFile) -> bool:
    """Returns whether a file is MaxText's base.yml or the yml of one of its programs."""
    return file.is_maxtext or bool(program_yml(file.path.as_posix()))


def changes(file: YmlFile) -> list[Entry]:
    """Returns the entries of a MaxText yml that the user changed.

    In a yml of 0.2.5, the default dataset_type (`NO_DATA`) does not count as changed.
    """
    entries = file.entries
    newest = version_of(entry.name for entry in entries) == WITHOUT_LINEN
    changed, _ = base_yml.changed_entries(entries, schema(), program_yml(file.path.as_posix()))
    return [entry for entry in changed if not (newest and f"{entry.name}={entry.given}" == NO_DATA)]


def without_linen(names: Sequence[str], says_data: bool) -> list[str]:
    """Returns words for those defaults of MaxText 0.2.5 that differ from this trainer's.

    `names`: the keys that the command sets. `says_data`: whether dataset_type is set or unused.
    """
    flags = flags_of(next(iter(COMBINATIONS)))
    unlike = [name for name, value in flags.items() if name not in names and schema().keys[name].default != value]
    return [*([] if says_data else [NO_DATA]), *(f"{name}={to_flow(flags[name])}" for name in unlike)]


def version_line(version: str, says_data: bool, loaded: Loaded | None) -> str:
    """Returns a line on the consequences of a command's MaxText version, or "". `says_data`: see `without_linen`."""
    if version == WITHOUT_LINEN:
        nnx = next(iter(COMBINATIONS))
        name = combination(loaded.config) if loaded else nnx
        runs = f"it runs as {nnx}, with all three true" if name == nnx else f"those given here make it {name}"
        return f"read as a command of MaxText {version}, which has no flags for NNX and Linen: {runs}"
    if version or says_data:
        return ""
    return (
        f"read as a command of MaxText before {WITHOUT_LINEN}, where dataset_type is tfds by default; in "
        f"{WITHOUT_LINEN} it is synthetic: for that write --maxtext={WITHOUT_LINEN} before the command"
    )
