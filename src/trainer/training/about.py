"""A run's model metadata, such as the tokens that end a text. A run inherits the metadata from its initial model, and
training updates them.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.manager import RUN, newest
from trainer.checkpoint.sidecar import TOKENIZER
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.tokenizer_files import has_tokenizer
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.about import FIELDS, About
from trainer.runtime.storage import folder, is_remote
from trainer.weights.about_files import about_in, about_tokenizer
from trainer.weights.open import open_adapters, open_source


def about_run(
    config: Config, tokenizer: Tokenizer | None, own: Any, ends: Sequence[int], say: Callable[[str], Any]
) -> About:
    """Returns the model metadata that the run's checkpoints will contain from now on.

    Args:
      tokenizer: the tokenizer of the data.
      own: the newest checkpoint of this run; None for a new run.
      ends: the tokens that end training texts.

    Raises:
      UserError: the inherited metadata are damaged.
    """
    about = _begun_with(config, tokenizer, own, say)
    length = config.max_target_length if config.rope_type == "default" else None
    return about.trained(ends, length, tokenizer is not None and tokenizer.has_other_template)


def _begun_with(config: Config, tokenizer: Tokenizer | None, own: Any, say: Callable[[str], Any]) -> About:
    if own is not None and (own / RUN / TOKENIZER / FIELDS).is_file():
        return about_in(own / RUN / TOKENIZER)
    place = config.load_parameters_path
    if config.load_full_state_path and (other := newest(folder(config.load_full_state_path))) is not None:
        files = other / RUN / TOKENIZER
        about = about_in(files)
    elif place and ("://" in place or local_path(place).exists()):
        source = open_source(place, config.decoder_block, verify=False)
        about, files = source.about, source.tokenizer
        if config.enable_lora and config.lora_restore_path:
            about = about.under(open_adapters(config.lora_restore_path, average=None, verify=False).about)
    else:
        if place:
            say(f"load_parameters_path={place} is gone: only the tokenizer's end-of-text tokens are known")
        return About() if tokenizer is None else about_tokenizer(tokenizer.bos, tokenizer.eos)
    if tokenizer is None or not about.tokens or _same_tokens(about, files, config, tokenizer):
        return about
    say(f"the tokenizer differs from that in {files}: the special tokens there are ignored ({about.ends} end a text)")
    return about.without_tokens()


def _same_tokens(about: About, files: Path, config: Config, tokenizer: Tokenizer) -> bool:
    """Returns whether `tokenizer` and the tokenizer in the folder `files` agree on the tokens that `about` lists."""
    if config.tokenizer_path == str(files) or is_remote(files) or not has_tokenizer(files, "auto"):
        return True
    theirs = load_tokenizer(str(files), "auto", add_bos=False, add_eos=False)
    found = [_texts(one, about.tokens) for one in (tokenizer, theirs)]
    return found[0] == found[1]


def _texts(tokenizer: Tokenizer, tokens: Collection[int]) -> list[Any]:
    """Returns a pair for each of `tokens` that is in the vocabulary: the token, and its name (of a special token) or
    its bytes."""
    names = {token: name for name, token in tokenizer.markers.items()}
    known = [token for token in sorted(tokens) if 0 <= token < tokenizer.vocab_size]
    return [(token, names.get(token) or tokenizer.token_bytes(token)) for token in known]
