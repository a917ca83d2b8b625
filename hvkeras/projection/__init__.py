"""Projects a measured job to more ranks with a cost model; docs/projection.md has the formulas."""
