"""When things happened on this rank: the recorder of spans, and its readers: record, timeline, trace."""
