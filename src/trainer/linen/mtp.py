"""Multi-token prediction in Linen, with the structure and names of `models.mtp`."""

import functools
from typing import Any

from flax import linen

from trainer.config.keys import Config
from trainer.layers.loop import run_layer
from trainer.layers.sown import Sown
from trainer.linen.bridge import to_linen
from trainer.linen.layer import apply_layer, make_layer
from trainer.models import mtp
from trainer.models.mtp import Types, part_name, run_mtp
from trainer.models.norms import make_norm
from trainer.models.remat import remat_policy


class MtpLayer(linen.Module):
    """The submodules of multi-token prediction module `k`."""

    config: Config
    k: int

    def setup(self):
        for part in (mtp.EMBEDDING_NORM, mtp.HIDDEN_NORM, mtp.FINAL_NORM):
            setattr(self, part_name(self.k, part), to_linen(make_norm, self.config))
        setattr(self, part_name(self.k, mtp.PROJECTION), to_linen(mtp.make_projection, self.config, self.k))
        block, path = mtp.last_block(self.config)[1], mtp.part_path(self.k, mtp.BLOCK)
        setattr(self, part_name(self.k, mtp.BLOCK), make_layer(self.config, block, path))


class MtpBlock(linen.Module):
    """All multi-token prediction modules."""

    config: Config

    def setup(self):
        for k in mtp.depths(self.config):
            setattr(self, f"mtp_layer_{k}", MtpLayer(self.config, k))

    def __call__(self, x, hidden, context, ahead, types: Types) -> Sown:
        def part(k: int, name: str) -> Any:
            return getattr(getattr(self, f"mtp_layer_{k}"), part_name(k, name))

        return run_mtp(self.config, part, self._run_block, x, hidden, context, ahead, types)

    def _run_block(self, block, x, context, types):
        if self.is_initializing():
            (x, _) = block(x, None, context)
            return x, {}
        variables = {name: part for name, part in linen.unbox(dict(block.variables)).items() if part}
        call = functools.partial(apply_layer, block.clone(parent=None), types)
        return run_layer(call, variables, x, context, types, remat_policy(self.config))
