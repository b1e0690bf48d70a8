"""Looks up model families: those in this package by name, others by import path.

`decoder_block=package.module:name` names a family's `Facts`, a `Family`, or the class of a family's only block.
"""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from trainer.config.errors import UserError
from trainer.config.family import Facts, facts_of, imported
from trainer.config.flags import linen_stack
from trainer.config.keys import Config
from trainer.config.rules import make_rules, read_rules
from trainer.layers.matrices import choose_products
from trainer.layers.param import Buffer
from trainer.layers.stack import MakeBlock, Stack
from trainer.models import FAMILIES
from trainer.models.adapters import with_adapters
from trainer.models.family import Family, MaxText
from trainer.models.huggingface import HuggingFace
from trainer.models.quantization import quantization_rules
from trainer.models.sparsity import with_masks
from trainer.models.stages import in_stages
from trainer.products.context import Context
from trainer.products.plain import Rules, make_wide

# The arguments of a block's call.
_ARGUMENTS = ("x", "cache", "context")
# The attributes of a decoder other than its stacks. A stack must not have one of these names or the name of a method.
NOT_STACKS = ("config", "position_embedder", "decoder_norm", "logits_dense")
_METHODS = ("head", "make_layers", "run_layers", "make_block", "run_block")
_QUERIES_AND_KEYS = ("/query/kernel", "/key/kernel")
RESERVED = frozenset({*dir(nnx.Module), *NOT_STACKS, *_METHODS})


def in_stack(name: str) -> bool:
    """Returns whether the parameter `name` belongs to a stack and thus has the stack's leading axes."""
    _, found, path = f"/{name}".partition("/decoder/")
    return bool(found) and path.partition("/")[0] not in NOT_STACKS


def leading_axes(stacks: Sequence[Stack], name: str) -> tuple[str, ...]:
    """Returns the leading axes of the parameter `name`, along which layers are stacked; () outside of the stacks."""
    found = (stack.axes for stack in stacks if f"/decoder/{stack.name}/" in f"/{name}/")
    return next(found, ())


def family(decoder_block: str) -> Family:
    """Returns the family with the name or import path `decoder_block`.

    Raises:
      UserError: there is no such family.
    """
    found = imported(FAMILIES.get(decoder_block, decoder_block), decoder_block)
    if isinstance(found, Facts):
        found = imported(found.family, decoder_block)
    if isinstance(found, type):
        return Family(lambda config: [Stack("layers", (found,), config.base_num_decoder_layers)])
    if not isinstance(found, Family):
        raise UserError(f"decoder_block={decoder_block}: this is not a block class, a Family, or the Facts of a family")
    return found


def loads_from(decoder_block: str, trained: str) -> bool:
    """Returns whether the family `decoder_block` may load parameters that were trained with the family `trained`.

    If both families are in this package, they must declare the same stacks, norm, products and embedding scale, so that
    the same keys produce the same output. A custom family (one with an import path) may load from any family. A family
    of this package may not load from a custom family, so this function never imports a custom family.
    """
    if not {decoder_block, trained} <= FAMILIES.keys():
        return decoder_block not in FAMILIES
    one, other = family(decoder_block), family(trained)
    return all(getattr(one, name) == getattr(other, name) for name in ("stacks", "norm", "products", "embedding_scale"))


def with_products(config: Config, path: str, module: Any, rngs: nnx.Rngs) -> Any:
    """Returns `module`, whose canonical name is `path`, with the products that `product_rules(config)` chooses."""
    return choose_products(module, path, product_rules(config), rngs)


def product_rules(config: Config) -> Rules:
    """Returns the rules for products: `unmasked_rules`, extended by the masks of weight sparsity and by adapters."""
    return with_adapters(config, with_masks(config, unmasked_rules(config)))


def unmasked_rules(config: Config) -> Rules:
    """Returns the rules for products without masks and adapters: the family's rules, followed by those of quantization.

    With `batch_invariant`, the only rule is that for batch-invariant products.
    """
    own = family(config.decoder_block).products(config)
    if own and config.batch_invariant:
        raise UserError(
            f"batch_invariant=true: decoder_block={config.decoder_block} has custom products, which may not be "
            "batch-invariant"
        )
    return [("", make_wide)] if config.batch_invariant else [*own, *quantization_rules(config)]


def check_products(config: Config, names: Sequence[str]) -> None:
    """Checks that each of the family's rules for products matches a parameter.

    `names` are the names of the model's arrays. A parameter may be a pytree of several arrays.

    Raises:
      UserError: a rule matches no parameter; the message names all such rules.
    """
    rules = family(config.decoder_block).products(config)
    whole = {path for name in names for path in itertools.accumulate(name.split("/"), "{}/{}".format)}
    if unused := [pattern for pattern, _ in rules if not any(re.search(pattern, path) for path in whole)]:
        raise UserError(
            f"decoder_block={config.decoder_block}: its rules for products {', '.join(unused)} match no parameter; the "
            f"parameters are: {', '.join(names)}"
        )


def hugging_face(config: Config, decoder_block: str = "") -> HuggingFace:
    """Returns the family's Hugging Face declaration that represents `config` exactly or most closely.

    Args:
      decoder_block: the family; by default the family of `config`.

    Raises:
      UserError: the family has no such declaration, or its layouts contradict its `Facts` about RoPE pairing.
    """
    block = decoder_block or config.decoder_block
    if not (declared := family(block).hugging_face):
        raise UserError(
            f"decoder_block={block} declares no parameter names of Hugging Face, so its checkpoints "
            "cannot be read or written; a run's folder and format=params can"
        )
    if block == config.decoder_block and block not in FAMILIES:
        _check_pairs(config, declared)
    found = min(declared, key=lambda hf: len(hf.contradicted(config)))  # if several are equally close, the first
    merged = [it.of(config) for it in found.merged]
    return found if merged == list(found.merged) else found._replace(merged=merged)


def _check_pairs(config: Config, declared: Sequence[HuggingFace]) -> None:
    facts = facts_of(config)
    if facts is None or any("rope_interleave" in keys for keys in facts.ignores.values()):
        return
    heads = {name: it.rotated for hf in declared for name, it in hf.layouts.items() if name.endswith(_QUERIES_AND_KEYS)}
    fixed, begin = facts.fixes.get("rope_interleave"), f"decoder_block={config.decoder_block}"
    plain, halves = ([name for name, rotated in heads.items() if bool(rotated) is on] for on in (False, True))
    if fixed is True and halves:
        raise UserError(
            f"{begin}: Facts.fixes has rope_interleave=true, for checkpoints whose heads are adjacent pairs, but the "
            f"layout of {halves[0]} has rotated={heads[halves[0]]!r}, for halves: leave one of them out"
        )
    if fixed is None and plain:
        raise UserError(
            f"{begin}: the layout of {plain[0]} has no rotated: rotated='head_dim' is right where the two halves of a "
            'head are rotated, as in Llama; for adjacent pairs Facts.fixes has {"rope_interleave": True}; a family '
            "without this rotation has rope_interleave in Facts.ignores"
        )


def maxtext(decoder_block: str) -> MaxText:
    """Returns a family's declaration for MaxText.

    Raises:
      UserError: the family has no such declaration.
    """
    if (found := family(decoder_block).maxtext) is None:
        raise UserError(
            f"decoder_block={decoder_block} does not declare how MaxText stores its parameters, so its checkpoints "
            "cannot be read or written; a run's folder and format=params can"
        )
    return found


def stacks(config: Config) -> tuple[Stack, ...]:
    """Returns the non-empty stacks of the decoder of the resolved `config`.

    Raises:
      UserError: the stacks or their blocks are invalid.
    """
    name = config.decoder_block
    declared = family(name).stacks(config)
    if not isinstance(declared, Sequence) or not all(map(_is_stack, declared)):
        raise UserError(
            f"decoder_block={name}: its stacks are not a list of Stack(name, tuple of blocks, count): {declared!r}"
        )
    found = tuple(stack for stack in declared if stack.layers)
    names = [stack.name for stack in found]
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"decoder_block={name}: a decoder needs at least one stack, and stack names must be unique; found: "
            f"{', '.join(names) or 'none'}"
        )
    if taken := [stack for stack in names if stack in RESERVED or not stack.isidentifier()]:
        raise UserError(
            f"decoder_block={name}: a stack cannot be named {', '.join(map(repr, taken))}: the name is not an "
            "identifier, or the decoder uses it"
        )
    for block in blocks(found):
        made = block_class(block)
        if not isinstance(made, type):
            raise UserError(f"decoder_block={name}: {made} is not a block class")
        if issubclass(made, nnx.Module):
            check_calls(block, ("config", "rngs"), name)
        elif problem := linen_stack(config):
            raise UserError(f"decoder_block={name}: {made.__name__} is not an nnx.Module; {problem}")
    return in_stages(config, found)


def _is_stack(declared: Any) -> bool:
    return (
        isinstance(declared, Stack)
        and isinstance(declared.name, str)
        and isinstance(declared.blocks, tuple)
        and isinstance(declared.count, int)
    )


def blocks(stacks: Sequence[Stack]) -> list[MakeBlock]:
    """Returns the blocks of all stacks."""
    return [block for stack in stacks for block in stack.blocks]


def block_class(block: MakeBlock) -> Any:
    """Returns the class that makes a block."""
    return block_class(block.func) if isinstance(block, functools.partial) else block


def axis_rules(config: Config) -> dict[str, tuple[str, ...]]:
    """Returns a dict from each logical axis to its mesh axes, by the rules of the configuration and of the family.

    Raises:
      UserError: a rule of the family is invalid, or the configuration already has a rule for its axis.
    """
    block, rules = config.decoder_block, make_rules(config.logical_axis_rules)
    own = family(block).axes
    if known := [name for name in own if name in rules]:
        raise UserError(f"decoder_block={block}: its axes {', '.join(known)} already have rules in logical_axis_rules")
    _, problems = read_rules([[name, list(a) if isinstance(a, tuple) else a] for name, a in own.items()], own)
    if problems:
        raise UserError("\n  ".join([f"decoder_block={block}: invalid rules for the family's axes:", *problems]))
    return make_rules(own.items()) | rules


class Place(NamedTuple):
    """The location of a stacked array, whose first axis is layers.

    Attributes:
      stack: the name of the stack.
      path: the path within the block.
      layers: the model-wide indices of the array's layers.
      first: the index of the stack's first layer.
    """

    stack: str
    path: str
    layers: range
    first: int


def place(stacks: Sequence[Stack], name: str) -> Place | None:
    """Returns the location of an array in the stacks; None if it is outside of them.

    Args:
      name: the canonical name, with or without a prefix, such as decoder/layers/mlp/wo/kernel or
        0/mu/decoder/layers/mlp/wo/kernel.
    """
    first = 0
    for stack in stacks:
        for i, below in enumerate(stack.paths):
            _, found, path = f"/{name}".partition(f"/decoder/{below}/")
            if found:
                layers = range(first + i, first + stack.layers, len(stack.blocks))
                return Place(stack.name, path, layers, first)
        first += stack.layers
    return None


def places_of(config: Config, names: Iterable[str]) -> dict[str, Place | None]:
    """Returns the location of each array in the stacks of `config`; see `place`."""
    declared = stacks(config)
    return {name: place(declared, name) for name in names}


def check_calls(block: MakeBlock, made_of: Sequence[str], name: str) -> None:
    """Checks that a block can be constructed with the arguments `made_of` and called with (x, cache, context).

    Raises:
      UserError: the block cannot. The message names the decoder_block `name`.
    """
    found = block_class(block)
    given = functools.partial(block)  # a partial of a partial is flattened
    if inspect.isabstract(found):
        raise UserError(f"decoder_block={name}: the class {found.__name__} is abstract; give a concrete class")
    for method, arguments in {"__init__": made_of, "__call__": _ARGUMENTS}.items():
        # getattr would also find the metaclass's __call__, and a metaclass hides the class's signature.
        fn = next((vars(base)[method] for base in found.__mro__ if method in vars(base)), None)
        if fn is None:
            raise UserError(f"decoder_block={name} is not a block: {found.__name__} has no {method}")
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
                f"decoder_block={name} is not a block: it cannot be called as {call} ({error}); "
                "docs/guides/migrating.md has an example"
            ) from None


def check_state(config: Config, subclasses: bool = True) -> None:
    """Checks that the NNX blocks of a custom family have parameters, and no state that a forward pass would update.

    `subclasses`: whether subclasses of `nnx.Param` and of `Buffer` are allowed. Linen keeps each type of variable in a
    separate collection, and Linen's scan would drop the collections of such subclasses.

    Raises:
      UserError: a block has no parameters, or has other state such as running statistics or random number generators.
    """
    for block in blocks(stacks(config)) if config.decoder_block not in FAMILIES else ():
        if not issubclass(block_class(block), nnx.Module):
            continue
        made = nnx.eval_shape(lambda block=block: block(config, nnx.Rngs(0)))
        params, buffers, rest = nnx.state(made, nnx.Param, Buffer, ...)
        for path, variable in (*nnx.to_flat_state(params), *nnx.to_flat_state(buffers)):
            if not subclasses and type(variable) not in (nnx.Param, Buffer):
                raise UserError(
                    f"decoder_block={config.decoder_block}: {'/'.join(map(str, path))} is a {type(variable).__name__}. "
                    "With Linen a variable must be of type nnx.Param or Buffer, not of a subclass; use that type, or "
                    "the combination nnx"
                )
        others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
        refuse_state(config, bool(nnx.to_flat_state(params)), others)


def refuse_state(config: Config, has_parameters: bool, others: Sequence[str]) -> None:
    """Raises UserError for a block without parameters or with other state. `others`: the paths of the other state."""
    if others:
        raise UserError(
            f"decoder_block={config.decoder_block} has state that a forward pass would update: "
            f"{', '.join(others[:3])}; a block may have parameters and buffers only: dropout uses context.key, and "
            "nothing updates statistics"
        )
    if not has_parameters:
        raise UserError(f"decoder_block={config.decoder_block} has no parameters: there is nothing to train")


def forward_flops_per_token(config: Config, params: Any) -> float:
    """Returns the FLOPs of the forward pass for one token, as the family of `config` counts them.

    If the family does not count them, they are derived from `params` (canonical; arrays or shapes): each of a layer's
    parameters counts as the kernel of one matrix product per token if it has at least two axes, and attention is not
    counted. Modules of multi-token prediction are counted in the same way, including one output head for each module.
    """
    if (count := family(config.decoder_block).forward_flops) is not None:
        return count(config, None)
    kernels = sum(_entries(params["decoder"][stack.name], len(stack.axes) + 2) for stack in stacks(config))
    kernels += _entries(params.get("mtp_block", {}), 2)
    return 2.0 * (kernels + (1 + config.mtp_num_layers) * config.base_emb_dim * config.vocab_size)


def _entries(tree: Any, axes: int) -> int:
    """Returns the number of entries of the arrays with at least `axes` axes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree) if leaf.ndim >= axes)
