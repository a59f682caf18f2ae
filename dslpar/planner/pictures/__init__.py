"""Pictures of a job: each module draws one `dslpar.reporting.picture.Picture`, and has the rows of its table."""
