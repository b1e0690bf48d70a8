"""Compares the vocabularies of two tokenizers token by token, for distillation."""

from typing import NamedTuple

from trainer.config.errors import UserError
from trainer.config.words import counted
from trainer.data.tokenizer import Tokenizer

_SHOWN = 40  # the maximum number of a token's characters in a message


class Shared(NamedTuple):
    """The tokens that two tokenizers have in common.

    Attributes:
      tokens: the number of ids that both tokenizers have, which is the smaller of `student` and `teacher`. The tokens
        with these ids are equal.
      student, teacher: the largest id + 1 of the student's and of the teacher's tokenizer. The models' embedding tables
        may have more rows.
      note: a message for the user if one vocabulary is a prefix of the other, or if documents begin or end with
        different tokens; else "".
    """

    tokens: int
    student: int
    teacher: int
    note: str


def shared_tokens(
    student: Tokenizer,
    teacher: Tokenizer,
    names: tuple[str, str] = ("the student's tokenizer", "the teacher's tokenizer"),
) -> Shared:
    """Compares the tokens with equal ids. `names`: the tokenizers' names in messages.

    Two tokens are equal if `Tokenizer.vocabulary` returns the same bytes for both, even if the tokenizers are of
    different types. The bytes of a special token are its name. A special token of one tokenizer must be a special token
    or an added token of the other: an added token need not be marked as special, because tokenizer formats, and
    published copies of a tokenizer, differ in which added tokens they mark. An id without a token in one tokenizer must
    have none in the other.

    Merges and the splitting of texts may differ, because only the student's tokenizer encodes texts. The tokenizers may
    begin and end documents with different tokens, because the begin and end tokens of one tokenizer are also tokens of
    the other. If they begin or end documents differently, `Shared.note` names these tokens.

    Raises:
      UserError: the tokenizers have different tokens for an id.
    """
    both = (student, teacher)
    ours, theirs = (tokenizer.vocabulary() for tokenizer in both)
    special = [set(tokenizer.special_tokens.values()) for tokenizer in both]
    added = [set(tokenizer.markers.values()) | special[i] for i, tokenizer in enumerate(both)]
    ordinary_in_one = (special[0] - added[1]) | (special[1] - added[0])
    common = min(len(ours), len(theirs))
    differing = [i for i in range(common) if ours[i] != theirs[i] or i in ordinary_in_one]

    def shown(one: int, other: int) -> list[str]:
        cases = zip((ours, theirs), special, (one, other), strict=True)
        return [_shown(tokens[i], i in ids) for tokens, ids, i in cases]

    if differing:
        first, second = shown(differing[0], differing[0])
        raise UserError(
            f"{names[0]} and {names[1]} differ in {len(differing):,} of {counted(common, 'token')}. The first is token "
            f"{differing[0]}: {first} and {second}. A student learns the probabilities of tokens by id, so both models "
            "need the same vocabulary: use a teacher of the student's model family, or a student that was created "
            "with the teacher's tokenizer"
        )
    notes = []
    over = f"the divergence is computed over the {common:,} common tokens only"
    if rest := theirs[common:]:
        more = counted(len(rest) - rest.count(None), "more token")
        notes.append(f"{names[1]} has {more}: {over}, and the teacher's distribution leaves out the others")
    if rest := ours[common:]:
        more = counted(len(rest) - rest.count(None), "more token")
        notes.append(
            f"{names[0]} has {more}: {over}, and after the first extra token, a document is trained on its labels only"
        )
    for role, one, other in (("begin", student.bos, teacher.bos), ("end", student.eos, teacher.eos)):
        if one is not None and other is not None and one != other:
            first, second = shown(one, other)
            notes.append(f"documents {role} with {first} as in {names[0]}, not with {second} as in {names[1]}")
    return Shared(common, len(ours), len(theirs), "; ".join(notes))


def _shown(token: bytes | None, is_special: bool) -> str:
    if token is None:
        return "no token"
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return f"the bytes {token[:_SHOWN]!r}"
    cut = f"... ({len(text)} characters)" if len(text) > _SHOWN else ""
    return f"the {'special' if is_special else 'ordinary'} token {text[:_SHOWN]!r}{cut}"
