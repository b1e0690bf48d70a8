"""Layers with matrices, whose products are chosen by rules."""

from typing import Any, TypeVar

from flax import nnx

from trainer.products.plain import Kernel, Rules, maker

M = TypeVar("M", bound=nnx.Module)


class WithMatrices(nnx.Module):
    """A layer that multiplies with matrices. Its constructor gives each the plain product."""

    def kernels(self) -> dict[str, Kernel]:
        """Returns the matrices by the names of their parameters."""
        raise NotImplementedError

    def use(self, name: str, product: Any) -> None:
        """Replaces the product of the matrix `name`, and what is stored for it (`products.stored`)."""
        raise NotImplementedError


def choose_products(module: M, path: str, rules: Rules, rngs: nnx.Rngs) -> M:
    """Gives the layers in `module` the products of `rules`, and returns it.

    Args:
      path: the canonical name of `module`, such as decoder/layers for a block; "" for a model.
      rngs: for the parameters of products. It is used after `module` is made, so `module` draws what it draws without
        rules.
    """
    for layer, name, kernel in matrices(module, path) if rules else ():
        if make := maker(rules, kernel.name):
            product = make(kernel, rngs=rngs)
            layer.use(name, nnx.data(product) if isinstance(product, nnx.Module) else product)
    return module


def matrices(module: nnx.Module, path: str) -> list[tuple[WithMatrices, str, Kernel]]:
    """Returns the matrices of `module`, each with its layer and its name in it. `path`: see `choose_products`."""
    return [
        (layer, name, kernel._replace(name="/".join([*filter(None, [path]), *map(str, below), name])))
        for below, layer in list(nnx.iter_modules(module))
        if isinstance(layer, WithMatrices)
        for name, kernel in layer.kernels().items()
    ]
