"""Every `module.name` and `package.module` that docstrings and comments mention exists."""

import re
from pathlib import Path

from trainer.config.schema import schema

ROOT = Path(__file__).parents[3] / "src"
TEXTS = {path.relative_to(ROOT).with_suffix("").parts: path.read_text() for path in (ROOT / "trainer").rglob("*.py")}
MODULES = {parts[:at] for parts in TEXTS for at in range(1, len(parts) + 1)} - {("trainer",)}
# Names of other packages and attributes of values, whose first part is also the name of a module here.
OTHERS = r"linen\.(scan|remat)|maxtext\.trainers\..*|ahead\.tokens|\w+\.(json|py)"


def defines(module, name):
    """Returns whether a module, or any file in a package, defines `name`, or the package exports it."""
    own = rf"(?m)^ *(?:(?:async )?def|class) {name}\b|^ *(?:\w+, )*{name}\b(?:: [^=\n]+)?(?:, \w+)* = |^    {name}: "
    texts = [text for parts, text in TEXTS.items() if parts[: len(module)] == module]
    offered = TEXTS.get((*module, "__init__"), "")
    return any(re.search(own, text) for text in texts) or bool(re.search(rf"import .*\b{name}\b|^    {name},", offered))


def is_there(name):
    """Returns whether `name` exists below one of the modules with which it begins; True if it begins with none."""
    parts = name.split(".")
    begun = {(at, module) for module in MODULES for at, part in enumerate(module) if part == parts[0]}
    for at, module in begun:
        known = len(module) - at
        if list(module[at:]) == parts[:known] and (known == len(parts) or defines(module, parts[known])):
            return True
    return not begun


def test_names_in_backticks_are_there():
    names = {
        (name, "/".join(parts))
        for parts, text in TEXTS.items()
        for name in re.findall(r"(?<!`)`([a-z_]\w*(?:\.\w+)+)`(?!`)", text)
        if not re.fullmatch(OTHERS, name) and name not in {f"config.{key}" for key in schema().keys}
    }
    assert len(names) > 100
    assert [it for it in sorted(names) if not is_there(it[0])] == []
    assert not any(map(is_there, ("checkpoint.load_parameters", "config.optimizers.TRAITS", "attention.no_such")))
