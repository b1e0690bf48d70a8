"""Run folders in every state that a command may encounter."""

from trainer.observe.runs import open_run

CONFIG = "base_config: base.yml\nsteps: 20\nenable_checkpointing: true\n"
START = {"step": 0}
START_TEXT = '[{"step": 0}]\n'

OPEN = []


def close() -> None:
    """Closes the runs that `opened` opened."""
    while OPEN:
        OPEN.pop().lease.close()


def opened(base, name="", config=CONFIG, resumes=True, say=lambda line: None):
    OPEN.append(open_run(str(base), name, config, resumes, say))
    return OPEN[-1]


def begun(base, name="", config=CONFIG, resumes=True):
    """Returns the folder of a run whose process started, and ended without finishing the run."""
    run = opened(base, name, config, resumes)
    run.begin(config, START, resumed=False, say=lambda line: None)
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n')
    run.lease.close()
    return run.path


def finished(base, name="", config=CONFIG, resumes=True):
    run = opened(base, name, config, resumes)
    run.begin(config, START, resumed=False, say=lambda line: None)
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n')
    run.finish()
    run.lease.close()
    return run.path
