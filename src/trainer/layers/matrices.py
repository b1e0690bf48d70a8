"""Layers with weight matrices, and rules that choose the products with them."""

from typing import Any, TypeVar

from flax import nnx

from trainer.products.plain import Kernel, Rules, maker

M = TypeVar("M", bound=nnx.Module)


class WithMatrices(nnx.Module):
    """A layer with weight matrices. Initially, each matrix has the plain product."""

    def kernels(self) -> dict[str, Kernel]:
        """Returns a dict from each matrix's parameter name to a description of the matrix."""
        raise NotImplementedError

    def use(self, name: str, product: Any) -> None:
        """Sets the product of the matrix `name`, and converts the matrix to the product's format (`plain.stored`)."""
        raise NotImplementedError


def choose_products(module: M, path: str, rules: Rules, rngs: nnx.Rngs) -> M:
    """Gives the layers in `module` the products that `rules` choose. Returns `module`.

    Args:
      path: the canonical name of `module`, such as decoder/layers for a block; "" for a model.
      rngs: random numbers for the parameters of products. The initial weights of `module` already exist and do not
        depend on them.
    """
    for layer, name, kernel in matrices(module, path) if rules else ():
        if make := maker(rules, kernel.name):
            product = make(kernel, rngs=rngs)
            layer.use(name, nnx.data(product) if isinstance(product, nnx.Module) else product)
    return module


def matrices(module: nnx.Module, path: str) -> list[tuple[WithMatrices, str, Kernel]]:
    """Returns (layer, name in the layer, kernel) of each matrix of `module`. `path`: see `choose_products`."""
    return [
        (layer, name, kernel._replace(name="/".join([*filter(None, [path]), *map(str, below), name])))
        for below, layer in list(nnx.iter_modules(module))
        if isinstance(layer, WithMatrices)
        for name, kernel in layer.kernels().items()
    ]
