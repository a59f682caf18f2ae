"""Context parallelism against one process: attention cases, long sequences, and their memory."""
