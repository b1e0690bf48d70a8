"""The families that there are: those of this package by name, anyone's by import path.

`decoder_block=package.module:name` names a `Family`, or a class that is a family's only block.
"""

import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config import UserError, linen_stack, make_rules, nearest
from trainer.config.errors import shortened
from trainer.layers.cache import Cache
from trainer.layers.context import Context
from trainer.layers.param import Buffer
from trainer.layers.stack import MakeBlock, Stack
from trainer.models.family import Family
from trainer.models.huggingface import HuggingFace

# decoder_block -> its family
FAMILIES = {
    "llama2": "trainer.models.llama2:FAMILY",
    "mistral": "trainer.models.mistral:FAMILY",
    "qwen3": "trainer.models.qwen3:FAMILY",
}
# Of a block's call.
_ARGUMENTS = ("x", "cache", "context")
# What lies beside the stacks in a decoder.
BESIDE = ("config", "decoder_norm", "logits_dense")


def family(decoder_block: str) -> Family:
    """The family of that name or import path.

    Raises:
      UserError: there is none.
    """
    found = _imported(FAMILIES.get(decoder_block, decoder_block))
    if isinstance(found, type):
        return Family(lambda config: [Stack("layers", (found,), config.base_num_decoder_layers)])
    if not isinstance(found, Family):
        raise UserError(f"decoder_block={decoder_block}: this is neither a class nor a trainer.models.family.Family")
    return found


def hugging_face(decoder_block: str) -> HuggingFace:
    """The Hugging Face side of a family.

    Raises:
      UserError: it declares none.
    """
    if (found := family(decoder_block).hugging_face) is None:
        raise UserError(
            f"decoder_block={decoder_block} declares no names of Hugging Face: how a checkpoint of Hugging Face or "
            "MaxText holds its parameters is not known; a run's folder and format=params are read and written"
        )
    return found


def stacks(config: Any) -> tuple[Stack, ...]:
    """The stacks of the decoder that `config`, resolved, describes, without empty ones.

    Raises:
      UserError: what is wrong with them or their blocks.
    """
    name = config.decoder_block
    found = tuple(stack for stack in family(name).stacks(config) if stack.layers)
    names = [stack.name for stack in found]
    if not names or len({*names, *BESIDE}) < len(names) + len(BESIDE):
        raise UserError(
            f"decoder_block={name}: a decoder has one stack or more, each with a name of its own and none called "
            f"{' or '.join(BESIDE)}; found: {', '.join(names) or 'none'}"
        )
    for block in blocks(found):
        made = block_class(block)
        if not isinstance(made, type):
            raise UserError(f"decoder_block={name}: {made} is no class of blocks")
        if issubclass(made, nnx.Module):
            check_calls(block, ("config", "rngs"), name)
        elif problem := linen_stack(config):
            raise UserError(f"decoder_block={name}: {made.__name__} is no nnx.Module; {problem}")
    return found


def blocks(stacks: Sequence[Stack]) -> list[MakeBlock]:
    """The blocks of all stacks."""
    return [block for stack in stacks for block in stack.blocks]


def block_class(block: MakeBlock) -> Any:
    """The class that makes a block."""
    return block_class(block.func) if isinstance(block, functools.partial) else block


def axis_rules(config: Any) -> dict[str, tuple[str, ...]]:
    """Each logical axis's mesh axes: the configuration's rules, and the family's for axes of its own."""
    own = {name: tuple(axes) for name, axes in family(config.decoder_block).axes.items()}
    return own | make_rules(config.logical_axis_rules)


class Place(NamedTuple):
    """Where an array lies that holds a part of several layers along its first axis.

    Attributes:
      stack: its name.
      path: within the block.
      layers: their numbers among all layers of the model.
      first: the number of the first layer of the stack.
    """

    stack: str
    path: str
    layers: range
    first: int


def place(stacks: Sequence[Stack], name: str) -> Place | None:
    """Where an array lies in the stacks; None: outside of them.

    Args:
      name: canonical, or with more before it: decoder/layers/mlp/wo/kernel, 0/mu/decoder/layers/mlp/wo/kernel.
    """
    first = 0
    for stack in stacks:
        for i, prefix in enumerate(stack.prefixes):
            _, found, path = f"/{name}".partition(f"/decoder/{stack.name}/{prefix}")
            if found:
                layers = range(first + i, first + stack.layers, len(stack.blocks))
                return Place(stack.name, path, layers, first)
        first += stack.layers
    return None


def init_cache(config: Any, rows: int, length: int) -> Cache:
    """Empty caches of all layers, for `rows` rows of up to `length` positions."""

    def empty(block: MakeBlock, count: int) -> Any:
        made: Any = nnx.eval_shape(lambda: make_block(block, config, nnx.Rngs(0)))
        one = made.init_cache(rows, length)
        return jax.tree.map(lambda array: jnp.broadcast_to(array, (count, *array.shape)), one)

    return Cache({stack.name: [empty(block, stack.count) for block in stack.blocks] for stack in stacks(config)})


def takes_cache(config: Any) -> bool:
    """Whether every block makes a cache, so that the model can be sampled from. Linen blocks do not."""
    classes = map(block_class, blocks(stacks(config)))
    return all(issubclass(made, nnx.Module) and hasattr(made, "init_cache") for made in classes)


def make_block(block: MakeBlock, config: Any, rngs: nnx.Rngs) -> nnx.Module:
    """One block, an NNX module."""
    return block(config, rngs)


def check_calls(block: MakeBlock, made_of: Sequence[str], name: str) -> None:
    """Checks that a block can be made of the arguments `made_of`, and called as one.

    Raises:
      UserError: it cannot; `name` is the decoder_block that it stands for.
    """
    found = block_class(block)
    given = functools.partial(block)  # of a partial the same
    if inspect.isabstract(found):
        raise UserError(f"decoder_block={name}: the class {found.__name__} is abstract; give one that can be made")
    for method, arguments in {"__init__": made_of, "__call__": _ARGUMENTS}.items():
        # Not by getattr, which finds what calls a class, too; nor by a class's signature, which its metaclass hides.
        fn = next((vars(base)[method] for base in found.__mro__ if method in vars(base)), None)
        if fn is None:
            raise UserError(f"decoder_block={name} is no block: {found.__name__} has no {method}")
        try:
            if method == "__init__":
                inspect.signature(fn).bind(found, *given.args, *arguments, **given.keywords)
            else:
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
        known = [key for key, value in vars(imported).items() if isinstance(value, type | Family)]
        raise UserError(f"decoder_block={name}: {module} has no {attribute}{nearest(attribute, known)}")
    return getattr(imported, attribute)


def check_state(config) -> None:
    """Checks that a user's NNX blocks hold parameters, and nothing else that a forward pass would have to update.

    Raises:
      UserError: what one holds besides, such as running statistics or generators of random numbers.
    """
    for block in blocks(stacks(config)) if config.decoder_block not in FAMILIES else ():
        if not issubclass(block_class(block), nnx.Module):
            continue
        made = nnx.eval_shape(lambda block=block: make_block(block, config, nnx.Rngs(0)))
        params, _, rest = nnx.state(made, nnx.Param, Buffer, ...)
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


def forward_flops_per_token(config: Any, params: Any) -> float:
    """FLOPs of the forward pass for one token, as the family of `config` counts them.

    Of one that does not count: from `params`, canonical, arrays or their shapes. Every parameter of a layer with two
    axes or more is taken for the kernel of a matrix product, which each token passes once; attention is not counted.
    """
    if (count := family(config.decoder_block).forward_flops) is not None:
        return count(config, None)
    layers = [params["decoder"][stack.name] for stack in stacks(config)]
    kernels = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layers) if leaf.ndim > 2)
    return 2.0 * (kernels + config.base_emb_dim * config.vocab_size)
