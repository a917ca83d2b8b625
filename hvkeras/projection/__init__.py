"""Projections: what a measured job would do on more ranks, by a cost model; docs/projection.md has the formulas."""
