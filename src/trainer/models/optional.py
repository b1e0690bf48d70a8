"""The parameters that a checkpoint may lack. Absent parameters keep their initial values."""

from collections.abc import Callable, Collection, Iterable

from trainer.config.keys import Config
from trainer.models.families import family
from trainer.models.mtp import module_path
from trainer.models.mtp_names import decoder_name, module_of

_PRODUCT = "/product/"  # part of the names of parameters that a product adds (`products.MakeProduct`)


def optional_group(config: Config, name: str) -> str:
    """Returns the path of the optional group that contains the canonical parameter `name`; "" if `name` is required.

    A checkpoint has all parameters of an optional group or none. The optional groups are
    - the parameters below each path in `Family.optional`, in layers and in the blocks of multi-token prediction
      modules;
    - the parameters that implement one matrix's product, such as an adapter;
    - the other parameters of a multi-token prediction module.
    """
    in_decoder = decoder_name(config, name)
    for path in family(config.decoder_block).optional:
        if f"{in_decoder}/".startswith(f"{path}/"):
            return name.removesuffix(in_decoder.removeprefix(path))
    if _PRODUCT in name:
        return name[: name.rindex(_PRODUCT)] + _PRODUCT.rstrip("/")
    return module_path(module_of(name)) if module_of(name) else ""


def lacking(
    config: Config, names: Iterable[str], held: Callable[[Collection[str]], Collection[str]]
) -> dict[str, list[str]]:
    """Returns the optional groups that a checkpoint lacks entirely: a dict from a group's path to the names of the
    parameters in the group.

    The dict does not contain groups that the checkpoint contains in part. The caller must treat the missing parameters
    of such groups as required.

    Args:
      names: the canonical names of the model's parameters.
      held: returns which of the given names the checkpoint contains, at least in part.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if group := optional_group(config, name):
            groups.setdefault(group, []).append(name)
    found = set(held([name for each in groups.values() for name in each]))
    return {group: each for group, each in groups.items() if found.isdisjoint(each)}
