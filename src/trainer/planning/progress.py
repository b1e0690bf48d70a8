"""The lines that a search prints while it runs."""

from collections.abc import Callable

from trainer.planning.answer import line_of
from trainer.planning.candidate import Candidate
from trainer.planning.search import Search
from trainer.planning.settings import settings_text
from trainer.planning.space import Changes


def run_and_tell(search: Search, say: Callable[[str], None]) -> None:
    """Runs a search. Before each compilation, prints the point and the estimated time left; then prints the result."""
    seconds = [row["wall_seconds"] for row in search.journal.rows.values() if row["report"]]

    def starts(changes: Changes) -> None:
        done = search.counts.compiled + search.counts.known
        minutes = max(1, round((search.limit - done) * sum(seconds) / len(seconds) / 60)) if seconds else 0
        left = f", about {minutes} min left" if seconds else ""
        say(f"compiling {done + 1} of at most {search.limit}{left}: {settings_text(changes)}")

    def ends(candidate: Candidate) -> None:
        seconds.append(candidate.row["wall_seconds"])
        say(line_of(candidate) + ("  <- best so far" if candidate is search.best else ""))

    search.run(starts, ends)
