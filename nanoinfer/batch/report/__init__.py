"""The report of a batch job: what a run was like, as charts and tables on a page."""
