"""Tables, which each rank has whole: keys are looked up each for itself."""

from __future__ import annotations

from hvkeras.partition.decisions import Call
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, rule


@rule("LookupTableFindV2")
def look_up(call: Call) -> Pattern | None:
    """A value has the shape of the default one."""
    dimensions = call.rank(2)
    return None if dimensions is None else fitted(call, f"#,*,#->*{'.' * dimensions}")
