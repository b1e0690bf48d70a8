"""`python -m trainer.shardings [base.yml] [--json] key=value ...`: shows how the train state is sharded.

Nothing is allocated. `left.key=value` and `right.key=value` compare two configurations side by side.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.help import prints_usage
from trainer.config.keys import Config
from trainer.config.load import Begun, Loaded
from trainer.config.sides import Side, differences, load_sides
from trainer.config.topologies import Topology, find_topology
from trainer.runtime.platforms import leave_out_absent_tpu, prepare_compile_only_tpu, simulate_cpu_devices


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if prints_usage("shardings", words):
        return
    as_json = "--json" in words
    sides = load_sides([word for word in words if word != "--json"], os.environ, _models)
    for side in sides:
        for line in (*side.loaded.notes, *side.loaded.warnings):
            print(f"{side.name}: {line}" if side.name else line, file=sys.stderr)
    by_side = {side.name: describe(side.loaded.config, side.name) for side in sides}
    if as_json:
        print(json.dumps(by_side if len(sides) > 1 else by_side[sides[0].name], indent=1))
    elif len(sides) == 1:
        from trainer.state import table

        (only,) = by_side.values()
        print(table.text(only["tensors"], only["totals"], only["warnings"]))
    else:
        print(_side_by_side(sides, by_side))


def _models(sides: Sequence[Begun]) -> Callable[[Begun], Loaded]:
    _prepare([side.config for side in sides])
    if not any(side.path or side.config.use_distill for side in sides):
        return Begun.end
    from trainer.weights.model_of_command import with_model

    return with_model


def _prepare(configs: Sequence[Any]) -> None:
    """Sets the environment variables that JAX reads when it is imported."""
    topologies = [find_topology(config.compile_topology) for config in configs if config.compile_topology]
    if not topologies:
        leave_out_absent_tpu()
        return
    prepare_compile_only_tpu()
    simulated = [known.devices for known in topologies if isinstance(known, Topology) and known.platform == "cpu"]
    if simulated:
        simulate_cpu_devices(max(simulated))


def describe(config: Config, side: str = "") -> dict[str, Any]:
    """Returns the table of shardings as plain data: `mesh`, `tensors`, `totals` and `warnings`.

    The devices are those of `compile_topology` if this key is set, otherwise this machine's. `side`: the name of a side
    of a comparison; as in `trainer.parity`, a side uses only as many of this machine's devices as its mesh needs.

    Raises:
      UserError: the configuration does not fit the devices; the message begins with `side`.
    """
    import jax

    from trainer.aot.topologies import devices_of, topology_of
    from trainer.sharding import side_devices
    from trainer.training.build import build

    devices: Sequence[Any]
    if config.compile_topology:
        devices = devices_of(topology_of(config), config.compile_topology_num_slices)
    else:
        devices = side_devices(config, jax.devices()) if side else jax.devices()
    try:
        return build(config, devices).table()
    except UserError as error:
        raise type(error)(f"{side}: {error}" if side else str(error)) from None


def _side_by_side(sides: Sequence[Side], by_side: dict[str, Any]) -> str:
    """Returns a table that shows the sides' differing settings and tensors, and their totals."""
    from trainer.state import table

    head = ["", *(side.name for side in sides)]
    settings = [[key, *texts] for key, texts in differences(sides).items()]
    by_name = [{row["name"]: row for row in described["tensors"]} for described in by_side.values()]
    names = dict.fromkeys(name for rows in by_name for name in rows)
    tensors = [[name, *(_sharding(rows.get(name)) for rows in by_name)] for name in names]
    differing = [line for line in tensors if len(set(line[1:])) > 1]
    totals = [described["totals"] for described in by_side.values()]
    sums = [[key, *(f"{each[key]:,}" for each in totals)] for key in totals[0]]
    warnings = [f"warning: {name}: {line}" for name, described in by_side.items() for line in described["warnings"]]
    same = f"{len(tensors) - len(differing)} of {len(tensors)} tensors are sharded alike on all sides"
    lines = table.aligned([head, *settings, *differing, *sums])
    return "\n".join([*lines, *warnings, same])


def _sharding(row: dict[str, Any] | None) -> str:
    """Describes the sharding of a tensor: the shape of a device's shard, the full shape, and the mesh axes that shard
    each dimension. `row`: the tensor's row of the table, or None if a side has no such tensor."""
    if row is None:
        return "absent"
    axes = ", ".join("+".join(entry) or "-" for entry in row["spec"])
    return f"{row['per_device_shape']} of {row['shape']} by [{axes}]"


if __name__ == "__main__":
    main()
