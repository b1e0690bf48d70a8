"""The block that the decoder repeats: a family's, or anyone's by import path.

A block is a class. It is made as `Class(config, rngs)` if it is an `nnx.Module` and as `Class(config)` if it is a
Linen module, for which the decoder stack must be Linen's too, and called as
`block(x, cache, context) -> x, cache` (see `layers.context` and `models.llama2.Block`). `config` is resolved; a block
may read its keys. `cache` is None in training; a block that takes no cache can be trained and not sampled from.
"""

import importlib
import inspect
import math
import traceback
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from trainer.config import UserError, linen_stack, nearest
from trainer.config.errors import shortened
from trainer.layers.context import Context

# decoder_block -> the module that holds the family's Block
FAMILIES = {
    "llama2": "trainer.models.llama2",
    "mistral": "trainer.models.mistral",
    "qwen3": "trainer.models.qwen3",
}
# Of a block's call.
_ARGUMENTS = ("x", "cache", "context")


def block_class(config) -> Any:
    """The class of the configured block.

    Raises:
      UserError: there is no such module or class, or the decoder stack can not hold it.
    """
    name = config.decoder_block
    if name in FAMILIES:
        return importlib.import_module(FAMILIES[name]).Block
    found = _imported(name)
    if not isinstance(found, type):
        raise UserError(f"decoder_block={name}: this is no class")
    if issubclass(found, nnx.Module):
        check_calls(found, ("config", "rngs"), name)
    elif problem := linen_stack(config):
        raise UserError(f"decoder_block={name}: this is no nnx.Module; {problem}")
    return found


def check_calls(found: type, made_of: Sequence[str], name: str) -> None:
    """Checks that a class can be made of the arguments `made_of`, and called as a block is.

    Raises:
      UserError: it cannot; `name` is the decoder_block that it stands for.
    """
    if inspect.isabstract(found):
        raise UserError(f"decoder_block={name}: the class {found.__name__} is abstract; give one that can be made")
    for method, arguments in {"__init__": made_of, "__call__": _ARGUMENTS}.items():
        # Not by getattr, which finds what calls a class, too; nor by a class's signature, which its metaclass hides.
        fn = next((vars(base)[method] for base in found.__mro__ if method in vars(base)), None)
        if fn is None:
            raise UserError(f"decoder_block={name} is no block: {found.__name__} has no {method}")
        try:
            inspect.signature(fn).bind(found, *arguments)
        except (TypeError, ValueError) as error:
            call = f"{'block' if method == '__call__' else found.__name__}({', '.join(arguments)})"
            if method == "__call__":
                call += f", where context has the fields {', '.join(Context._fields)}"
            raise UserError(
                f"decoder_block={name} is no block: it is not called as {call} ({error}); docs/guides/migrating.md has "
                "an example"
            ) from None


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        by = "" if f"{module}.".startswith(f"{missing}.") else f", which {module} imports"
        raise UserError(
            f"decoder_block={name}: there is no module {missing}{by}; it is looked for in the current folder and where "
            "Python finds packages (PYTHONPATH, pip install)"
        ) from None
    except (Exception, SystemExit) as error:  # anything may go wrong in somebody's own module
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"decoder_block={name}: importing {module} fails: {type(error).__name__}: {shortened(str(error))} "
            f"({at.filename}:{at.lineno})"
        ) from error
    if not hasattr(imported, attribute):
        classes = [key for key, value in vars(imported).items() if isinstance(value, type)]
        raise UserError(f"decoder_block={name}: {module} has no {attribute}{nearest(attribute, classes)}")
    return getattr(imported, attribute)


def make_block(config, rngs: nnx.Rngs) -> nnx.Module:
    """One block, an NNX module."""
    return block_class(config)(config, rngs)


def check_state(config) -> None:
    """Checks that a user's NNX block holds parameters, and nothing else that a forward pass would have to update.

    Raises:
      UserError: what it holds besides, such as running statistics or generators of random numbers.
    """
    if config.decoder_block in FAMILIES or not issubclass(block_class(config), nnx.Module):
        return
    block = nnx.eval_shape(lambda: make_block(config, nnx.Rngs(0)))
    params, rest = nnx.state(block, nnx.Param, nnx.Not(nnx.Param))
    others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    refuse_state(config, bool(nnx.to_flat_state(params)), others)


def refuse_state(config, has_parameters: bool, others: Sequence[str]) -> None:
    """Raises the UserError for a block without parameters, or with other state besides, given by its paths."""
    if others:
        raise UserError(
            f"decoder_block={config.decoder_block} holds state besides its parameters: {', '.join(others[:3])}; a "
            "block may have none: dropout draws from context.key, and nothing updates statistics"
        )
    if not has_parameters:
        raise UserError(f"decoder_block={config.decoder_block} holds no parameters: there is nothing to train")


def forward_flops_per_token(config, params: Any) -> float:
    """FLOPs of the forward pass for one token of a model whose block was given by import path.

    From `params`, canonical, arrays or their shapes: every parameter of a layer with two axes or more is taken for the
    kernel of a matrix product, which each token passes once. Scores of attention are not known and not counted.
    """
    kernels = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params["decoder"]["layers"]) if leaf.ndim > 2)
    return 2.0 * (kernels + config.base_emb_dim * config.vocab_size)
