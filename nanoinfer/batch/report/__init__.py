"""The report of a batch job: what a run was like, drawn as charts and put on a page."""
