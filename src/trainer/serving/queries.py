"""Checks and reads the JSON of a request."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.config.errors import UserError, nearest, shortened
from trainer.config.json_files import Field, field_problems, parsed, shown
from trainer.inference.controls import LIKELIEST, Asked
from trainer.inference.sampling import Sampling
from trainer.serving.errors import ApiError

_MOST_STOPS, _LONGEST_STOP = 16, 256
_INT64 = 2**63
_LEAST_P = 1e-9  # replaces top_p=0; either value leaves only the most likely token


class Parameter(NamedTuple):
    """A parameter of a request.

    Attributes:
      field: the valid values that have an effect; None if no value has an effect.
      neutral: the valid values that have no effect: a parameter with one of these values is treated as absent. Many
        clients send such values by default. If `neutral` is a Field, all values that the Field accepts have no effect.

    A parameter with neither `field` nor `neutral` is checked by a separate function.
    """

    field: Field | None = None
    neutral: tuple[Any, ...] | Field = ()

    def leaves_as_is(self, value: Any) -> bool:
        """Returns whether `value` has no effect."""
        if isinstance(self.neutral, Field):
            return self.neutral.accepts(value)
        value = _given(value) if isinstance(value, dict) else value
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)

    def problem(self, name: str, value: Any) -> str:
        """Returns the error message for an invalid `value`, which is not one of `neutral`; "" if `value` is valid."""
        if self.field is not None:
            return "".join(field_problems({name: value}, {name: self.field}))
        if isinstance(self.neutral, Field):
            return f"{name}={shown(value)}, not {self.neutral.allowed}"
        allowed = " or ".join(map(shown, self.neutral))
        return f"{name}={shown(value)} is not supported; allowed: {allowed}, which changes nothing" if allowed else ""


_NO, _YES, _ANY_TEXT = Parameter(neutral=(False,)), Parameter(neutral=(True,)), Parameter(neutral=Field(str))
STREAM_OPTIONS = {"include_usage": Parameter(Field(bool)), "include_obfuscation": _NO, "continuous_usage_stats": _NO}
COMMON = {
    "model": Parameter(Field(str)),
    "stream": Parameter(Field(bool)),
    "stream_options": Parameter(Field(dict)),
    "n": Parameter(Field(int, 1, 128)),
    "max_tokens": Parameter(Field(int, 0)),
    "temperature": Parameter(Field(float, 0, 2)),
    "top_p": Parameter(Field(float, 0, 1)),
    "top_k": Parameter(Field(int, -1)),
    "seed": Parameter(Field(int, -_INT64, _INT64 - 1)),
    "stop": Parameter(Field(str, many=True), ("", [])),
    "presence_penalty": Parameter(Field(float, -2, 2)),
    "frequency_penalty": Parameter(Field(float, -2, 2)),
    "repetition_penalty": Parameter(Field(float, 1e-9, 1e9)),
    "logit_bias": Parameter(Field(dict)),
    "return_token_ids": Parameter(Field(bool)),
    "user": _ANY_TEXT,
    # From vLLM's API:
    "min_p": Parameter(neutral=(0,)),
    "min_tokens": Parameter(neutral=(0,)),
    "stop_token_ids": Parameter(neutral=([],)),
    "ignore_eos": _NO,
    "skip_special_tokens": _YES,
    "spaces_between_special_tokens": _YES,
    "include_stop_str_in_output": _NO,
    "use_beam_search": _NO,
    "length_penalty": Parameter(neutral=(1,)),
}
COMPLETIONS = COMMON | {
    "prompt": Parameter(),
    "echo": Parameter(Field(bool)),
    "logprobs": Parameter(Field(int, 0, LIKELIEST)),
    "best_of": Parameter(neutral=(1,)),
    "suffix": Parameter(neutral=("",)),
}
CHAT = COMMON | {
    "messages": Parameter(Field(list)),
    "max_completion_tokens": Parameter(Field(int, 0)),
    "logprobs": Parameter(Field(bool)),
    "top_logprobs": Parameter(Field(int, 0, LIKELIEST), (0,)),
    "response_format": Parameter(neutral=({"type": "text"},)),
    "modalities": Parameter(neutral=(["text"],)),
    "tools": Parameter(neutral=([],)),
    "tool_choice": Parameter(neutral=("none", "auto")),
    "parallel_tool_calls": Parameter(neutral=Field(bool)),
    "functions": Parameter(neutral=([],)),
    "function_call": Parameter(neutral=("none", "auto")),
    "metadata": Parameter(neutral=Field(dict)),
    "store": _NO,
    "service_tier": _ANY_TEXT,
    "prompt_cache_key": _ANY_TEXT,
    "safety_identifier": _ANY_TEXT,
    # From vLLM's API:
    "echo": _NO,
    "add_generation_prompt": _YES,
    "continue_final_message": _NO,
    "chat_template_kwargs": Parameter(neutral=({},)),
}
_MOST_SAID = 20  # the maximum number of errors in a message
_DEFAULT_TOKENS = 16  # the default max_tokens of /v1/completions, as in OpenAI's API
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Query:
    """A request.

    Attributes:
      prompts: the prompts, each a text or a list of tokens. A chat has one prompt: the list of its messages.
      max_tokens: the requested maximum number of generated tokens. The request is refused if that many do not fit
        after the prompt. None: the request sets no maximum, and `most` applies.
      most: the default maximum for requests without max_tokens, lowered if fewer tokens fit; None: as many tokens as
        fit.
      likeliest: the number of most likely tokens that are returned, with their log-probabilities, for each position;
        None: no log-probabilities are returned.
    """

    chat: bool
    model: str | None
    prompts: list[Any]
    n: int
    max_tokens: int | None
    most: int | None
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    asked: Asked
    likeliest: int | None
    echo: bool
    stream: bool
    usage: bool
    token_ids: bool


def read_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a request body. Raises ApiError if the body is not a JSON object."""
    try:
        given = parsed(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is invalid") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {shortened(str(error))}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object")
    if _SURROGATE.search(body) and _has_surrogate(given):
        raise ApiError(400, "the body has half of a surrogate pair, which is not a character")
    return given


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the non-null entries of a JSON object. An entry with the value null counts as absent."""
    return {name: value for name, value in values.items() if value is not None}


def query(given: Mapping[str, Any], *, chat: bool, default: Sampling) -> Query:
    """Converts the JSON object of a request to a `Query`. `default`: the values of sampling parameters that the request
    does not set.

    Raises:
      ApiError: parameters are invalid or not supported; the message names them.
    """
    given, wrong = _acted_on(given, CHAT if chat else COMPLETIONS)
    if not wrong:
        for check in (_stops, _streaming, _limits, _biases, _chat if chat else _prompts):
            wrong |= check(given)
    if wrong:
        raise ApiError(400, "; ".join(list(wrong.values())[:_MOST_SAID]), param=shortened(next(iter(wrong))))
    return _query(given, chat, default)


def _acted_on(given: Mapping[str, Any], table: Mapping[str, Parameter]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a pair: the parameters whose values have an effect, and a dict from parameter names to error messages."""
    given = _given(given)
    kept = {name: value for name, value in given.items() if name not in table or not table[name].leaves_as_is(value)}
    unknown = itertools.islice((name for name in kept if name not in table), _MOST_SAID)
    wrong = {
        name: f"{shortened(name)} is not a parameter that this server supports{nearest(name, table)}"
        for name in unknown
    }
    problems = {name: table[name].problem(name, kept[name]) for name in kept if name in table}
    return kept, wrong | {name: problem for name, problem in problems.items() if problem}


def _query(given: Mapping[str, Any], chat: bool, default: Sampling) -> Query:
    numbers: dict[str, float] = {
        "presence": given.get("presence_penalty", 0.0),
        "frequency": given.get("frequency_penalty", 0.0),
        "repetition": given.get("repetition_penalty", 1.0),
    }
    logprobs = given.get("logprobs")
    likeliest = (given.get("top_logprobs", 0) if logprobs else None) if chat else logprobs
    echo, scored = given.get("echo", False), likeliest is not None
    bias = {int(token): float(value) for token, value in given.get("logit_bias", {}).items()}
    asked = Asked(**numbers, bias=bias, log_probs=scored, prompt_log_probs=scored and echo)
    sampling = Sampling(
        temperature=given.get("temperature", default.temperature),
        top_k=max(given.get("top_k", default.top_k), 0),
        nucleus_p=max(given.get("top_p", default.nucleus_p), _LEAST_P),
    )
    stop = given.get("stop", ())
    limit = given.get("max_tokens", given.get("max_completion_tokens"))
    seed = given.get("seed")
    return Query(
        chat=chat,
        model=given.get("model"),
        prompts=[given["messages"]] if chat else _list_of_prompts(given["prompt"]),
        n=given.get("n", 1),
        max_tokens=limit,
        most=None if chat or limit is not None else _DEFAULT_TOKENS,
        sampling=sampling,
        seed=None if seed is None else seed % 2**32,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        asked=asked,
        likeliest=likeliest,
        echo=echo,
        stream=given.get("stream", False),
        usage=bool(given.get("stream_options", {}).get("include_usage")),
        token_ids=given.get("return_token_ids", False),
    )


def _stops(given: Mapping[str, Any]) -> dict[str, str]:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) <= _MOST_STOPS and all(0 < len(text) <= _LONGEST_STOP for text in texts):
        return {}
    return {"stop": f"stop: allowed: up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters"}


def _streaming(given: Mapping[str, Any]) -> dict[str, str]:
    _, wrong = _acted_on(given.get("stream_options", {}), STREAM_OPTIONS)
    return {"stream_options": f"stream_options: {'; '.join(wrong.values())}"} if wrong else {}


def _limits(given: Mapping[str, Any]) -> dict[str, str]:
    both = given.get("max_tokens"), given.get("max_completion_tokens")
    if None not in both and both[0] != both[1]:
        return {"max_tokens": f"max_tokens={both[0]} and max_completion_tokens={both[1]}: give one of them"}
    for name in ("max_tokens", "max_completion_tokens"):
        if given.get(name) == 0 and not given.get("echo"):
            return {name: f"{name}=0: allowed: 1 or more; 0 only with echo=true"}
    return {}


def _biases(given: Mapping[str, Any]) -> dict[str, str]:
    for token, value in given.get("logit_bias", {}).items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
        if not (re.fullmatch(r"[0-9]{1,9}", token) and number):
            said = f"{shortened(token)!r}: {shown(value)}"
            return {"logit_bias": f"logit_bias has {said}: allowed: the id of a token and a number in [-100, 100]"}
    return {}


def _prompts(given: Mapping[str, Any]) -> dict[str, str]:
    prompts = _list_of_prompts(given.get("prompt"))
    if not prompts or not all(isinstance(prompt, str) or _is_of_tokens(prompt) for prompt in prompts):
        return {"prompt": "prompt: allowed: a text, a list of tokens, or a list of one or more of these"}
    if given.get("echo") and given.get("max_tokens") == 0 and given.get("n", 1) > 1:
        return {"n": f"n={given['n']}: with max_tokens=0, only n=1 is allowed"}
    return {}


def _list_of_prompts(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or _is_of_tokens(prompt) else prompt if isinstance(prompt, list) else []


def _is_of_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _chat(given: Mapping[str, Any]) -> dict[str, str]:
    if given.get("top_logprobs") and not given.get("logprobs"):
        return {"top_logprobs": "top_logprobs: only with logprobs=true"}
    messages = given.get("messages")
    if not messages:
        return {"messages": "messages: a list of one or more messages is needed"}
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            return {"messages": f"messages[{i}] is {shown(message)}, not an object with a role and a content"}
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(map(_is_text, parts)):
            return {"messages": f"messages[{i}] has content other than text, which the model does not read"}
    return {}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    children: Sequence[Any] = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(map(_has_surrogate, children))


def as_api_error(error: UserError) -> ApiError:
    """Returns the ApiError for an error in a request that passed the checks of `query`."""
    return ApiError(400, " ".join(str(error).split()))
