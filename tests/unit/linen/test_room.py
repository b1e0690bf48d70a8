"""The Linen package: no other code imports Linen, and it is small enough to delete in one commit."""

from sources import FILES, SOURCE, imported


def test_linen_is_imported_in_its_package_only():
    linen = {path for path in FILES if any(n.startswith(("flax.linen", "flax.training")) for n in imported(path))}
    assert linen
    assert {path.relative_to(SOURCE).parts[0] for path in linen} == {"linen"}


def test_the_linen_package_is_small():
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE / "linen").glob("*.py")) < 680
