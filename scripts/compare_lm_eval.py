"""Compares trainer.evaluate with lm-eval's transformers model on tasks of lm-eval, request by request.

    python -m trainer.evaluate hf-model tasks=a.yml,b.yml dtype=float32 max_target_length=64 output=found
    python scripts/compare_lm_eval.py found hf-model a.yml b.yml --length 64

    python scripts/compare_lm_eval.py --write FOLDER

The second command needs torch, transformers and lm-eval. For each task it prints the number of requests, the largest
difference of log-likelihoods, the number of equal answers (for log-likelihoods: the number of requests for which both
programs agree whether the continuation is the greedy one), and the CPU time of lm-eval's model. With --bos, the
tokenizer of lm-eval's model adds the bos token to texts. The third command writes tasks of English text: next.yml (100
questions with two choices), rolling.yml (6 texts) and answers.yml (6 texts to continue). docs/benchmarks/evaluation.md
has results.
"""

import argparse
import json
import logging
import time
from pathlib import Path

from price_quantization import write_tasks


def main() -> int:
    """Returns the exit code: 1 if a log-likelihood differs by more than 1e-4 or an answer differs at all, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("model", nargs="?")
    parser.add_argument("tasks", nargs="*", metavar="TASK.yml")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--length", type=int, default=512, help="max_target_length of the first command")
    parser.add_argument("--rows", type=int, default=8, help="sequences per batch (default: 8)")
    parser.add_argument("--bos", action="store_true")
    parser.add_argument("--chat", action="store_true", help="apply the chat template, as use_chat_template=true does")
    given = parser.parse_args()
    if given.write:
        return write(given.write)

    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.disable(logging.WARNING)
    settings = {"device": "cpu", "dtype": "float32", "batch_size": given.rows, "max_length": given.length}
    model = HFLM(pretrained=given.model, **settings, **({"add_bos_token": True} if given.bos else {}))
    failed = False
    for path in given.tasks:
        loaded = TaskManager(include_defaults=False).load([path])
        ((name, task),) = loaded["tasks"].items()
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
        began = time.process_time()
        chat = {"apply_chat_template": given.chat, "fewshot_as_multiturn": given.chat}
        found = evaluate(model, loaded, bootstrap_iters=0, **chat)
        seconds = time.process_time() - began
        theirs = [response for row in found["samples"][name] for response in row["resps"]]
        lines = (given.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ours = [response for line in lines for response in json.loads(line)["resps"]]
        assert len(ours) == len(theirs), f"{name}: {len(ours)} requests, but {len(theirs)} of lm-eval's model"
        largest, equal = 0.0, 0
        for (one,), (other,) in zip(ours, theirs, strict=True):
            numbers = [value[0] if isinstance(value, list | tuple) else value for value in (one, other)]
            if isinstance(numbers[0], float):
                largest = max(largest, abs(numbers[0] - numbers[1]))
            equal += one[1] == other[1] if isinstance(one, list) else one == other or isinstance(one, float)
        failed |= largest > 1e-4 or equal < len(ours)
        print(
            f"{name}: {len(ours)} requests, log-likelihoods within {largest:.1e}, {equal} equal, {seconds:.1f} s of CPU"
        )
    return int(failed)


def write(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder, questions=100)
    rows = [json.loads(line) for line in (folder / "next.jsonl").read_text().splitlines()]
    text = (folder / "text.txt").read_text()
    files = {
        "next": rows,
        "rolling": [{"text": text[i * 4000 : i * 4000 + 3500]} for i in range(6)],
        "answers": [{"question": text[i * 4000 : i * 4000 + 300], "answer": ""} for i in range(6)],
    }
    kinds = {
        "next": {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"},
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
        "answers": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"},
    }
    kinds["next"] |= {"doc_to_choice": "{{choices}}", "target_delimiter": " "}
    kinds["answers"] |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False}}
    for name, kind in kinds.items():
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in files[name]))
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder.absolute() / f"{name}.json")}},
        }
        task = {"task": name, "test_split": "test"} | data | kind
        (folder / f"{name}.yml").write_text(json.dumps(task))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
