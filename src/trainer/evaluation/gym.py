"""Tasks of reasoning-gym: a data set generates questions from a seed, and a verifier judges answers."""

import json
import os
import subprocess
import sys

from trainer.config.errors import UserError, nearest, shortened
from trainer.config.words import visible
from trainer.evaluation.specs import Spec

_SIZE = 100
_SECONDS = 300  # the time limit for generating the questions
_JUDGE = "trainer.evaluation.gym_rows:judge"
_PROGRAM = (
    "import json, sys; sys.path[:], given = json.loads(sys.argv[1]); from trainer.evaluation.gym_rows import main; "
)
_PROGRAM += "main(given)"


def with_questions(spec: Spec, limit: int, allow_code: bool) -> Spec:
    """Returns a copy of `spec` with generated questions and the name of a function that judges answers. `limit`: the
    maximum number of questions; -1: all.

    Args:
      allow_code: whether the verifier may evaluate answers as code.

    Raises:
      UserError: the data set or a field does not exist, the data set rejects a value, or the verifier needs
        `allow_code`.
    """
    own = dict(spec.settings)
    name, seed, size = own.pop("dataset"), own.pop("seed", 0), own.pop("size", _SIZE)
    task = [name, seed, size, own.pop("config", {})]
    try:
        child = subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                _PROGRAM,
                json.dumps([sys.path, json.dumps([task, size if limit < 0 else limit])]),
            ],
            capture_output=True,
            timeout=_SECONDS,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{spec.path}: generating the questions takes more than {_SECONDS} s; give a smaller size"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(visible(f"{spec.path}: reasoning-gym failed: {shortened(''.join(said))}")) from None
    found = json.loads(child.stdout.splitlines()[-1])
    if "problem" in found:
        field, value, choices = found["problem"], found["value"], found["choices"]
        there = f": reasoning-gym does not know it{nearest(value, choices)}; allowed: {', '.join(choices)}"
        raise UserError(visible(f"{spec.path}: {field}: {value}{there if choices else ''}"))
    if found["evaluates"] and not allow_code:
        raise UserError(
            f"{spec.path}: the verifier of {name} evaluates answers as code, so the model's answers can do "
            "anything that you can do on this machine; eval_tasks_allow_code=true accepts that"
        )
    rows = [
        (i + 1, {"question": question, "answer": answer, "task": json.dumps(task), "index": i})
        for i, (question, answer) in enumerate(found["rows"])
    ]
    return spec._replace(questions=rows, settings=own | {"score": "function", "function": _JUDGE})
