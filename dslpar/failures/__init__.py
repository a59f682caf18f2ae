"""How a job ends that fails: the guard beside each rank, what it hears and tells, and who was first."""
