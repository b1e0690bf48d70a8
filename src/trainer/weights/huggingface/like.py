"""Writes the weights of a text model into a copy of a multimodal model's Hugging Face directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.json_files import read_object
from trainer.config.keys import Config
from trainer.config.tokenizer_files import tokenizer_parts
from trainer.config.words import counted
from trainer.leaves.about import LONGEST, TOKENS, About
from trainer.leaves.source import Leaf, Shapes
from trainer.models.mtp_names import MODULES
from trainer.runtime.folders import check_folder, read_bounded
from trainer.weights.huggingface.read import CONFIG, HuggingFaceSource
from trainer.weights.huggingface.safetensors_file import Tensors
from trainer.weights.huggingface.weight_files import BUFFER
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source
from trainer.weights.params.write import target_dtypes

_TABLE = "token_embedder/embedding"


class Like:
    """The directory of a multimodal model, to be copied with other weights for its text model.

    Attributes:
      others: the tensors to copy unchanged, by name.
      shapes: the shapes and dtypes of the tensors in `others`, by name.
    """

    def __init__(self, path: str, config: Config, shapes: Shapes):
        """
        Args:
          path: the directory.
          config: the resolved configuration of the text model to write.
          shapes: the shapes of the text model's weights.

        Raises:
          UserError: the directory's model is not multimodal, or its text model differs from `config`.
        """
        source = open_source(path, config.decoder_block)
        if not isinstance(source, HuggingFaceSource) or source.text is None:
            raise UserError(f"like={path}: not a multimodal model in Hugging Face format; leave it out")
        if source.keys.get("checkpoint_is_quantized") or source.quantized:
            raise UserError(f"like={path}: its matrices are quantized; give a directory with float weights")
        if config.checkpoint_is_quantized:
            raise UserError(f"like={path}: the weights are quantized; give dtype=float32 or dtype=bfloat16")
        here = described(model_config(source.keys, [], str(source.path)))
        ours = described(config)
        if config.mtp_num_layers < source.modules:
            del here[MODULES], ours[MODULES]  # modules that the weights lack are copied from the directory
        if differing := [name for name in {**here, **ours} if here.get(name) != ours.get(name)]:
            theirs, given = (as_words(keys, [name for name in differing if name in keys]) for keys in (here, ours))
            raise UserError(
                f"like={path}: another text model: it has {', '.join(theirs) or 'none of the following'}; the weights "
                f"have {', '.join(given) or 'none of these'}"
            )
        self._table = source.leaves(config, shapes)[_TABLE].dtype  # `leaves` also checks the tensors' names and shapes
        self.path, self._text, self._about = source.path, source.text, source.about
        more = {
            name: tensor
            for name, tensor in self._text.tensors.items()
            if name.endswith(BUFFER) or source.in_other_module(config, self._text.alone(name))
        }
        self.others = {**more, **self._text.others}
        self.shapes: Tensors = {}
        for name, tensor in self.others.items():
            if (dtype := tensor.shown_dtype) is None:
                raise UserError(f"like={path}: {name} has the dtype {tensor.kind}, which cannot be written")
            self.shapes[name] = (tensor.shape, dtype)

    def here(self, name: str) -> str:
        """Returns a tensor's name in the directory, given the name that it has if the text model is saved alone."""
        return self._text.here(name)

    def notes(self, leaves: Mapping[str, Leaf], dtype: str | None) -> Sequence[str]:
        """Returns a line about the copied tensors. Adds a line if the weights `leaves`, cast to `dtype`, have a
        different dtype than the directory's text model."""
        written = target_dtypes({_TABLE: leaves[_TABLE]}, dtype)[_TABLE].name
        lines = [f"like={self.path}: copied unchanged: {counted(len(self.others), 'other tensor')}"]
        if written != self._table.name:
            lines.append(f"like={self.path}: the text model is written in {written}, not in {self._table.name}")
        return lines

    def config(self, about: About) -> dict[str, Any]:
        """Returns the directory's config.json, in which the special tokens and the maximum text length are replaced by
        those in `about`."""
        data, said = read_object(self.path / CONFIG), self._about.fields
        new = {name: about.fields[name] for name in (*TOKENS, LONGEST) if name in about.fields}
        for name in [name for name in new if new[name] != said.get(name)]:
            whole = data if name in TOKENS else data["text_config"]
            whole[name] = new[name]
        return data

    def copy_files(self, target: Path) -> None:
        """Copies into `target` the configuration of the image preprocessing and, if `target` has no tokenizer, the
        tokenizer."""
        names = [path.name for path in sorted(self.path.glob("*processor_config.json"))]
        names += [] if tokenizer_parts(target) else tokenizer_parts(self.path)
        check_folder(self.path, names)
        for name in names:
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(read_bounded(self.path / name))
