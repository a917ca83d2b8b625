"""Diagnostics: what ranks record of their training, what is made of it, and checks of machines.

- Spans: `spans` takes all times, and holds the latest in ring buffers (`ring_buffer`).
- Readers: `recorder` keeps a rank's `record` up to date; `tracer` writes Chrome traces (`trace_events`, `trace_files`;
  `timeline` is Horovod's functions for them); `rank_times` has the figures for TensorBoard.
- Reports: `run_report` and `final_report`, from `run_summary`, `time_split`, `findings` and `outcome`; `html_page` and
`charts`
  lay them out.
- Checks: `doctor/`, and `check_build` (which launchers work with which backends).
"""
