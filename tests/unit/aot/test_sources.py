"""Finds the files that a module imports by reading the source."""

import pytest

from trainer.aot.sources import digest, source_files

FILES = {
    "__init__.py": "from pkg.offers import far\n",
    "maker.py": "import pkg.plain\nfrom pkg import room\nfrom pkg.offers import near as there\n",
    "plain.py": 'def late():\n    from pkg.later import x\n\nTABLE = {"a": "pkg.registered:Class"}\n',
    "later.py": "x = 1\n",
    "registered.py": "from . import neighbour\nfrom .room.inner import y\n",
    "neighbour.py": "import other.package\n",
    # `near` is imported from this package, and `far` is not.
    "offers/__init__.py": "from pkg.offers.near import near\nfrom pkg.offers.far import far\n",
    "offers/near.py": "from pkg.room import inner\n",
    "offers/far.py": "",
    # Imported as a whole.
    "room/__init__.py": "from .inner import y\nfrom ..nephew import z\n",
    "room/inner.py": "",
    "nephew.py": "",
    "unused.py": "import pkg.maker\n",
}
USED = set(FILES) - {"offers/far.py", "unused.py"}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "package.py").write_text("")
    return tmp_path


def found(root, module="pkg.maker", belongs="pkg".__eq__):
    return {str(file.relative_to(root)) for file in source_files(root, [module], belongs)}


def test_imports_of_every_form_are_followed_by_name(root):
    assert found(root) == {f"pkg/{name}" for name in USED}


def test_other_packages_are_followed_where_they_belong(root):
    assert found(root, belongs=lambda top: True) == {*(f"pkg/{name}" for name in USED), "other/package.py"}


def test_a_package_that_is_imported_as_a_whole_brings_all_that_it_imports(root):
    (root / "pkg" / "maker.py").write_text("from pkg import offers\n")
    assert "pkg/offers/far.py" in found(root)


@pytest.mark.parametrize("name", FILES)
def test_the_digest_is_of_those_files(root, name):
    def current():
        return digest(root, ["pkg.maker"], "pkg".__eq__)

    before = current()
    (root / "pkg" / name).write_text(f"{FILES[name]}# changed\n")
    assert (current() != before) == (name in USED)
