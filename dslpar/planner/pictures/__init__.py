"""Pictures of a job: each module draws one `dslpar.reporting.picture.Picture`.

Most modules also have the rows of the table below the picture.
"""
