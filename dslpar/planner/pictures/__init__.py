"""Pictures of a job: each module draws one, as a `dslpar.reporting.picture.Picture`, and has the rows of its table."""
