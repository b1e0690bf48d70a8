"""The JSON of responses to /v1/completions and /v1/chat/completions, complete or in chunks."""

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from trainer.serving.front import Delta, Generation
from trainer.serving.texts import Names, Token

_LEAST = -9999.0  # replaces minus infinity, the logarithm of zero, which JSON cannot represent


class Answer:
    """Builds the JSON of the response to a request."""

    def __init__(self, generation: Generation, model: str, names: Names, prompts: Sequence[str]):
        """`prompts`: the texts of the prompts; the sequence is empty unless the request set echo."""
        self._generation, self._query, self._names, self._prompts = generation, generation.query, names, prompts
        chat = self._query.chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()

    def chunk(self, part: Delta) -> dict[str, Any]:
        """Returns the next chunk of a stream."""
        first = part.choice not in self._begun
        self._begun.add(part.choice)
        text, scored = self._echoed(part) if first else (part.text, [])
        choice: dict[str, Any] = {"index": part.choice}
        if self._query.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        choice |= self._details(part.choice, scored, part.tokens, first) | {"finish_reason": part.end}
        usage = {"usage": None} if self._query.usage else {}
        return self._of_kind("chat.completion.chunk", [choice]) | usage

    def last_chunk(self) -> dict[str, Any]:
        """Returns the chunk with the usage, which ends a stream if the request asked for it."""
        return self._of_kind("chat.completion.chunk", []) | {"usage": self._usage()}

    def whole(self, parts: Sequence[Delta]) -> dict[str, Any]:
        """Returns the complete response, from all parts of all choices."""
        choices = [self._choice(i, [part for part in parts if part.choice == i]) for i in range(self._count)]
        return self._of_kind("chat.completion", choices) | {"usage": self._usage()}

    @property
    def _count(self) -> int:
        return len(self._generation.texts)

    def _choice(self, i: int, parts: Sequence[Delta]) -> dict[str, Any]:
        text, scored = self._echoed(parts[0])
        text += "".join(part.text for part in parts[1:])
        tokens = [token for part in parts for token in part.tokens]
        said = {"message": {"role": "assistant", "content": text}} if self._query.chat else {"text": text}
        return {"index": i, **said, **self._details(i, scored, tokens, True), "finish_reason": parts[-1].end}

    def _echoed(self, part: Delta) -> tuple[str, list[Token]]:
        """Returns a pair for the first part of a choice: its text, and the list of scored prompt tokens. If the request
        set echo, the text begins with the prompt; otherwise the list is empty."""
        if not self._query.echo:
            return part.text, []
        row, scores, before = self._generation.prompt_of(part.choice), part.prompt, list[Token]()
        if scores is not None:
            likeliest: list[Any] = [(), *map(zip, scores.tokens.tolist(), scores.top.tolist())]
            log_probs, starts = [None, *scores.log_probs.tolist()], self._names.starts(row)
            before = [Token(*each) for each in zip(row, log_probs, map(tuple, likeliest), starts, strict=True)]
        return self._prompt_text(part.choice) + ("" if self._query.max_tokens == 0 else part.text), before

    def _prompt_text(self, choice: int) -> str:
        return self._prompts[choice // self._query.n] if self._query.echo else ""

    def _details(self, choice: int, scored: list[Token], tokens: list[Token], first: bool) -> dict[str, Any]:
        """Returns the fields `logprobs`, `token_ids` and `prompt_token_ids` of a choice. `scored`: the scored prompt
        tokens; `tokens`: the generated tokens; `first`: whether this is the first part of the choice."""
        found: dict[str, Any] = {"logprobs": None}
        tokens = [] if self._query.max_tokens == 0 else tokens
        if self._query.likeliest is not None:
            of_tokens = self._of_chat if self._query.chat else self._of_completion
            before = len(self._prompt_text(choice))
            after = [token._replace(start=token.start + before) for token in tokens]
            found["logprobs"] = of_tokens([*scored, *after], self._query.likeliest)
        if self._query.token_ids:
            found["token_ids"] = [token.id for token in tokens]
            found |= {"prompt_token_ids": self._generation.prompt_of(choice)} if first else {}
        return found

    def _of_completion(self, tokens: Sequence[Token], count: int) -> dict[str, Any]:
        top: list[dict[str, float] | None] = []
        for token in tokens:
            shown: dict[str, float] = {}
            for i, log_prob in (*token.likeliest[:count], (token.id, token.log_prob)):
                if log_prob is not None:
                    shown.setdefault(self._names.text(i), _finite(log_prob))
            top.append(shown if token.log_prob is not None else None)
        return {
            "tokens": [self._names.text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.log_prob) for token in tokens],
            "top_logprobs": top,
            "text_offset": [token.start for token in tokens],
        }

    def _of_chat(self, tokens: Sequence[Token], count: int) -> dict[str, Any]:
        entries = [
            self._entry(token.id, token.log_prob)
            | {"top_logprobs": [self._entry(*pair) for pair in token.likeliest[:count]]}
            for token in tokens
        ]
        return {"content": entries}

    def _entry(self, token: int, log_prob: float | None) -> dict[str, Any]:
        found = list(self._names.bytes_of(token))
        return {"token": self._names.text(token), "logprob": _finite(log_prob), "bytes": found}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._generation.prompts))
        completion = 0 if self._query.max_tokens == 0 else sum(text.count for text in self._generation.texts)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _of_kind(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {"object": kind if self._query.chat else "text_completion", **self._head, "choices": choices}


def _finite(log_prob: float | None) -> Any:
    return log_prob if log_prob is None or math.isfinite(log_prob) else _LEAST
