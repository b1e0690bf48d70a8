"""Compares the estimate of trainer.aot.recomputed with the temporaries that each remat_policy adds to a compiled step.

python scripts/benchmark_remat.py compile_topology=v5e-1 key=value ...
"""

import sys
import time

from trainer.config.load import load
from trainer.runtime.platforms import prepare_to_compile

POLICIES = ("save_dot_with_context_except_mlp", "minimal_with_context")


def main(words: list[str]) -> None:
    """Prints a row for each policy: its temporaries, how much larger they are than with `full`, and the estimate."""
    topology = load(words).config.compile_topology
    prepare_to_compile(topology)
    from trainer.aot.kernels import tiles_fit
    from trainer.aot.recomputed import recomputed
    from trainer.aot.report import memory_of
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.layers.remat import kept
    from trainer.models.families import family
    from trainer.training.build import build

    print("| policy | temporaries, GB | more than full | estimated | ratio |\n|---|---|---|---|---|")
    for policy in ("full", *POLICIES):
        config = load([*words, f"remat_policy={policy}"]).config
        run = build(config, devices_of(topology_of(config), config.compile_topology_num_slices))
        with tiles_fit():
            traced = run.step.trace(*run.abstract_args())
            temporaries = memory_of(traced.lower().compile()).temporaries / 1e9
        if policy == "full":
            full, began = temporaries, time.perf_counter()
            sizes, seconds = recomputed(traced.jaxpr, run.mesh.devices.flat[0].platform), time.perf_counter() - began
            print(f"| full | {full:.3f} | | | |", flush=True)
            continue
        estimate = sum(sizes.get(name, 0) for name in kept(policy, family(config.decoder_block).projections)) / 1e9
        more = temporaries - full
        print(f"| {policy} | {temporaries:.3f} | {more:.3f} | {estimate:.3f} | {more / estimate:.3f} |", flush=True)
    print(f"\n{topology}; the estimate took {seconds * 1000:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
