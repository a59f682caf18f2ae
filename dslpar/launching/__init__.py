"""How a job starts: command lines of the launchers, looks at the hosts before, and the wait until it has ended."""
