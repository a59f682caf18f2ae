"""What a run trains on: samples, and the order in which they come."""
