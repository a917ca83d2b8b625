"""Cases of the brute force, a file a family of rules."""

from __future__ import annotations

import importlib
import pkgutil

from unit.partition.brute_force import Case

FAMILIES: dict[str, dict[str, Case]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").CASES for module in pkgutil.iter_modules(__path__)
}

CASES: dict[str, Case] = {
    f"{family}: {name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}
