"""Read shell scripts without running a shell: a parser of bash, an interpreter with unknown values, and launches."""
