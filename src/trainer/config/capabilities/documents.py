"""How many documents share a row of the training data: attention kernels that know take less memory and time."""

from trainer.config.capabilities.token_keys import token_files
from trainer.config.keys import Config


def most_documents(config: Config) -> int | None:
    """Returns the most documents in a row of the data of `config`. 0: each row is one document to its end, except
    perhaps for padding in the last row of the data. None: not known before the rows are."""
    if config.use_grpo or config.use_dpo:
        return None
    if token_files(config):
        return None if config.reset_attention_mask else 0
    return None if config.packing else 1
