"""The state from which a process starts: the run's newest checkpoint, another run's state, given parameters, or new
initial parameters.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from trainer.checkpoint.base import base_of, check_base, place_of, with_base, without_base
from trainer.checkpoint.manager import CheckpointManager, SavedCheckpoints, inspect, newest, restore
from trainer.checkpoint.sidecar import Base, Sidecar, saved_config
from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resume import (
    another_program,
    another_update,
    check_islands,
    check_optimizer,
    check_resume,
    islands_of,
    resets,
)
from trainer.config.words import counted
from trainer.data.dataset import Dataset
from trainer.leaves.about import About
from trainer.leaves.source import joined, nested, parted
from trainer.models.names import names_of_blocks, renamed
from trainer.ops.paths import Path, by_path
from trainer.runtime.agreement import agreed, from_first
from trainer.runtime.place import share_of_rows
from trainer.runtime.storage import folder
from trainer.runtime.versions import other_versions
from trainer.state.diloco import like_islands, without_islands
from trainer.state.stages import abstract_layers, in_layers, in_stages
from trainer.training.finite import names_not_finite
from trainer.training.run import Run
from trainer.training.step import all_finite
from trainer.weights.load import initial_parameters, load_parameters
from trainer.weights.teacher_files import load_teacher

Say = Callable[[str], None]
_LOADED = "load_parameters_path"


class Start(NamedTuple):
    """The initial native train state of a process, and its position in the run."""

    state: Any
    updates: int = 0  # number of updates in the state
    position: Any = None  # position in the data; None: the beginning
    resumed: bool = False  # whether an earlier process began this run
    frozen: Any = ()  # the arrays that the objective reads in addition to the state; see `FrozenArrays`
    base: Base | None = None  # the base model of a run with adapters
    reference: Base | None = None  # the reference model or the teacher, if the run has one
    about: About = About()  # the model's metadata for the run's checkpoints; see `training.about.about_run`


def start(
    run: Run,
    dataset: Dataset,
    manager: CheckpointManager | SavedCheckpoints | None,
    say: Say,
    *,
    schedule_given: bool,
    given: Collection[str] = (),
) -> Start:
    """Returns the initial state of this process, with the other arrays that the objective reads. `say` receives lines
    about the source of the state.

    Args:
      manager: the run's checkpoints, which take precedence over every other source; None if the run saves none.
      schedule_given: see `config.check_resume`.
      given: the keys that the user set; see `weights.load_parameters`.

    Raises:
      UserError: the requested state does not exist, is damaged, or does not fit the configuration.
    """
    config = run.config
    if run.frozen.of_parameters and config.load_full_state_path:
        raise UserError(
            "load_full_state_path cannot provide the reference model, which is the model with which a run begins; give "
            "load_parameters_path instead"
        )
    if manager is not None and manager.latest is not None:
        path = manager.path(manager.latest)
        frozen = _reference(run, path, say, given) if run.frozen.of_parameters else other_arrays(run, None, say)
        begin = _continued(run, dataset, path, say, schedule_given, given)._replace(frozen=frozen)
        if begin.reference is not None:
            which = "teacher" if run.frozen.place else "reference"
            check_base(_named(run, frozen), begin.reference, path, f"its {which} was a model", "the model of that time")
        return begin
    if config.load_full_state_path:
        begin = _other_run(run, dataset, say)
        _check_finite(run, begin.state, f"load_full_state_path={config.load_full_state_path}")
    else:
        begin = _new(run, say, given)
    place = _LOADED if run.frozen.of_parameters else run.frozen.place
    if not place:
        return begin._replace(frozen=run.frozen.make())
    frozen = other_arrays(run, _parameters(run, begin.state), say)
    return begin._replace(frozen=frozen, reference=base_of(config[place], _named(run, frozen)))


def other_arrays(run: Run, params: Any, say: Say) -> Any:
    """Returns the arrays that the objective reads in addition to the train state. `params`: see `FrozenArrays.make`.

    Raises:
      UserError: there is no teacher, or it contains a NaN or an infinity.
    """
    if not run.frozen.place:
        return run.frozen.make(params)
    objective: Any = run.objective
    path = run.config[run.frozen.place]
    if not path:
        raise UserError(f"{run.frozen.place} is empty; give the teacher's folder")
    found = load_teacher(path, objective.teacher.config, run.frozen.abstract, say)
    if not jax.jit(lambda arrays: all_finite(run.frozen.fetch(arrays)))(found):
        raise UserError(f"{run.frozen.place}={path}: the teacher contains a NaN or an infinity")
    return found


def _named(run: Run, frozen: Any) -> dict[Path, Any]:
    """Returns the frozen arrays by path. If they are copies of parameters, they are converted to the layer-wise form of
    checkpoints."""
    return _by_layer(run, by_path(frozen)) if run.frozen.of_parameters else by_path(frozen)


def _reference(run: Run, path: Any, say: Say, given: Collection[str]) -> Any:
    """Returns the initial parameters of the run that wrote the checkpoint `path`. They are loaded from
    load_parameters_path or, if it is empty, from the path that the checkpoint records."""
    before = inspect(path).reference
    place = run.config.load_parameters_path or (before.path if before else "")
    own = run._replace(config=Config({**run.config, "load_parameters_path": place}))
    return run.frozen.make(_parameters(own, _new(own, lambda line: say(f"reference model: {line}"), given).state))


def _parameters(run: Run, state: Any) -> Any:
    return run.states.first(run.codec.unpack(state)).params


def _continued(run: Run, dataset: Dataset, path: Any, say: Say, schedule_given: bool, given: Collection[str]) -> Start:
    config = run.config
    sidecar = inspect(path)
    saved = saved_config(sidecar, path)
    for warning in check_resume(saved, config, schedule_given, str(path)):
        say(f"warning: {warning}")
    for line in filter(None, (another_program(saved, config), other_versions(sidecar.versions))):
        say(line)
    agreed(lambda: _check_data(run, dataset, sidecar, path))
    fresh = resets(saved, config)
    loaded = _base(run, sidecar, path, say, given)
    state = (_with_fresh_optimizer if fresh else _restored)(run, path, sidecar, loaded, say)
    updates = int(run.codec.unpack(state).step)
    if updates > config.steps:
        raise UserError(
            f"steps={config.steps}: {path} holds {counted(updates, 'update')} already; give steps={updates} or "
            "more, or another run_name for a new run"
        )
    done = f"{updates:,} of {counted(config.steps, 'update')} {'is' if updates == 1 else 'are'} done"
    say(f"{path}: {done}{', a fresh optimizer' if fresh else ''}")
    if config.reset_optimizer and not fresh:
        say("reset_optimizer=true was already applied in this run: the optimizer state of the checkpoint is resumed")
    for key in ("load_parameters_path", "load_full_state_path", "lora_restore_path"):
        if config[key] and not (key == "load_parameters_path" and (config.enable_lora or run.frozen.of_parameters)):
            say(f"{key} is ignored: the run has its own checkpoint")
    base = _placed(sidecar.base, config)
    reference = _placed(sidecar.reference, config, run.frozen.place or _LOADED)
    return Start(state, updates, sidecar.position, True, base=base, reference=reference)


def _new(run: Run, say: Say, given: Collection[str]) -> Start:
    config = run.config
    if config.reset_optimizer:
        say("reset_optimizer has no effect: no state is loaded, so the optimizer is fresh")
    if config.load_parameters_path:
        place = config.load_parameters_path
        state = run.init(*_weights(run, lambda own, wanted: load_parameters(place, own, wanted, say, given)))
        _check_finite(run, state, f"load_parameters_path={config.load_parameters_path}")
    elif config.enable_lora and config.lora_restore_path:
        state = run.init(*_weights(run, initial_parameters))
        _check_finite(run, state, f"lora_restore_path={config.lora_restore_path}")
    else:
        state = run.init()
    frozen = _frozen(run, _parameters(run, state))
    return Start(state, base=base_of(config.load_parameters_path, _by_layer(run, frozen)) if frozen else None)


def _weights(run: Run, load: Callable[[Config, Any], Any]) -> tuple[Any, Any]:
    """Splits the tree of weights that `load(config, wanted)` returns into (params, rest).

    `config` has no pipeline; `wanted` is the tree to load, as shapes with shardings.
    """
    rest = run.states.one.rest
    wanted = joined(_abstract(run).params, rest)
    loaded = load(unpipelined(run.config), abstract_layers(run.config, wanted))
    return parted(in_stages(run.config, loaded, wanted), rest)


def _by_layer(run: Run, params: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns parameters by path, in the layer-wise form of checkpoints."""
    return by_path(in_layers(run.config, nested({"/".join(path): leaf for path, leaf in params.items()})))


def _frozen(run: Run, params: Any) -> dict[Path, Any]:
    """Returns the parameters that no checkpoint contains: the base model of adapters."""
    names = run.base_names
    return {path: leaf for path, leaf in by_path(params).items() if path in names}


def _placed(base: Base | None, config: Config, key: str = _LOADED) -> Base | None:
    """Returns `base` with its path replaced by the value of the key `key`, from which the base was loaded; unchanged if
    the key is empty."""
    return base and (base._replace(path=place_of(config[key])) if config[key] else base)


def _base(run: Run, sidecar: Sidecar, path: Any, say: Say, given: Collection[str]) -> dict[Path, Any]:
    """Returns the base model of the adapters in checkpoint `path`; {} without adapters.

    The base is loaded from load_parameters_path or, if it is empty, from the path that the checkpoint records. If the
    checkpoint records no path, the base is the initial model.
    """
    config = run.config
    if not run.base_names:
        return {}
    if sidecar.base is None:
        raise UserError(
            f"{path} was saved without enable_lora, so it has no adapters; to use it as base, give load_parameters_path"
        )
    if place := config.load_parameters_path or sidecar.base.path:

        def load(own: Config, wanted: Any) -> Any:
            own = Config({**own, "lora_restore_path": ""})  # the adapters come from checkpoint `path`
            return load_parameters(place, own, wanted, say, given)

        found = _frozen(run, _weights(run, load)[0])
    else:
        found = _frozen(run, _parameters(run, run.init()))
    check_base(_by_layer(run, found), sidecar.base, path)
    return found


def _check_finite(run: Run, state: Any, loaded: str) -> None:
    if names := names_not_finite(run, state):
        more = f" and in {len(names) - 1} other arrays" if len(names) > 1 else ""
        raise UserError(f"{loaded}: there is a NaN or an infinity in {names[0]}{more}; load a checkpoint without one")


def _other_run(run: Run, dataset: Dataset, say: Say) -> Start:
    given = folder(run.config.load_full_state_path)
    path = from_first(lambda: str(newest(given) or ""))
    if not path:
        raise UserError(
            f"load_full_state_path={given}: no checkpoint there; give a run's folder or one of its checkpoints/N"
        )
    path = folder(path)
    sidecar = inspect(path)
    saved = saved_config(sidecar, path)
    from_islands = bool(islands_of(saved)) and not run.config.enable_diloco
    fresh = run.config.reset_optimizer or from_islands
    base = _base(run, sidecar, path, say, ())
    if fresh:
        state = _with_fresh_optimizer(run, path, sidecar, base, say)
    else:
        check_optimizer(saved, run.config, str(path))
        check_islands(saved, run.config, str(path))
        state = _restored(run, path, sidecar, base, say)
    changed = "" if fresh else another_update(saved, run.config)
    for line in filter(None, (changed, other_versions(sidecar.versions))):
        say(line)
    updates = int(run.codec.unpack(state).step)
    if updates >= run.config.steps:
        raise UserError(
            f"steps={run.config.steps}: load_full_state_path={path} holds {counted(updates, 'update')} already, and "
            "steps includes them; give a larger value of steps"
        )
    same_data = sidecar.fingerprint == dataset.fingerprint
    data = "its position in the data" if same_data else "the beginning of other data"
    optimizer = "a fresh optimizer" if fresh else "its optimizer"
    what = ""
    if bool(islands_of(saved)) != run.config.enable_diloco:
        what = "the outer parameters, " if from_islands else "on every island, "
    say(f"starting from {path}: {what}{counted(updates, 'update')}, {optimizer}, {data}")
    return Start(state, updates, sidecar.position if same_data else None, base=_placed(sidecar.base, run.config))


def _restored(run: Run, path: Any, sidecar: Sidecar, base: Mapping[Path, Any], say: Say) -> Any:
    if islands_of(saved_config(sidecar, path)):
        return run.codec.pack(_tree_of(run, path, sidecar, base, _abstract(run), say))
    return run.states.from_one(_tree_of(run, path, sidecar, base, run.states.one, say))


def _tree_of(run: Run, path: Any, sidecar: Sidecar, base: Mapping[Path, Any], wanted: Any, say: Say) -> Any:
    """Returns the train state in a checkpoint.

    The run's decoder_block may be a custom block that replaces the block in the checkpoint. If the two blocks name
    their parameters differently, the attribute `PARAMETER_NAMES` of the custom block maps its names to the saved names.
    """
    if saved_config(sidecar, path).get("decoder_block") == run.config.decoder_block:
        return with_base(_read(run, path, without_base(wanted, base), say), wanted, base)
    names = names_of_blocks(run.config)
    saved = without_base(renamed(wanted, names), base)
    return renamed(with_base(_read(run, path, saved, say), renamed(wanted, names), base), names.inverse())


def _read(run: Run, path: Any, wanted: Any, say: Say) -> Any:
    return in_stages(run.config, restore(path, abstract_layers(run.config, wanted), say), wanted)


def _with_fresh_optimizer(run: Run, path: Any, sidecar: Sidecar, base: Mapping[Path, Any], say: Say) -> Any:
    """Returns a state with the parameters, step and `rest` of the checkpoint, and a new optimizer state.

    The learning-rate schedule continues from that step. All other state of the optimizer and the update rules is reset.
    From a DiLoCo checkpoint, the outer parameters are used, and `rest` is averaged over the islands.
    """
    at = _abstract(run).params  # with DiLoCo, the outer parameters, whose dtypes may differ from the islands'
    params = jax.tree.map(lambda leaf, like: leaf.update(sharding=like.sharding), run.states.one.params, at)
    wanted = run.states.one._replace(params=params, opt_state=None)
    if count := islands_of(saved_config(sidecar, path)):
        tree = _tree_of(run, path, sidecar, base, like_islands(count, wanted), say)
        return run.init(*without_islands(tree), tree.step)
    tree = _tree_of(run, path, sidecar, base, wanted, say)
    return run.init(tree.params, tree.rest, tree.step)


def _abstract(run: Run) -> Any:
    return run.codec.unpack(run.abstract_args()[0])


def _check_data(run: Run, dataset: Dataset, sidecar: Sidecar, path: Any) -> None:
    share = share_of_rows(run.batch_shardings["row"], run.rows)
    # Open the stream once, so that a mismatch is reported before anything is compiled.
    try:
        dataset.train_stream(sidecar.position, rows=run.rows, **share).close()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if sidecar.fingerprint != dataset.fingerprint:
        raise UserError(
            f"{path} was trained on different data or with a different tokenizer: the fingerprint of data and "
            f"tokenizer is {sidecar.fingerprint[:12]} in the checkpoint and {dataset.fingerprint[:12]} in this run; "
            "use the settings and files of the checkpoint's run, or start a new run"
        )
