"""`python -m trainer.report RUN [RUN ...] [out=FILE]`: writes a report page on one run, or on several side by side.

Does not import JAX."""

from collections.abc import Sequence
from pathlib import Path

from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.paths import local_path
from trainer.config.words import visible
from trainer.observe.record import read_run
from trainer.observe.report import report_html
from trainer.observe.rundir import REPORT_FILE
from trainer.runtime.folders import check_folder, replace_file

HELP = """usage: python -m trainer.report RUN [RUN ...] [out=FILE]

Writes a page with the charts and the configuration of a run, or of several runs side by side.
RUN   the folder of a run, base_output_directory/run_name
out   the page; default: report.html in the folder of one run, or in the current folder for several"""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if words and words[0] in ("--help", "-h", "help"):
        print(HELP)
        return
    outs = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    folders = [Path(local_path(word, "")) for word in words if not word.startswith("out=")]
    if not folders:
        raise UserError("give the folder of a run: python -m trainer.report RUN [RUN ...] [out=FILE]; see --help")
    # A page on several runs goes to the current folder, because it belongs to no single run.
    default = folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE)
    out = Path(local_path(outs[-1], "out=")) if outs else default
    page = report_html([read_run(folder) for folder in folders])
    try:
        if not outs or any(_is_below(out.parent, folder) for folder in folders):
            replace_file(out, page)
        else:  # outside of the runs' folders, `out` may be a link or a pipe
            out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {error.strerror or error}; choose another file") from error
    print(f"wrote {visible(str(out))} ({len(page.encode()) / 1000:,.0f} kB)")


def _is_below(path: Path, folder: Path) -> bool:
    """Returns whether `path` is in `folder`. Raises UserError if a link on the path leads out of `folder`."""
    inside = path.absolute().is_relative_to(folder.absolute())
    if inside and (part := path.absolute().relative_to(folder.absolute())).parts:
        check_folder(folder, [str(part)])
    return inside or path.resolve().is_relative_to(folder.resolve())


if __name__ == "__main__":
    main()
