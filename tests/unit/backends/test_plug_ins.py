"""Backends of third parties: found by their entry point, and named where they are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvkeras.backends import backend_class, backend_names, importable_backends
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.diagnostics.check_build import why_not
from hvkeras.errors import MachineError
from hvkeras.job.backend_choice import facts_of_rank

LAUNCH = Launch("hvkeras run", 0, 2, Rendezvous("run"))


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in that works, one whose import fails, one of another name, and one that is no backend."""
    (tmp_path / "plugged.py").write_text(
        "from hvkeras.backends.tfdist import TfdistBackend\nclass Good(TfdistBackend):\n    name = 'good'\n")
    (tmp_path / "unfit.py").write_text("import not_there\n")
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hvkeras.backends]\ngood = plugged:Good\nunfit = unfit:Backend\n"
                                           "other = plugged:Good\nnumber = math:pi\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugged")
def test_a_plug_in_is_found_and_takes_part_in_the_choice() -> None:
    assert {"good", "unfit", "other", "number"} <= set(backend_names())
    assert backend_class("good").name == "good"
    facts = facts_of_rank("auto", LAUNCH)
    assert facts["preferred"].index("good") > facts["preferred"].index("tfdist"), "built-in ones come first"
    assert facts["objections"]["good"] == ""


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize(("name", "text"), [
    ("unfit", "The backend 'unfit' cannot be imported (ModuleNotFoundError: No module named 'not_there'). Received: "),
    ("unfit", "entry_point='unfit:Backend'. HINT: fix the import, or install or uninstall its package."),
    ("other", "Received: entry_point='plugged:Good', name='good'."),
    ("number", "The entry point 'number' must be a subclass of hvkeras.backends.interface.Backend whose name is"),
])
def test_a_broken_plug_in_is_named_and_not_in_the_way_of_others(name: str, text: str) -> None:
    with pytest.raises(MachineError) as error:
        backend_class(name)
    assert text in str(error.value)
    assert text in why_not(name, LAUNCH, "")
    facts = facts_of_rank("auto", LAUNCH)
    assert text in facts["objections"][name]
    assert name not in facts["preferred"]
    assert name not in importable_backends()
