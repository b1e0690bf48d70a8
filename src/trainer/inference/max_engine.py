"""`MaxEngine`: an engine that is built from a configuration. Its methods have MaxText's names."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from trainer.config.capabilities.invariant_keys import OF_BITS, unchecked
from trainer.config.dump import to_flow
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokenizer_files import load_tokenizer
from trainer.inference.adapters import loaded
from trainer.inference.ends import stop_tokens
from trainer.inference.engine import Engine
from trainer.inference.served import serve
from trainer.leaves.source import joined, names_of, nested, parted
from trainer.ops.random import seed_key
from trainer.weights.adapters import Adapters, WithAdapters
from trainer.weights.load import load_parameters, of_checkpoint
from trainer.weights.model_of_command import keys_of_run
from trainer.weights.open import open_adapters, open_source

_MODULES = "mtp_num_layers"


class MaxEngine(Engine):
    """An `Engine` built from a configuration. By default it has per_device_batch_size slots per device."""

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device] | None = None,
        *,
        sequences: int | None = None,
        adapters: Sequence[str | Adapters] = (),
        controls: bool = False,
    ):
        """
        Args:
          config: from `config.load`, resolved or not.
          devices: default: all of JAX's devices.
          sequences: the number of sequences to generate at once. If it is below the default number of slots, the engine
            has only as many slots as these sequences need.
          adapters: adapters for the parameters of load_parameters_path, or paths of adapters (`weights.open_adapters`).
            If there are several, each sequence selects one or none (`Engine.prefill`).
          controls: whether each sequence has separate options (`inference.controls.Asked`). If so, each sequence
            selects its adapter even if there is only one adapter.

        Raises:
          UserError: the configuration does not fit the devices, or the model cannot generate text.
        """
        self._adapters = [open_adapters(given) if isinstance(given, str) else given for given in adapters]
        devices = jax.devices() if devices is None else devices
        super().__init__(serve(config, devices, sequences, self._adapters, controls))

    @classmethod
    def of(cls, path: str, words: Sequence[str] = (), **how: Any) -> "MaxEngine":
        """Returns an engine for the checkpoint at `path`, which is a run, a Hugging Face directory, or the output of
        trainer.export. The configuration keys of the model come from the checkpoint.

        Args:
          words: further configuration keys, as KEY=VALUE arguments of a command line.
          how: further arguments of the constructor.

        Raises:
          UserError: the checkpoint does not contain the configuration keys of the model, or `words` contradict them.
        """
        return cls(of_checkpoint(path, words)[0].config, **how)

    def load_params(
        self,
        params: Any = None,
        *,
        say: Callable[[str], Any] = print,
        given: Collection[str] = (),
        average: bool = False,
        donate: bool = False,
    ) -> Any:
        """Returns the model's weights, sharded over the devices: the argument `params` of the other methods.

        Args:
          params: all weights (parameters and router biases) as one canonical nested dict (`leaves.source.joined`).
            None: the weights are loaded from load_parameters_path or, if that key is empty, initialized with
            init_weights_seed.
          say: see `weights.load_parameters`.
          given: the keys that the user set; see `weights.load_parameters`.
          average: whether to load the parameter average of a run with ema_decay.
          donate: whether to delete each array of `params` once it is converted.

        Raises:
          UserError: see `weights.load_parameters`.
        """
        config, variables = self.config, self.served.abstract_variables
        abstract = joined(*variables)
        path = config.load_parameters_path
        if note := unchecked(config, self.served.platform):
            say(note)
        if params is None and not path:
            say("load_parameters_path is empty: the parameters are initialized at random")
            shardings = jax.tree.map(lambda leaf: leaf.sharding, variables)
            initial = jax.jit(self.served.model.init, out_shardings=shardings)(seed_key(config.init_weights_seed))
            return self.hold(*initial, donate=True)
        if params is None:
            donate = True
            self._check_bits(path)
            # Generation does not use multi-token prediction modules.
            params = load_parameters(path, config, abstract, say, {*given, _MODULES}, average=average)
            if self.served.ranks is not None:
                params = nested(loaded(config, self._adapters, names_of(params)))
        return self.hold(*parted(params, variables[1]), donate=donate)

    def _check_bits(self, path: str) -> None:
        """With batch_invariant, raises UserError if results would not have the same bits as in training.

        There are two such cases: the checkpoint has adapters, which loading would merge into the base; or dtype or
        scan_layers differs from the training run.
        """
        if not self.config.batch_invariant:
            return
        if isinstance(open_source(path, self.config.decoder_block, verify=False), WithAdapters):
            raise UserError(
                f"batch_invariant=true: {path} has adapters, which training did not merge into the base; generate "
                f"from the base with adapters={path}"
            )
        saved = keys_of_run(path)
        words = [
            f"{key}={to_flow(saved[key])}"
            for key in OF_BITS
            if saved.get("batch_invariant") and saved[key] != self.config[key]
        ]
        if words:
            raise UserError(
                f"batch_invariant=true: {path} was trained with {' '.join(words)}; set the same for generation"
            )

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that tokenizer_path and tokenizer_type specify; by default, the checkpoint's tokenizer.

        Raises:
          UserError: there is no tokenizer, or the tokenizer has token ids that are not below vocab_size.
        """
        config = self.config
        path, settings = config.tokenizer_path, {"add_bos": config.add_bos, "add_eos": config.add_eos}
        if not path and config.tokenizer_type != "bytes" and config.load_parameters_path:
            path = str(open_source(config.load_parameters_path, config.decoder_block).tokenizer)
        if not path and config.tokenizer_type != "bytes":
            raise UserError("tokenizer_path is empty, and there is no checkpoint with a tokenizer")
        tokenizer = load_tokenizer(path, config.tokenizer_type, **settings)
        if tokenizer.largest >= config.vocab_size:
            raise UserError(
                f"vocab_size={config.vocab_size}, but the tokenizer {path or 'of bytes'} has "
                f"{tokenizer.vocab_size} tokens"
            )
        return tokenizer

    def stop_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens that end a sequence, including the end tokens that the adapters were trained with."""
        taught = (token for adapters in self._adapters for token in adapters.about.ends)
        return list(dict.fromkeys([*stop_tokens(self.config, tokenizer), *taught]))
