"""Numbers in the JSON of answers that JSON cannot represent."""

import json
import math
from types import SimpleNamespace

from trainer.serving.answers import Answer
from trainer.serving.texts import Token


def test_a_logarithm_of_zero_is_a_number_of_json():
    """A bias of minus infinity leads to such a log-probability; a prompt's first token has none."""
    made = object.__new__(Answer)
    made._names = SimpleNamespace(text=str, bytes_of=lambda i: b"")
    tokens = [Token(3, None, (), 0), Token(4, -math.inf, ((5, -0.5), (6, -math.inf)), 1)]
    found = made._of_completion(tokens, 2)
    assert found["token_logprobs"] == [None, -9999.0]
    assert found["top_logprobs"] == [None, {"5": -0.5, "6": -9999.0, "4": -9999.0}]
    json.dumps([found, made._of_chat(tokens, 2)], allow_nan=False)
