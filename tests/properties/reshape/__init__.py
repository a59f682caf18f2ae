"""Promise 3 as a table: a checkpoint of one layout resumes on any other. `python -m tests.properties.reshape`"""
