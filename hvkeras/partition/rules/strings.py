"""Strings, each for itself."""

from __future__ import annotations

from dataclasses import replace

from hvkeras.partition.decisions import Call, Decision, computed_by_all
from hvkeras.partition.integers import Integers
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import pattern, rule
from hvkeras.partition.rules.reductions import reduced

pattern("AsString DecodeBase64 EncodeBase64 StaticRegexFullMatch StaticRegexReplace StringLength StringLower"
        " StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper"
        " UnicodeScript UnicodeTranscode", "*->*")
pattern("RegexFullMatch", "*,#->*")
pattern("RegexReplace", "*,#,#->*")
pattern("StringJoin", "*->*")
pattern("Substr", "*,*,*->*")


@rule("ReduceJoin")
def join(call: Call) -> Pattern | None:
    """Along axes, which each rank has whole."""
    return reduced(call, None)


@rule("StringSplit", "StringSplitV2")
def split(call: Call) -> Decision:
    """Strings have unlike numbers of parts, in a sparse matrix with as many rows as there are strings."""
    found, shape = computed_by_all(call), call.shape(0)
    size = Integers((2,), (shape[0] if shape else None, None))
    return replace(found, results=(*found.results[:2], replace(found.results[2], integers=size)))
