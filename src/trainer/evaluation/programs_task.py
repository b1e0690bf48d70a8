"""Tasks with programs as answers: question tasks with `programs.judge` as the scoring function."""

from collections import Counter
from collections.abc import Callable, Sequence

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.evaluation.model import Answer, EvaluatedModel
from trainer.evaluation.programs import LATE, LIMITS, PASSED, REASONS, outcome
from trainer.evaluation.questions import QuestionsTask, Say
from trainer.evaluation.specs import Spec, of_problem
from trainer.rl.rewards import Rewards
from trainer.runtime.agreement import from_first

_JUDGE = "trainer.evaluation.programs:judge"
_UNTIL = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # from the HumanEval paper
_MAX_TOKENS = 512
_MARGIN_SECONDS = 30.0  # added to a program's time limit, for running its tests


class ProgramsTask(QuestionsTask):
    """A task of problems in HumanEval's format."""

    found = "reason"

    def __init__(self, spec: Spec, config: Config, limit: int, say: Say):
        """`limit`: the maximum number of problems; -1: all.

        Raises:
          UserError: programs are not allowed, this machine cannot isolate them, or a problem is invalid.
        """
        if not config.eval_tasks_allow_code:
            raise UserError(
                f"{spec.path}: answers run as programs on this machine; eval_tasks_allow_code=true accepts that"
            )
        own = dict(spec.settings)
        limits = {name: own.pop(name, value) for name, value in LIMITS.items()} | {"hidden": own["file"]}
        rows = []
        for line, row in spec.questions if limit < 0 else spec.questions[:limit]:
            try:
                rows.append((line, of_problem(row) | {"limits": limits}))
            except UserError as error:
                raise UserError(f"{own['file']}, line {line}: {error}") from None
        self._seconds = limits["seconds"] + _MARGIN_SECONDS
        own = {"max_tokens": _MAX_TOKENS, "until": _UNTIL} | own | {"score": "function", "function": _JUDGE}
        super().__init__(spec._replace(questions=rows, settings=own), config, limit, say)
        trial = ("def one():\n", "    return 1\n", "def check(one):\n    assert one() == 1\n", "one")
        if (reason := from_first(lambda: outcome(*trial, limits))) != PASSED:
            raise UserError(
                f"{spec.path}: programs cannot be run within the limits: a trial program {reason}. Isolation needs the "
                "program unshare, and Linux 5.12 or later with user namespaces enabled; namespaces: false runs "
                "programs without isolation, with access to the network and to all files that you may write"
            )

    def _judged(
        self, prompts: Sequence[str], answers: Sequence[Answer], model: EvaluatedModel
    ) -> tuple[str, list[float], Sequence[str | None]]:
        judged = self._by_function(prompts, answers, model)
        reasons = [LATE if one.timed_out else REASONS[int(one.reward)] for one in judged]
        counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common(4))
        self._say(f"{self.name}: of {len(reasons)} programs: {counts}")
        return "pass@1", [float(reason == PASSED) for reason in reasons], reasons

    def _judges(self, workers: int, meanwhile: Callable[[], None] = lambda: None) -> Rewards:
        return Rewards([_JUDGE], workers, self._seconds, self._say, "function", meanwhile)
